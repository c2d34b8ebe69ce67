# SPDX-License-Identifier: Apache-2.0
"""The catalog of tensors is what models read and what transformers saves; its bytes are theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout.families import known
from phalanx.layout.families.registry import names
from phalanx.layout.weight_tensors import tensors
from phalanx.layout.weights import itemsize, layer_bytes
from phalanx.models import registry, weights
from phalanx.models.slices import LayerContext

SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip

CASES = [
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    ("Mistral", {}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 16, "attention_bias": True}),
]


def _shape(family: str, traits: dict[str, Any]) -> ModelShape:
    return ModelShape.from_config({"architectures": [f"{family}ForCausalLM"], **SIZES, **traits})


@pytest.mark.parametrize(("family", "traits"), CASES)
def test_the_catalog_is_what_transformers_saves(family: str, traits: dict[str, Any]) -> None:
    with torch.device("meta"):
        reference = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES, **traits))
    assert tensors(_shape(family, traits)) == {name: tuple(weight.shape) for name, weight in reference.named_parameters()}


@pytest.mark.parametrize(("family", "traits"), CASES)
def test_the_catalog_is_what_our_models_read(family: str, traits: dict[str, Any]) -> None:
    shape = _shape(family, traits)
    model = registry.build(shape, range(3), LayerContext(Solo(), torch.float32, torch.device("meta")))
    assert {part.name: part.shape for part in weights.slices(model)} == tensors(shape)


class Rank(Solo):
    """The first of `size` ranks, of which nothing is computed."""

    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in names() if "quantization_config" not in known(name)])
def test_layers_are_split_as_declared(name: str, tp: int) -> None:
    """What a rank reads of a layer has the bytes that the planner counts. Quantized models differ: scales are read apart."""
    config = known(name)
    assert config is not None
    shape = ModelShape.from_config(config)
    model = registry.build(shape, range(1, 2), LayerContext(Rank(tp), torch.bfloat16, torch.device("meta")))
    read = sum(part.target.nbytes for part in weights.slices(model))
    assert read == layer_bytes(shape, 1, "bf16", Layout(tp=tp))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("family", "traits"), CASES)
def test_bytes_are_those_of_the_stages(family: str, traits: dict[str, Any], dtype: str) -> None:
    shape = _shape(family, traits)
    vocabulary, norm = (count * shape.hidden_size * itemsize(dtype) for count in (shape.vocab_size, 1))
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def read(layers: range) -> int:
        model = registry.build(shape, layers, LayerContext(Solo(), kind, torch.device("meta")))
        return sum(part.target.nbytes for part in weights.slices(model))

    each = [layer_bytes(shape, layer, dtype, Layout()) for layer in range(3)]
    assert [read(range(1)), read(range(1, 2)), read(range(2, 3))] == [each[0] + vocabulary, each[1], each[2] + vocabulary + norm]

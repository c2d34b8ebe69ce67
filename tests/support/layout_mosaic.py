# SPDX-License-Identifier: Apache-2.0
"""A family that is made in a test, with a layer of each kind and weights in int8. `models_mosaic` computes it.

| layer | attention | feed-forward | norms |
|---|---|---|---|
| 0 | grouped-query | dense | before each block |
| 1 | grouped-query, in a window | dense | behind each block |
| 2 | linear, with a state for each request | experts | before each block |
| 3 | grouped-query, in a window | experts | before each block |
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import model_fields, quantization_config
from phalanx.config.experts import read_qwen3_moe
from phalanx.config.json_fields import FieldTable, JsonFields
from phalanx.config.model import FAMILIES, Family, ModelShape
from phalanx.config.quantization import Quantization
from phalanx.layout.cache import CacheTensor
from phalanx.layout.families import dense, registry
from phalanx.layout.families.declare import WeightTensor
from phalanx.layout.families.registry import LayerDeclaration
from tests.support.forked_python import FORKS_TOO

MOSAIC, INT8 = "MosaicForCausalLM", "int8"
POST_NORM, STATE = 1, 2
CONFIG: dict[str, Any] = {
    "architectures": [MOSAIC], "vocab_size": 384, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256, "torch_dtype": "float32",
    "use_sliding_window": True, "sliding_window": 7, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "mlp_only_layers": [0, 1],
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


@dataclass(frozen=True)
class Int8(Quantization):
    """Weights in int8 with a scale for each row; activations in 16 or 32 bit."""

    @property
    def linear_method(self) -> str:
        return "tests.support.models_mosaic:Int8Weight"

    @property
    def stored(self) -> str:
        return "INT8"

    def weight_bytes(self, rows: int, columns: int) -> int:
        return rows * columns + 4 * rows

    @property
    def beside_weight(self) -> tuple[str, ...]:
        return ("weight_scale",)


def read_int8(config: JsonFields) -> Int8:
    return Int8(INT8, "channel", "none", ignore=tuple(config.optional_texts("ignore") or ()))


def tensors(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """As Llama's; a layer with norms behind its blocks has one in place of that before attention."""
    for tensor in dense.layer(shape, index):
        behind = tensor.name.replace(".input_layernorm.", ".post_feedforward_layernorm.")
        yield replace(tensor, name=behind) if index == POST_NORM else tensor


def cache(shape: ModelShape, index: int, dtype: str) -> Iterator[CacheTensor]:
    """The state of a KV head is a matrix."""
    if index == STATE:
        yield CacheTensor("state", (shape.num_kv_heads, shape.head_dim, shape.head_dim), "fp32", "request", heads=shape.num_heads)
    else:
        yield from dense.cache(shape, index, dtype)


def entries() -> list[tuple[MutableMapping[str, Any], str, Any]]:
    """(what knows families, or quantizations; by which name; what it is told of this one)."""
    table = model_fields.MODEL["Qwen3MoeForCausalLM"]
    return [
        (FAMILIES, MOSAIC, Family(256, window="chosen", experts=read_qwen3_moe)),
        (model_fields.MODEL, MOSAIC, replace(table, honoured=table.honoured | {"layer_types", "max_window_layers"})),
        (registry.DECLARATIONS, MOSAIC, LayerDeclaration(tensors, cache)),
        (quantization_config.READERS, INT8, read_int8),
        (quantization_config.TABLES, INT8, FieldTable.of("quant_method ignore")),
    ]


def add(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Make the family known to this process, up to the end of a test or for good."""
    for known, name, entry in entries():
        if monkeypatch is None:
            known[name] = entry
        else:
            monkeypatch.setitem(known, name, entry)


SITE = FORKS_TOO + "from tests.support import layout_mosaic\nlayout_mosaic.add()\nimport tests.support.models_mosaic\n"
"""The content of a sitecustomize.py by which every process knows the family as soon as it starts."""

ROOT = Path(__file__).parents[2]

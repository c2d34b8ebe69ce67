# SPDX-License-Identifier: Apache-2.0
"""From an architecture's name to how its config.json is read and which tensors it has; and the models that are known offline.

To add a family: one file beside this one with `read` and `layer`, and its line in `_FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.config.json_fields import Fields
from phalanx.config.model import FAMILIES, ModelShape
from phalanx.config.quantization import read_quantization
from phalanx.errors import ModelNotFound, UnsupportedArchitecture
from phalanx.plan.families import deepseek, dense, gpt_oss, mixtral, qwen3_moe
from phalanx.plan.families.declare import Tensor
from phalanx.plan.shape import Shape

_KNOWN = Path(__file__).parent.parent / "data" / "models.json"
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class _Family(NamedTuple):
    read: Callable[[Shape, Fields], Shape]
    layer: Callable[[Shape, int], Iterator[Tensor]]


_FAMILIES = {
    "MixtralForCausalLM": _Family(mixtral.read, mixtral.layer),
    "Qwen3MoeForCausalLM": _Family(qwen3_moe.read, qwen3_moe.layer),
    "DeepseekV2ForCausalLM": _Family(deepseek.read, deepseek.layer),
    "DeepseekV3ForCausalLM": _Family(deepseek.read, deepseek.layer),
    "GptOssForCausalLM": _Family(gpt_oss.read, gpt_oss.layer),
}
"""Beside those of `config.model.FAMILIES`, which are read there."""


def shape_of(config: Mapping[str, Any], *, file: str = "config.json") -> Shape:
    """The shape that a config.json says. Raises UnsupportedArchitecture, or ModelError naming file and field."""
    named = [str(name) for name in config.get("architectures") or ()]
    if any(name in FAMILIES for name in named):
        return Shape.of(ModelShape.from_config(config, file=file))
    architecture = next((name for name in named if name in _FAMILIES), None)
    if architecture is None:
        raise UnsupportedArchitecture(
            f"{file} has architectures={named}", held=f"planned for are: {', '.join([*FAMILIES, *_FAMILIES])}",
            next="plan for a checkpoint of one of these families",
        )  # fmt: skip
    return _FAMILIES[architecture].read(_common(Fields(config, file=file), architecture), Fields(config, file=file))


def _common(fields: Fields, architecture: str) -> Shape:
    heads, hidden, layers = (fields.count(name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    mxfp4 = (fields.optional_mapping("quantization_config") or {}).get("quant_method") == "mxfp4"
    return Shape(
        architecture, fields.count("vocab_size"), hidden, fields.count("intermediate_size"), layers, heads,
        fields.count("num_key_value_heads", heads), fields.count("head_dim", max(hidden // heads, 1)),
        fields.count("max_position_embeddings", 4096), (None,) * layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        quantization=None if mxfp4 else read_quantization(fields),
        dtype=_DTYPES.get(fields.text("dtype", fields.text("torch_dtype", "bfloat16")), "bf16"),
    )  # fmt: skip


def layer_tensors(shape: Shape, layer: int) -> tuple[Tensor, ...]:
    """The declared tensors of one decoder layer."""
    family = _FAMILIES.get(shape.architecture)
    return tuple((dense.layer if family is None else family.layer)(shape, layer))


def outer_tensors(shape: Shape) -> tuple[Tensor, ...]:
    """Embedding, final norm and head."""
    return tuple(dense.outer(shape))


@cache
def _document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_KNOWN.read_text(encoding="utf-8"))["models"]
    return loaded


def names() -> list[str]:
    """The models that are known without a network."""
    return list(_document())


def known(model: str) -> dict[str, Any] | None:
    """The config.json of a model that is known offline, by its Hub id or a short name, in either case; None for another."""
    wanted = model.lower()
    for name, entry in _document().items():
        if wanted in (name.lower(), *(alias.lower() for alias in entry["aliases"])):
            config: dict[str, Any] = entry["config"]
            return config
    return None


def parameters(name: str) -> float:
    """Published parameters of a known model, in billions. Raises ModelNotFound."""
    if name not in _document():
        raise ModelNotFound(f"model {name!r} is not known offline", next=f"known: {', '.join(names())}")
    return float(_document()[name]["parameters"])

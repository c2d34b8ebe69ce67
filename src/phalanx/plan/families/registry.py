# SPDX-License-Identifier: Apache-2.0
"""From an architecture's name to which tensors it has; and the models that are known offline.

To add a family: one file beside this one with `layer`, and its line in `_FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import phalanx.plan.families.deepseek as deepseek
import phalanx.plan.families.dense as dense
import phalanx.plan.families.gpt_oss as gpt_oss
import phalanx.plan.families.mixtral as mixtral
import phalanx.plan.families.qwen3_moe as qwen3_moe
from phalanx.config.model import FAMILIES, ModelShape
from phalanx.errors import ModelNotFound, UnsupportedArchitecture
from phalanx.plan.families.declare import Tensor
from phalanx.plan.shape import Shape

_KNOWN = Path(__file__).parent.parent / "data" / "models.json"


_FAMILIES: dict[str, Callable[[Shape, int], Iterator[Tensor]]] = {
    "MixtralForCausalLM": mixtral.layer,
    "Qwen3MoeForCausalLM": qwen3_moe.layer,
    "DeepseekV2ForCausalLM": deepseek.layer,
    "DeepseekV3ForCausalLM": deepseek.layer,
    "GptOssForCausalLM": gpt_oss.layer,
}
"""The tensors of a layer, beside the dense families of `config.model.FAMILIES`."""


def shape_of(config: Mapping[str, Any], *, file: str = "config.json") -> Shape:
    """The shape that a config.json says. Raises UnsupportedArchitecture, or ModelError naming file and field."""
    named = [str(name) for name in config.get("architectures") or ()]
    if not any(name in FAMILIES for name in named):
        raise UnsupportedArchitecture(
            f"{file} has architectures={named}", held=f"planned for are: {', '.join(FAMILIES)}",
            next="plan for a checkpoint of one of these families",
        )  # fmt: skip
    return Shape.of(ModelShape.from_config(config, file=file))


def layer_tensors(shape: Shape, layer: int) -> tuple[Tensor, ...]:
    """The declared tensors of one decoder layer."""
    return tuple(_FAMILIES.get(shape.architecture, dense.layer)(shape, layer))


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

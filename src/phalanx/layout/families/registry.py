# SPDX-License-Identifier: Apache-2.0
"""From an architecture's name to which tensors it has; and the models that are known offline.

A family whose tensors or cache are not those of `dense` has a file beside this one, and a line in `DECLARATIONS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import phalanx.layout.families.deepseek as deepseek
import phalanx.layout.families.dense as dense
import phalanx.layout.families.gemma4 as gemma4
import phalanx.layout.families.gpt_oss as gpt_oss
import phalanx.layout.families.llama4 as llama4
import phalanx.layout.families.mamba2 as mamba2
import phalanx.layout.families.mixtral as mixtral
import phalanx.layout.families.qwen3_next as qwen3_next
from phalanx.config.model import ModelShape
from phalanx.errors import ModelNotFound
from phalanx.layout.cache import Cache, CacheTensor, in_group, layer_groups
from phalanx.layout.families.declare import WeightTensor

_KNOWN = Path(__file__).parent.parent / "data" / "models.json"


class LayerDeclaration(NamedTuple):
    """What a family declares of layer `index` of a model.

    tensors (shape, index): of the checkpoint.
    cache (shape, index, dtype of keys and values): what the layer keeps between steps.
    unread (shape, index): beginnings of names that checkpoints may have of the layer, and that are not loaded.
    outer (shape): of embedding, final norm and head, and what else no layer has.
    spellings: parts of names in further checkpoints -> what they are in the declared names.
    """

    tensors: Callable[[ModelShape, int], Iterable[WeightTensor]]
    cache: Callable[[ModelShape, int, str], Iterable[CacheTensor]] = dense.cache
    outer: Callable[[ModelShape], Iterable[WeightTensor]] = dense.outer
    unread: Callable[[ModelShape, int], tuple[str, ...]] | None = None
    spellings: Mapping[str, str] = MappingProxyType({})


DENSE = LayerDeclaration(dense.layer)
DECLARATIONS = {
    "Llama4ForCausalLM": LayerDeclaration(llama4.layer),
    "MixtralForCausalLM": LayerDeclaration(mixtral.layer),
    "MiniMaxM2ForCausalLM": LayerDeclaration(mixtral.layer),
    "Phi3ForCausalLM": LayerDeclaration(dense.fused_layer),
    "DeepseekV2ForCausalLM": LayerDeclaration(deepseek.layer, deepseek.cache),
    "DeepseekV3ForCausalLM": LayerDeclaration(deepseek.layer, deepseek.cache),
    "DeepseekV32ForCausalLM": LayerDeclaration(deepseek.layer, deepseek.cache),
    "GlmMoeDsaForCausalLM": LayerDeclaration(deepseek.layer, deepseek.cache),
    "Glm4MoeLiteForCausalLM": LayerDeclaration(deepseek.layer, deepseek.cache),
    "Mistral4ForCausalLM": LayerDeclaration(deepseek.layer, deepseek.cache),
    "Glm4MoeForCausalLM": LayerDeclaration(deepseek.glm4_moe),
    "HYV3ForCausalLM": LayerDeclaration(deepseek.hy_v3),
    "Ernie4_5_MoeForCausalLM": LayerDeclaration(deepseek.ernie_moe, unread=deepseek.of_images),
    "GraniteMoeHybridForCausalLM": LayerDeclaration(mamba2.granite_hybrid, mamba2.cache, spellings=mamba2.GRANITE_SPELLINGS),
    "NemotronHForCausalLM": LayerDeclaration(mamba2.nemotron_h, mamba2.cache, spellings=mamba2.NEMOTRON_SPELLINGS),
    "Gemma4ForCausalLM": LayerDeclaration(gemma4.layer, outer=gemma4.outer, unread=gemma4.unread),
    "GptOssForCausalLM": LayerDeclaration(gpt_oss.layer),
    "Qwen3NextForCausalLM": LayerDeclaration(qwen3_next.layer, qwen3_next.cache),
    "Qwen3_5ForCausalLM": LayerDeclaration(qwen3_next.qwen3_5, qwen3_next.cache),
    "Qwen3_5MoeForCausalLM": LayerDeclaration(qwen3_next.qwen3_5, qwen3_next.cache),
}
"""By the architecture in config.json; the others are `DENSE`."""


def declaration(shape: ModelShape) -> LayerDeclaration:
    """What the family of a model declares."""
    return DECLARATIONS.get(shape.architecture, DENSE)


_INNER = ("mlp", "shared", "experts")
"""Parts that gate, up and down projections have."""


def layer_tensors(shape: ModelShape, layer: int) -> tuple[WeightTensor, ...]:
    """The declared tensors of one decoder layer. Inner features of an MLP, and of experts, are split between groups of columns with
    one scale."""
    tensors, quantization = tuple(declaration(shape).tensors(shape, layer)), shape.quantization
    if quantization is None:
        return tensors
    down: dict[str, WeightTensor] = {tensor.part: tensor for tensor in tensors if tensor.split == "row" and tensor.part in _INNER}
    units = {part: quantization.unit(tensor.name.format(expert=0).removesuffix(".weight")) for part, tensor in down.items()}

    def in_groups(tensor: WeightTensor) -> WeightTensor:
        unit = units.get(tensor.part, 0)
        if not unit or tensor.split not in ("row", "column"):
            return tensor
        rows_of_inner = 1 if tensor.split == "row" else tensor.shape[0] // down[tensor.part].shape[1]  # gate and up may be one
        return replace(tensor, unit=unit * rows_of_inner)

    return tuple(map(in_groups, tensors))


@cache
def layer_cache(shape: ModelShape, layer: int, dtype: str, tp: int = 1, dcp: int = 1) -> Cache:
    """What one decoder layer keeps between steps, on each of tp ranks. dtype: of keys and values (`cache.kv_dtype`). dcp: ranks
    over which the tokens of latents are divided."""
    own = tuple(tensor.local(tp, dcp) for tensor in declaration(shape).cache(shape, layer, dtype))
    return in_group(own, _layer_groups(shape)[layer])


@cache
def _layer_groups(shape: ModelShape) -> tuple[int, ...]:
    return layer_groups([tuple(declaration(shape).cache(shape, layer, shape.dtype)) for layer in range(shape.num_layers)])


def model_cache(shape: ModelShape) -> tuple[Cache, ...]:
    """What every layer keeps between steps, with keys and values in the checkpoint's dtype."""
    return tuple(layer_cache(shape, layer, shape.dtype) for layer in range(shape.num_layers))


def outer_tensors(shape: ModelShape) -> tuple[WeightTensor, ...]:
    """Embedding, final norm and head, and what else no layer has."""
    return tuple(declaration(shape).outer(shape))


@cache
def _document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_KNOWN.read_text(encoding="utf-8"))["models"]
    return loaded


def names() -> list[str]:
    """The models that are known without a network."""
    return list(_document())


def short_names() -> list[str]:
    """The same, by the first short name of each."""
    return [entry["aliases"][0] for entry in _document().values()]


def known(model: str) -> dict[str, Any] | None:
    """The config.json of a model that is known offline, by its Hub id or a short name, in either case; None for another."""
    entry = _entry(model)
    config: dict[str, Any] | None = None if entry is None else _document()[entry[0]]["config"]
    return config


def hub_id(model: str) -> str | None:
    """The Hub id of a model that is known offline by this name or id, in either case; None for another."""
    entry = _entry(model)
    return None if entry is None else entry[1]


def _entry(model: str) -> tuple[str, str] | None:
    """(the key of a known model, the Hub id that is meant: the key, or a further checkpoint of this shape)."""
    for key, entry in _document().items():
        if model.lower() in (name.lower() for name in entry["aliases"]):
            return key, key
        if checkpoint := next((name for name in (key, *entry["checkpoints"]) if name.lower() == model.lower()), None):
            return key, checkpoint
    return None


def parameters(name: str) -> float:
    """Published parameters of a known model, in billions. Raises ModelNotFound."""
    if name not in _document():
        raise ModelNotFound(f"model {name!r} is not known offline", next=f"known: {', '.join(names())}")
    return float(_document()[name]["parameters"])

# SPDX-License-Identifier: Apache-2.0
"""What layers of Gemma 4 have of their own in config.json: sizes of heads, embeddings, and keys and values that they share. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from phalanx.config.json_fields import JsonFields
from phalanx.config.rope import FULL, SLIDING
from phalanx.errors import ModelError


class HeadSizes(NamedTuple):
    """Of a layer's attention. keys_are_values: there is no projection of values; they are what that of keys gives. shared: there is
    none of keys, either; both are those of an earlier layer (`ModelShape.kv_layer`)."""

    kv_heads: int
    head_dim: int
    keys_are_values: bool = False
    shared: bool = False


class LayerInputs(NamedTuple):
    """Embeddings by layer: a second table has a vector of `width` for each layer and each of `vocab_size` tokens, to which a
    projection of the embedding is added. A layer gates it by its residual stream, and adds a projection of that to the stream."""

    width: int
    vocab_size: int


class SharedKv(NamedTuple):
    """The last `layers` layers have no keys and values of their own: each attends to those of the last layer before them that has a
    window, or none, as it has. mlp_factor: what their intermediate_size is multiplied by."""

    layers: int
    mlp_factor: int = 1


def gemma4_full_heads(fields: JsonFields) -> HeadSizes:
    """Of Gemma 4's layers without a window."""
    keys_are_values, kv_heads = fields.flag("attention_k_eq_v", False), fields.count("num_key_value_heads", 4)
    if "per_layer_config" in fields.values:  # as transformers 5.24 writes it; null: as the layers with a window
        sizes = _sizes_of_full_layers(fields, fields.optional_mapping("per_layer_config") or {}, kv_heads)
        return HeadSizes(*sizes, keys_are_values)
    full_heads = fields.count("num_global_key_value_heads", kv_heads) if keys_are_values else kv_heads
    return HeadSizes(full_heads, fields.count("global_head_dim", 512), keys_are_values)


def _sizes_of_full_layers(fields: JsonFields, by_layer: Mapping[str, Any], kv_heads: int) -> tuple[int, int]:
    """KV heads and head_dim, which all layers without a window must have and no others."""
    full = [str(layer) for layer, kind in enumerate(_kinds(fields)) if kind == FULL]
    first = by_layer.get(full[0], {})
    same = not by_layer or (set(by_layer) == set(full) and all(by_layer.get(layer) == first for layer in full))
    if not same or not isinstance(first, Mapping) or set(first) - {"head_dim", "num_key_value_heads"}:
        raise ModelError(
            f"{fields.file} has per_layer_config={dict(by_layer)}",
            held=f"it may have head_dim and num_key_value_heads, the same for all layers without a window: {', '.join(full)}",
            why="other sizes by layer are not computed",
        )  # fmt: skip
    inner = fields.inner("per_layer_config", first)
    return inner.count("num_key_value_heads", kv_heads), inner.count("head_dim", fields.count("head_dim", 256))


def _kinds(fields: JsonFields) -> list[str]:
    """The type of each layer; the last one has no window, whatever the file says."""
    layers = range(fields.count("num_hidden_layers"))
    kinds = fields.by_layer("layer_types", (SLIDING, FULL)) or [SLIDING if (layer + 1) % 6 else FULL for layer in layers]
    return [*kinds[:-1], FULL]


def read_layer_inputs(fields: JsonFields) -> LayerInputs | None:
    """The embeddings by layer; None without any. Raises ModelError where their table has fewer tokens than the model."""
    name = "hidden_size_per_layer_input"
    if fields.values.get(name, 256) in (None, 0):
        return None
    inputs = LayerInputs(fields.count(name, 256), fields.count("vocab_size_per_layer_input", 262_144))
    if inputs.vocab_size < fields.count("vocab_size"):
        raise ModelError(
            f"{fields.file} has vocab_size_per_layer_input={inputs.vocab_size} and vocab_size={fields.count('vocab_size')}",
            why="some tokens have no embeddings by layer",
        )  # fmt: skip
    return inputs


def read_shared_kv(fields: JsonFields) -> SharedKv | None:
    """The layers that share keys and values; None without any. Raises ModelError where there is no layer to share with."""
    shared, kinds = int(fields.number("num_kv_shared_layers", 0)), _kinds(fields)
    if not shared:
        return None
    before = kinds[:-shared]
    if not 0 < shared < len(kinds) or set(kinds) != set(before):
        raise ModelError(
            f"{fields.file} has num_kv_shared_layers={shared}",
            held=f"num_hidden_layers={len(kinds)}; before these are {len(before)} layers: {' and '.join(sorted(set(before)))}",
            why="a layer shares the keys and values of a layer of its type before them",
        )  # fmt: skip
    return SharedKv(shared, 2 if fields.flag("use_double_wide_mlp", False) else 1)

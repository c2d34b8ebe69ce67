# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings (RoPE) of config.json, in both spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.config.json_fields import JsonFields
from phalanx.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """The mapping of positions to angles. kind: one of ROPE_TYPES. A field that the kind does not use keeps its default.

    theta: base of the wavelengths. factor: by how much the context was extended. original_max_positions: context before the
    extension, in tokens. attention_factor: multiplies cosines and sines (yarn). softmax_factor: multiplies the softmax's scale in
    the families that read it (mscale_all_dim of DeepSeek).
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    softmax_factor: float = 1.0


def read_rope(fields: JsonFields, max_positions: int, default_theta: float = 10_000.0) -> Rope:
    """Read RoPE's fields; default_theta: where they have none.

    Raises ModelError for a type that is not supported, a missing factor or an impossible number."""
    values = fields.optional_mapping("rope_parameters")
    where = "rope_parameters"
    if values is None:
        values = fields.optional_mapping("rope_scaling") or {}
        where = "rope_scaling"
    inner = JsonFields(values, file=fields.file, prefix=f"{where}.")
    kind = inner.text("rope_type", inner.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"{fields.file} has {where}.rope_type={kind!r}, which is not supported", held=f"supported are: {', '.join(ROPE_TYPES)}",
            next="use a checkpoint with one of these",
        )  # fmt: skip
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError(f"{fields.file} has {where} per type of layer", why="only one setting for all layers is supported")
    if inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(
            f"{fields.file} has a partial_rotary_factor other than 1", why="only rotation of the whole head is supported"
        )
    theta = inner.positive("rope_theta", fields.positive("rope_theta", default_theta))
    if kind == "default":
        return Rope(theta=theta)
    original = int(inner.positive("original_max_position_embeddings", max_positions))
    if kind == "yarn":
        return _yarn(inner, theta, original, max_positions)
    factor = inner.positive("factor")
    if kind == "linear":
        return Rope("linear", theta, factor)
    low, high = inner.positive("low_freq_factor"), inner.positive("high_freq_factor")
    if high <= low:
        raise ModelError(f"{fields.file} has {where}.high_freq_factor={high} and low_freq_factor={low}", why="high must exceed low")
    return Rope("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(inner: JsonFields, theta: float, original: int, max_positions: int) -> Rope:
    factor = inner.positive("factor", max_positions / original)
    attention = inner.number("attention_factor", 0.0)
    mscale, all_dim = inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)
    if attention <= 0.0:
        attention = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    return Rope(
        "yarn", theta, factor, original, truncate=inner.flag("truncate", True), attention_factor=attention,
        beta_fast=inner.positive("beta_fast", 32.0), beta_slow=inner.positive("beta_slow", 1.0),
        softmax_factor=_mscale(factor, all_dim) ** 2,
    )  # fmt: skip


def _mscale(factor: float, mscale: float) -> float:
    """YaRN (arXiv 2309.00071), equation 22: the attention temperature of an extended context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings (RoPE) of config.json, in both spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from phalanx.config.json_fields import FieldTable, JsonFields
from phalanx.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
BY_TYPE = ROPE_TYPES[:-1]
"""Those of families that have RoPE by the type of a layer; `PROPORTIONAL` is of one alone."""
PROPORTIONAL = "proportional"
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""The types of layers: without a window, with one, and with attention inside of chunks."""


class Temperature(NamedTuple):
    """What queries are multiplied by, so that attention stays sharp over long contexts (Llama-4, Ministral 3):
    1 + beta * ln(1 + floor((position + shift) / interval)). interval: in tokens."""

    beta: float
    interval: int
    shift: int = 0


@dataclass(frozen=True)
class Rope:
    """The mapping of positions to angles. kind: one of ROPE_TYPES, or PROPORTIONAL. A field that the kind does not use keeps
    its default.

    theta: base of the wavelengths. factor: by how much the context was extended. original_max_positions: context before the
    extension, in tokens. attention_factor: multiplies cosines and sines (yarn). softmax_factor: multiplies the softmax's scale in
    the families that read it (mscale_all_dim of DeepSeek). portion: of a head's elements that is rotated, the first ones; of its
    pairs where it is proportional: the wavelengths are then those of all pairs.
    interleaved: elements 2i and 2i + 1 are rotated together, instead of halves apart. factors: of the wavelengths (longrope), one
    for each pair: those of contexts up to original_max_positions, and those of longer ones; long: the latter count. temperature:
    of the queries, by their positions; None: 1.
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
    portion: float = 1.0
    interleaved: bool = False
    factors: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    long: bool = True
    temperature: Temperature | None = None

    def within(self, max_seq_len: int) -> Rope:
        """For contexts of up to max_seq_len tokens: it decides which factors count (longrope)."""
        return replace(self, long=max_seq_len > self.original_max_positions) if self.kind == "longrope" else self

    def extended(self, max_positions: int) -> int:
        """The context of a model whose config.json states max_positions, in tokens. With llama3 they are the extended context; with
        linear and yarn they may be that before the extension."""
        return max(max_positions, int(self.original_max_positions * self.factor) if self.kind in ("linear", "yarn") else 0)


NOPE = Rope(portion=0.0)
"""Of layers without RoPE (arXiv 2305.19466): nothing is rotated."""

_OF_ALL = "rope_type type rope_theta partial_rotary_factor"
_OF_KIND = {
    "default": "",
    "linear": "factor original_max_position_embeddings",
    PROPORTIONAL: "factor",
    "llama3": "factor original_max_position_embeddings low_freq_factor high_freq_factor",
    "yarn": "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
    "longrope": "factor original_max_position_embeddings attention_factor short_factor long_factor",
}
_HARMLESS = "finetuned mrope_section mrope_interleaved " + " ".join(_OF_KIND.values())
_REFUSED: dict[str, tuple[Any, ...]] = {
    "attn_factor": (1,), "extrapolation_factor": (1,), "short_mscale": (), "long_mscale": (),
}  # fmt: skip
_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
TABLES = {kind: FieldTable.of(f"{_OF_ALL} {names}", _HARMLESS, _REFUSED) for kind, names in _OF_KIND.items()}
"""By kind. Harmless are the fields of the other kinds, as in transformers, and those of M-RoPE: a text token's positions in time,
height and width are equal. A field in none of the tables is an error."""
_WITH_TEMPERATURE = {
    kind: FieldTable.of(f"{_OF_ALL} {names} {_BETA} {_ORIGINAL}", f"{_HARMLESS} max_position_embeddings", _REFUSED)
    for kind, names in _OF_KIND.items()
}
"""Of families whose object has the temperature of queries, too."""


class RopeDefaults(NamedTuple):
    """What a family has where a file states nothing. theta: of rope_theta. portion: of partial_rotary_factor; None: the family
    rotates whole heads. parameters: of a file without an object. original: of original_max_position_embeddings beside the object.
    kinds: that the family has. temperature: the object has that of queries, too."""

    theta: float
    portion: float | None = None
    parameters: Mapping[str, Any] | None = None
    original: int | None = None
    kinds: tuple[str, ...] = ROPE_TYPES
    temperature: bool = False


def read_rope(fields: JsonFields, max_positions: int, defaults: RopeDefaults, head_dim: int = 0) -> Rope:
    """Read RoPE's fields, as `standardize_rope_params` of transformers 5 does: `rope_scaling` counts before `rope_parameters`, what
    these state before the same field beside them, and original_max_position_embeddings beside them before all.

    head_dim: of longrope, which has a factor for each pair. Raises ModelError for a type that is not supported, a missing factor,
    an impossible number, a field in none of `TABLES`, and two objects that differ.
    """
    where, values = _object(fields, defaults)
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError(f"{fields.file} has {where} per type of layer", why="only one setting for all layers is supported")
    return _read(fields, where, values, max_positions, defaults, head_dim)


def read_ropes_by_type(
    fields: JsonFields, max_positions: int, full: RopeDefaults, window_theta: float
) -> tuple[Rope, Rope]:  # fmt: skip
    """RoPE of the layers without a window, and of those with one (OLMo-3, Gemma-3): `rope_parameters` has an object for each type
    of layer; `rope_theta` and `rope_scaling` are those of the former, rope_local_base_freq is the theta of the latter.

    full: of the former; window_theta: of the latter, where none states it. Raises as `read_rope` does."""
    stated, scaling = fields.optional_mapping("rope_parameters"), fields.optional_mapping("rope_scaling") or {}
    parameters = ({FULL: full.parameters} if stated is None else stated) or {}
    unknown = [name for name, value in parameters.items() if name not in (FULL, SLIDING) or not isinstance(value, Mapping | None)]
    if unknown:
        raise ModelError(
            f"{fields.file} has rope_parameters.{unknown[0]}={parameters[unknown[0]]!r}",
            held=f"types of layers: {FULL}, {SLIDING}", why="the family has RoPE by the type of a layer",
        )  # fmt: skip
    if "type" in scaling and "rope_type" not in scaling:
        raise ModelError(
            f"{fields.file} has rope_scaling.type={scaling['type']!r}, and no rope_type", next="write rope_type",
            why="transformers reads no other name in a family that has RoPE by the type of a layer",
        )  # fmt: skip
    local = "rope_local_base_freq"
    thetas = {FULL: fields.positive("rope_theta", full.theta), SLIDING: window_theta}
    if fields.reads(local):
        thetas[SLIDING] = fields.positive(local, window_theta)
    ropes, outside = [], fields.value(_ORIGINAL)
    for kind in (FULL, SLIDING):
        stated = {**(parameters.get(kind) or {}), **(scaling if kind == FULL else {})}
        where = "rope_scaling" if kind == FULL and scaling else f"rope_parameters.{kind}"
        not_read = None if stated.get("truncate", True) else f"{where}.truncate=false"
        if stated.get("rope_type", "default") != "default" and outside not in (None, stated.get(_ORIGINAL, max_positions)):
            not_read = f"{_ORIGINAL}={outside!r} beside {where}"
        if not_read:
            raise ModelError(f"{fields.file} has {not_read}", why="transformers does not read it by the type of a layer")
        defaults = RopeDefaults(thetas[kind], kinds=full.kinds)
        ropes.append(_read(fields, where, {"rope_theta": thetas[kind], **stated}, max_positions, defaults))
    return ropes[0], ropes[1]


def _read(
    fields: JsonFields, where: str, values: Mapping[str, Any], max_positions: int, defaults: RopeDefaults, head_dim: int = 0
) -> Rope:  # fmt: skip
    """values: of the object that counts, which is field `where`."""
    inner = fields.inner(where, values)
    kind = inner.text("rope_type", inner.text("type", "default"))
    kind = {"mrope": "default", "su": "longrope"}.get(kind, kind)
    if kind not in defaults.kinds:
        raise ModelError(
            f"{fields.file} has {where}.rope_type={kind!r}, which is not supported",
            held=f"supported are: {', '.join(defaults.kinds)}", next="use a checkpoint with one of these",
        )  # fmt: skip
    table = (_WITH_TEMPERATURE if defaults.temperature else TABLES)[kind]
    inner = inner.sorted_by(table)
    if unknown := table.unknown(values):
        raise ModelError(
            f"{fields.file} has {where}.{unknown[0]}={values[unknown[0]]!r}",
            held=f"fields of rope_type={kind!r}: {', '.join([*_OF_ALL.split(), *_OF_KIND[kind].split()])}",
            why="Phalanx does not know what it changes in the positions",
        )  # fmt: skip
    if "rope_type" not in values and "type" not in values and values.get("factor") not in (None, 1):
        raise ModelError(f"{fields.file} has {where}.factor={values['factor']!r} and no rope_type", why="the factor belongs to one")
    # null takes the default out in transformers, so that all is rotated
    outer = 1.0 if "partial_rotary_factor" in fields.values else defaults.portion or 1.0
    portion = inner.positive("partial_rotary_factor", fields.positive("partial_rotary_factor", outer))
    if portion > 1.0 or (portion != 1.0 and defaults.portion is None and kind != PROPORTIONAL):
        raise ModelError(f"{fields.file} has a partial_rotary_factor other than 1", why="models of this family rotate whole heads")
    rope = _of_kind(fields, inner, kind, max_positions, defaults)
    pairs = int(head_dim * portion) // 2
    if kind == "longrope" and any(len(factors) != pairs for factors in rope.factors):
        raise ModelError(
            f"{fields.file} has {' and '.join(str(len(each)) for each in rope.factors)} factors in short_factor and long_factor",
            held=f"{pairs} pairs of a head are rotated", why="there must be a factor for each",
        )  # fmt: skip
    temperature = None
    if defaults.temperature and inner.value(_BETA):
        interval = rope.original_max_positions or inner.count(_ORIGINAL)
        temperature = Temperature(inner.positive(_BETA), interval)
    return replace(rope, portion=portion, temperature=temperature)


def _of_kind(fields: JsonFields, inner: JsonFields, kind: str, max_positions: int, defaults: RopeDefaults) -> Rope:
    """The angles. inner: the object that counts."""
    theta = inner.positive("rope_theta", fields.positive("rope_theta", defaults.theta))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "yarn" and theta <= 1.0:
        raise ModelError(f"{fields.file} has rope_theta={theta}", why="YaRN divides by its logarithm: it must be above 1")
    if kind == PROPORTIONAL:
        return Rope(kind, theta, inner.positive("factor", 1.0))
    original = fields.count(_ORIGINAL, defaults.original or inner.count(_ORIGINAL, max_positions))
    if kind == "yarn":
        return _yarn(inner, theta, original, max_positions)
    if kind == "longrope":
        return _longrope(inner, theta, original, max_positions)
    factor = inner.positive("factor")
    if kind == "linear":
        return Rope("linear", theta, factor, original)
    low, high = inner.positive("low_freq_factor"), inner.positive("high_freq_factor")
    if high < low:
        where = inner.prefix.rstrip(".")
        raise ModelError(
            f"{fields.file} has {where}.high_freq_factor={high} and low_freq_factor={low}", why="high must be low at least"
        )
    return Rope("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _object(fields: JsonFields, defaults: RopeDefaults) -> tuple[str, Mapping[str, Any]]:
    """The object that counts, and its name."""
    parameters, scaling = fields.optional_mapping("rope_parameters"), fields.optional_mapping("rope_scaling")
    if not scaling:
        return "rope_parameters", (defaults.parameters or {}) if parameters is None else parameters
    outer = {name: value for name in ("partial_rotary_factor", "rope_theta") if (value := fields.value(name)) is not None}
    counted = {"rope_theta": defaults.theta, **outer, **scaling, "rope_type": scaling.get("rope_type", scaling.get("type"))}
    lost = {
        name: value
        for name, value in (parameters or {}).items()
        if value not in (None, "default") and value != counted.get("rope_type" if name == "type" else name)
    }
    if lost:
        raise ModelError(
            f"{fields.file} has rope_scaling, and rope_parameters with {', '.join(f'{n}={v!r}' for n, v in lost.items())}",
            held=f"rope_scaling={dict(scaling)}", why="transformers reads rope_scaling and drops the other",
            next="correct the file: keep one of the two objects",
        )  # fmt: skip
    return "rope_scaling", scaling


def _yarn(inner: JsonFields, theta: float, original: int, max_positions: int) -> Rope:
    if inner.values.get("factor") is None and original == max_positions:
        raise ModelError(
            f"{inner.file} has rope_type='yarn' and no factor", held=f"{_ORIGINAL}={original}, which is max_position_embeddings",
            why="neither says how far the context is extended", next="correct the file: state the factor that the model has",
        )  # fmt: skip
    factor = inner.positive("factor", max_positions / original)
    mscale, all_dim = inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)
    attention = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    return Rope(
        "yarn", theta, factor, original, truncate=inner.flag("truncate", True),
        attention_factor=inner.positive("attention_factor", attention),
        beta_fast=inner.positive("beta_fast", 32.0), beta_slow=inner.positive("beta_slow", 1.0),
        softmax_factor=_mscale(factor, all_dim) ** 2,
    )  # fmt: skip


def _longrope(inner: JsonFields, theta: float, original: int, max_positions: int) -> Rope:
    """LongRoPE (arXiv 2402.13753). Cosines and sines are multiplied by sqrt(1 + log(factor) / log(original)) in any context."""
    factor = inner.positive("factor", max_positions / original)
    attention = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    factors = tuple(tuple(inner.numbers(name)) for name in ("short_factor", "long_factor"))
    return Rope(
        "longrope", theta, factor, original, attention_factor=inner.positive("attention_factor", attention),
        factors=(factors[0], factors[1]), long=max_positions > original,
    )  # fmt: skip


def _mscale(factor: float, mscale: float) -> float:
    """YaRN (arXiv 2309.00071), equation 22: the attention temperature of an extended context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

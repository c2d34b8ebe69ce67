# SPDX-License-Identifier: Apache-2.0
"""The slice of a rank: pure arithmetic over a dim of a tensor and a rank of the tensor-parallel group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import LayoutError

VOCAB_PADDING = 64
"""The vocabulary is padded to a multiple of this times tp, so that the slices of all ranks are equally long and aligned."""


def even(name: str, size: int, tp: int, tp_index: int) -> range:
    """The slice of a dim that tp must divide. Raises LayoutError that names the tp sizes that do."""
    require_divides(name, size, tp)
    part = size // tp
    return range(tp_index * part, (tp_index + 1) * part)


def require_divides(name: str, size: int, tp: int) -> None:
    if size % tp:
        fits = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
        raise LayoutError(
            f"tensor_parallel_size={tp} does not divide {name}={size}", next=f"use one of {', '.join(map(str, fits))}",
        )  # fmt: skip


def in_runs(name: str, size: int, unit: int, tp: int, tp_index: int) -> range:
    """The slice of a dim that is cut between runs of `unit` only: as evenly as that allows, the first ranks with one run more.
    Raises LayoutError where there are fewer runs than ranks."""
    runs = -(-size // unit)
    if runs < tp:
        raise LayoutError(
            f"tensor_parallel_size={tp} exceeds the {runs} runs of {unit} that {name}={size} has",
            why=f"{unit} neighbours share a scale, and stay together", next=f"use at most {runs}",
        )  # fmt: skip
    each, more = divmod(runs, tp)
    begin = tp_index * each + min(tp_index, more)
    return range(begin * unit, min((begin + each + (tp_index < more)) * unit, size))


def vocabulary(size: int, tp: int, tp_index: int) -> range:
    """This rank's slice of the padded vocabulary. Entries at or beyond `size` are padding."""
    part = math.ceil(size / (VOCAB_PADDING * tp)) * VOCAB_PADDING
    return range(tp_index * part, (tp_index + 1) * part)


@dataclass(frozen=True)
class HeadShard:
    """The attention heads of one rank. q: query heads. kv: for each local KV head the global one that it copies.

    Each local KV head serves the same number of neighbouring query heads, len(q) / len(kv).
    """

    q: range
    kv: tuple[int, ...]


def heads(query_heads: int, kv_heads: int, tp: int, tp_index: int) -> HeadShard:
    """Query heads are split evenly. KV heads follow them, replicated where necessary.

    A rank holds h = query_heads / tp query heads, and global KV head j serves g = query_heads / kv_heads neighbours. Runs of
    r = gcd(g, h) query heads, aligned to the rank's start (a multiple of h), never straddle two KV heads; so h / r local KV heads
    with r query heads each are always correct: kv_heads / tp of them where that divides, one where tp is a multiple of
    kv_heads, and a few replicated ones for odd head counts.
    """
    require_divides("num_attention_heads", query_heads, tp)
    if kv_heads < 1 or query_heads % kv_heads:
        raise LayoutError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={query_heads}")
    per_rank, group = query_heads // tp, query_heads // kv_heads
    run = math.gcd(group, per_rank)
    begin = tp_index * per_rank
    return HeadShard(range(begin, begin + per_rank), tuple((begin + i * run) // group for i in range(per_rank // run)))


def runs(numbers: Sequence[int]) -> list[range]:
    """Neighbours joined: (0, 1, 1) -> [0..1, 1..1], so that each run is read at once."""
    joined: list[range] = []
    for number in numbers:
        if joined and joined[-1].stop == number:
            joined[-1] = range(joined[-1].start, number + 1)
        else:
            joined.append(range(number, number + 1))
    return joined

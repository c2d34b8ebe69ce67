# SPDX-License-Identifier: Apache-2.0
"""Which steps launch every variant of a group's all-reduces: a tuned table changes strategies at any count of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator

import torch

from phalanx.comm.group import Group
from phalanx.comm.tuned_group import TunedGroup
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.strategy import SEQUENCE_PARALLEL, Strategy

EVERY_COUNT, RATIO = 256, 1.02
"""Up to EVERY_COUNT tokens each count is looked up; beyond, those that are RATIO apart: a table's ranges are longer."""

_Variant = tuple[Fusion, Caller, Strategy, bool, int]


def more_token_counts(
    group: Group, known: Collection[int], *, max_tokens: int, hidden: int, dtype: torch.dtype, num_sms: int
) -> list[int]:
    """Token counts up to max_tokens, beside the `known` ones, such that steps of all of them launch every variant of the
    all-reduces of tensors [tokens, hidden] that any count does. The same on all ranks, whose tables are equal. num_sms:
    multiprocessors."""
    name = DTYPE_NAMES.get(dtype)
    if not isinstance(group, TunedGroup) or name is None:
        return []
    limits = _limits(group.size, hidden * dtype.itemsize // 16, num_sms)

    def variants(tokens: int) -> Iterator[_Variant]:
        size = bisect_left(limits, tokens)
        calls = [(fusion, caller) for fusion in Fusion for caller in (Caller if fusion.shards else (Caller.REPLICATED,))]
        decisions = [group.decide(tokens, hidden, name, *call) for call in calls]
        if any(decision.strategy in SEQUENCE_PARALLEL for decision in decisions):  # then the next residual may come in sharded
            calls += [call for call in calls if call[1] is not Caller.REPLICATED]
            decisions += [group.decide(tokens, hidden, name, *call, sharded=True) for call in calls[len(decisions) :]]
        for call, decision in zip(calls, decisions, strict=True):
            yield *call, decision.strategy, decision.fused, size

    covered = {variant for tokens in known for variant in variants(tokens)}
    counts = []
    for tokens in _looked_up(max_tokens, limits):
        new = set(variants(tokens)) - covered
        if new:
            counts.append(tokens)
            covered |= new
    return counts


def _limits(world: int, pitch: int, num_sms: int) -> list[int]:
    """Counts of tokens behind which the launches of `oneshot`, `twoshot` and `rs_norm_ag` change, for rows of `pitch` vectors."""
    of_rows = (16, num_sms // 4, num_sms, world * num_sms, 4 * num_sms, 8 * num_sms)
    of_vectors = (1 << 13, 512 * num_sms, world * 256 * num_sms, world * 3072 * num_sms)
    return sorted({*of_rows, *(vectors // pitch for vectors in of_vectors)})


def _looked_up(max_tokens: int, limits: list[int]) -> list[int]:
    counts, tokens = {*range(1, EVERY_COUNT + 1), *(limit + 1 for limit in limits), max_tokens}, EVERY_COUNT
    while tokens < max_tokens:
        tokens = max(int(tokens * RATIO), tokens + 1)
        counts.add(tokens)
    return sorted(count for count in counts if count <= max_tokens)

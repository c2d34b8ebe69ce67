# SPDX-License-Identifier: Apache-2.0
"""A group that leaves the residual sharded, over any other group, with NaN in the rows of other ranks: a reader of those shows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.comm import nccl
from phalanx.comm.choose import Rules
from phalanx.comm.group import Group, ResidualRmsNorm, finish, with_scales
from phalanx.comm.sequence_parallel import ShardedResidual, gather_rows, rank_rows, same_sharding
from phalanx.comm.strategies import AllReduce
from phalanx.comm.tuned_group import TunedGroup
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.strategy import Strategy
from phalanx.tables.table import Entry


class _Sharding:
    """What both stand-ins share. base: the group that sums."""

    def __init__(self, base: Group) -> None:
        self.base = base

    def _finish_own(self, sums: Tensor, fusion: ResidualRmsNorm, chunk_rows: int) -> tuple[Tensor, ...]:
        base, residual, tokens = self.base, fusion.residual, len(sums)
        if isinstance(residual, ShardedResidual):
            assert same_sharding(tokens, residual.chunk_rows, chunk_rows)
            residual = residual.local
        own = torch.tensor([row for rows in rank_rows(tokens, chunk_rows, base.rank, base.size) for row in rows], dtype=torch.int64)
        *outputs, new = finish(sums[own], replace(fusion, residual=residual[own]))
        codes = [out.view(torch.uint8) if out.dtype.itemsize == 1 else out for out in outputs]  # which any group gathers
        gathered = [gather_rows(_placed(each, own, tokens), chunk_rows, base) for each in codes]
        complete = [each.view(out.dtype) for each, out in zip(gathered, outputs, strict=True)]
        foreign = torch.full_like(sums, float("nan"))
        foreign[own] = new
        return (*complete, ShardedResidual.of(foreign, chunk_rows))


class PoisonedRsNormAg(_Sharding):
    """RS_NORM_AG over any group, which shards by `chunk_rows` rows."""

    def __init__(self, base: Group, chunk_rows: int) -> None:
        super().__init__(base)
        self._chunk_rows = chunk_rows

    def chunk_rows(self, hidden: int, dtype: torch.dtype) -> int:
        return self._chunk_rows

    def all_reduce_norm(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        return self._finish_own(nccl.all_reduce(with_scales(x), self.base), fusion, self._chunk_rows)


class PoisonedGemmRs(_Sharding):
    """GEMM_RS over any group, from `min_tokens` tokens on."""

    def __init__(self, base: Group, min_tokens: int) -> None:
        super().__init__(base)
        self._min_tokens = min_tokens
        self._buffer: Tensor | None = None

    def targets(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> list[tuple[slice, Tensor]] | None:
        if tokens < self._min_tokens:
            return None
        assert self._buffer is None, "the last GEMM output was not finished"
        self._buffer = torch.full((tokens, hidden), float("nan"), dtype=fusion.residual.dtype)
        depth = -(-tokens // self.base.size)
        chunks = [slice(first, min(first + depth, tokens)) for first in range(0, tokens, depth)]
        return [(chunk, self._buffer[chunk]) for chunk in reversed(chunks)]

    def all_reduce_norm(self, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        return self._finish_own(nccl.all_reduce(buffer, self.base), fusion, len(buffer))


def poisoned(
    base: Group, *, chunk_rows: int = 5, sp_min_tokens: int = 1, gemm_rs_min_tokens: int = 1 << 30, forced: Strategy | None = None
) -> TunedGroup:  # fmt: skip
    """A group that shards the residual from `sp_min_tokens` tokens on, by its table; all else runs TWOSHOT."""

    def total(x: Tensor | Unscaled) -> Tensor:
        return nccl.all_reduce(with_scales(x), base)

    def norm(x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        return finish(total(x), fusion)

    strategies = {
        Strategy.NCCL: AllReduce(total, norm),
        Strategy.TWOSHOT: AllReduce(total, norm),
        Strategy.RS_NORM_AG: AllReduce(total, rs_norm_ag=PoisonedRsNormAg(base, chunk_rows)),
        Strategy.GEMM_RS: AllReduce(total, gemm_rs=PoisonedGemmRs(base, gemm_rs_min_tokens)),
    }

    def lookup(dtype: str, fusion: Fusion, tokens: int, hidden: int, caller: Caller) -> Entry:
        shards = fusion.shards and tokens >= sp_min_tokens
        strategy = (Strategy.TWOSHOT, Strategy.RS_NORM_AG, Strategy.GEMM_RS)[caller if shards else 0]
        return Entry(strategy, True, "table", "so it is to be")

    rules = Rules(Fingerprint(0, "shm", base.size), {}, lookup, forced)
    return TunedGroup(base, rules, strategies, "none")


def _placed(rows: Tensor, own: Tensor, tokens: int) -> Tensor:
    placed = rows.new_zeros(tokens, rows.shape[1])
    placed[own] = rows
    return placed

# SPDX-License-Identifier: Apache-2.0
"""RS_NORM_AG and GEMM_RS between CPU ranks of one host, over the memory of `comm.shared_memory`.

rows of rank r: sum = round(x of rank 0 + x of rank 1 + ...), then the fusion, on rank r
all ranks:      the norm, or its e4m3 values and scales, or all of these, of all rows; the new residual stays where it was computed
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.comm.group import ResidualRmsNorm, finish, with_scales
from phalanx.comm.sequence_parallel.sharded_residual import ShardedResidual, local_residual
from phalanx.comm.shared_memory import SharedMemory
from phalanx.kernels.scaled_tensors import Unscaled


class CpuRsNormAg:
    """RS_NORM_AG of one group."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def chunk_rows(self, hidden: int, dtype: torch.dtype) -> int:
        """Rows by which `all_reduce_norm` of a tensor [T, hidden] shards: as many as a post holds."""
        return self._memory.rows_at_once(hidden, dtype)

    def all_reduce_norm(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """As `RsNormAg.all_reduce_norm`. Raises ValueError for a row that is longer than a post."""
        x = with_scales(x)
        tokens, chunk_rows = len(x), self.chunk_rows(x.shape[1], x.dtype)
        if not chunk_rows:
            raise ValueError(f"a row of {x.shape[1]} x {x.element_size()} bytes is longer than a post in shared memory")
        residual, new = local_residual(fusion.residual, tokens, chunk_rows), torch.empty_like(x)
        parts = []
        for first in range(0, tokens, chunk_rows):
            rows = slice(first, min(first + chunk_rows, tokens))
            half = self._memory.post(x[rows].reshape(-1))
            parts.append(finish_rows(self._memory, half, replace(fusion, residual=residual[rows]), new[rows]))
        gathered = parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))
        return (*gathered, ShardedResidual.of(new, chunk_rows))


class CpuGemmRs:
    """GEMM_RS of one group: the GEMM writes its output where the ranks that sum it read it."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def targets(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> list[tuple[slice, Tensor]] | None:
        """Where to write a GEMM output [tokens, hidden] for `all_reduce_norm`; None where it is longer than a post, or leaves the
        last rank without rows."""
        memory, dtype = self._memory, fusion.residual.dtype
        depth = -(-tokens // memory.world)
        if tokens > memory.rows_at_once(hidden, dtype) or tokens <= depth * (memory.world - 1):
            return None
        output = memory.next_post(tokens * hidden, dtype).view(tokens, hidden)
        chunks = [slice(first, min(first + depth, tokens)) for first in range(0, tokens, depth)]
        return [(rows, output[rows]) for rows in (*chunks[memory.rank + 1 :], *chunks[: memory.rank + 1])]

    def all_reduce_norm(self, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """As `CpuRsNormAg.all_reduce_norm`, of a GEMM output like fusion.residual that was written to its `targets`."""
        tokens = fusion.residual.shape[0]
        residual = local_residual(fusion.residual, tokens, tokens)
        new = torch.empty_like(residual)
        half = self._memory.post_written()
        gathered = finish_rows(self._memory, half, replace(fusion, residual=residual), new)
        return (*gathered, ShardedResidual.of(new, tokens))


def finish_rows(memory: SharedMemory, half: int, fusion: ResidualRmsNorm, new: Tensor) -> tuple[Tensor, ...]:
    """What a fusion gives of the tensors [T, H] that the ranks have posted in `half`, but for the new residual, of which this
    rank's rows go into `new` [T, H]. fusion.residual: a tensor whose own rows are valid."""
    own, total = memory.own_sum(half, len(new), new.shape[1], new.dtype)
    *outputs, residual = finish(total, replace(fusion, residual=fusion.residual[own]))
    new[own] = residual
    return memory.gather_rows(half, len(new), own, outputs)

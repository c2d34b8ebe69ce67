# SPDX-License-Identifier: Apache-2.0
"""RS_NORM_AG on GPUs: reduce-scatter, residual add + RMSNorm + quantization of each rank's own rows, then all-gather of the result.

    rows of rank r: sum = round(x of rank 0 + x of rank 1 + ...), then the fusion, on rank r
    all ranks:      the norm, or its e4m3 values and scales, or all of these, of all rows

This is Megatron's sequence parallelism as one kernel (`kernels.sequence_parallel.rs_norm_ag`) over a symmetric workspace. The new
residual is not gathered: it stays sharded between the layers (`ShardedResidual`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from phalanx.comm.chunked import whole_rows
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.oneshot import row_block
from phalanx.comm.symmetric import SymmetricWorkspace
from phalanx.kernels.scaled_tensors import FP8, Unscaled

_METADATA = frozenset(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "is_cuda"))


class GathersRows(Protocol):
    """The part of a `Group` that is needed here."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor: ...


def rank_rows(tokens: int, chunk_rows: int, rank: int, world: int) -> Iterator[range]:
    """The rows of a tensor [tokens, H] that belong to `rank`. Each chunk of `chunk_rows` rows (the last may be shorter) is split
    evenly: of R rows, those from rank * ceil(R / world) to the next rank's."""
    for first in range(0, tokens, chunk_rows):
        rows = min(chunk_rows, tokens - first)
        depth = -(-rows // world)
        yield range(first + min(rank * depth, rows), first + min((rank + 1) * depth, rows))


def same_sharding(tokens: int, chunk_rows: int, other_chunk_rows: int) -> bool:
    """Whether chunks of either size give every rank the same rows."""
    return min(chunk_rows, tokens) == min(other_chunk_rows, tokens)


class ShardedResidual(Tensor):
    """A residual stream [T, H] of which each rank of a group holds valid values in its own rows only (`rank_rows`).

    It flows where a tensor does and refuses every operation that would read it as one: only an all-reduce that accepts a sharded
    residual takes `local`, and `unshard` makes a tensor of it. local: the tensor as this rank holds it, [T, H]; chunk_rows: rows
    of a chunk that is split over the ranks.
    """

    local: Tensor
    chunk_rows: int

    @staticmethod
    def of(local: Tensor, chunk_rows: int) -> ShardedResidual:
        sharded = local.as_subclass(ShardedResidual)
        sharded.local, sharded.chunk_rows = local, chunk_rows
        return sharded

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__qualname__", repr(func))
        raise TypeError(f"{name} would read rows that other ranks hold: comm.sequence_parallel.unshard makes a tensor of them")

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes more, and reads the values
        return f"ShardedResidual({list(self.local.shape)}, {self.local.dtype}, chunk_rows={self.chunk_rows})"


def gather_rows(local: Tensor, chunk_rows: int, group: GathersRows) -> Tensor:
    """local [T, N] with every rank's rows from that rank; collective."""
    tokens, chunks = len(local), []
    for number, own in enumerate(rank_rows(tokens, chunk_rows, group.rank, group.size)):
        rows = min(chunk_rows, tokens - number * chunk_rows)
        depth = -(-rows // group.size)
        sent = local[own.start : own.stop]
        if len(own) < depth:
            sent = torch.cat((sent, sent.new_zeros(depth - len(own), local.shape[1])))
        chunks.append(group.all_gather(sent.contiguous(), dim=0)[:rows])
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def unshard(x: Tensor, group: GathersRows) -> Tensor:
    """x as a tensor that every rank may read: x itself, or the gathered rows of a ShardedResidual (then collective)."""
    if not isinstance(x, ShardedResidual):
        return x
    return gather_rows(x.local, x.chunk_rows, group) if x.local.shape[0] else x.local


def local_residual(residual: Tensor, tokens: int, chunk_rows: int) -> Tensor:
    """The residual as the kernel reads it. Raises ValueError for one that is sharded otherwise than by `chunk_rows` rows."""
    if not isinstance(residual, ShardedResidual):
        return residual
    if not same_sharding(tokens, residual.chunk_rows, chunk_rows):
        raise ValueError(f"the residual is sharded by {residual.chunk_rows} rows, and this all-reduce shards by {chunk_rows}")
    return residual.local


@dataclass(frozen=True, slots=True)
class RsNormAgLaunch:
    """programs: of the grid, all of which must run at once; block: vectors of 16 bytes that hold a row of the sum; flat: vectors
    that a program pushes at once; take: vectors that hold a row of what is gathered; warps: of a program; block, flat and take are
    powers of two, at least 32 x warps; movers: programs that push, add up and finish rows, the others collect (none: the movers
    collect when they have finished); registers: of a thread at most, so that all programs fit."""

    programs: int
    block: int
    flat: int
    take: int
    warps: int
    movers: int
    registers: int | None = None


@lru_cache(maxsize=1 << 12)
def launch_of(
    rows: int, pitch: int, take: int, world: int, num_sms: int, shape: tuple[int, int, int] | None = None
) -> RsNormAgLaunch:  # fmt: skip
    """For a chunk of `rows` rows of `pitch` vectors, of which `take` vectors each are gathered. shape: (warps of a program,
    programs on a multiprocessor, movers among these) to try instead of those that follow from the size: one program where a rank
    has few rows, or has so many peers that sums take its registers; else two, which both move."""
    block, depth = row_block(pitch), -(-rows // world)
    if shape is None:
        shape = (16, 1, 1) if depth <= num_sms or world > 4 else (16, 2, 2)
    warps, per_sm, moving = min(shape[0], block // 32), shape[1], shape[2]
    flat = 32 * warps
    work = max(-(-depth * pitch // flat), depth)
    movers = min(work if per_sm > moving else max(work, rows - depth), moving * num_sms)
    collectors = min(max(rows - depth, 1), (per_sm - moving) * num_sms)
    registers = min(65536 // (per_sm * flat) // 8 * 8, 248) if per_sm > 1 else None
    return RsNormAgLaunch(movers + collectors, block, flat, max(row_block(take), flat), warps, movers, registers)


@lru_cache(maxsize=1 << 12)
def chunk_rows_of(pitch: int, twoshot_vectors: int, world: int) -> int:
    """Rows of a chunk, a multiple of the number of ranks. It depends on the row's length and on the workspace alone, so that a row
    belongs to the same rank in every call that it goes through. The part of a half that a two-shot of so many rows takes holds the
    parts and at most the norms."""
    return whole_rows(twoshot_vectors, pitch, world)


class Outputs:
    """The tensors that the kernel writes for a sum like `like` [T, H]: the new residual, and the norm, its quantization, or both.
    gathered: the one of these two that the ranks send to each other, the norm where both are written."""

    def __init__(self, like: Tensor, fusion: ResidualRmsNorm) -> None:
        self.residual = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.mode: Literal["none", "fp8", "fp8_token"] = "none"
        self.norm = self.quantized = self.scales = None
        if fusion.quant != "none":
            self.mode = "fp8" if fusion.scale is not None else "fp8_token"
            self.quantized = torch.empty(like.shape, dtype=FP8, device=like.device)
        self.keep_norm = fusion.keep_norm and self.quantized is not None
        if self.quantized is None or self.keep_norm:
            self.norm = torch.empty_like(self.residual)
        if self.mode == "fp8_token":
            self.scales = torch.empty(len(like), 1, dtype=torch.float32, device=like.device)

    @property
    def gathered(self) -> Tensor:
        gathered = self.quantized if self.norm is None else self.norm
        assert gathered is not None
        return gathered

    def pointers(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(norm, new residual, quantized, scales) of rows first .. last - 1, viewed as the kernel writes them. The residual stands
        for those that are not written."""
        residual = self.residual[first:last].view(torch.int32)
        norm = residual if self.norm is None else self.norm[first:last].view(torch.int32)
        # One store holds the e4m3 values of one vector of the sum: 8 values of 16 bit, or 4 of 32 bit.
        codes = torch.int64 if self.residual.element_size() == 2 else torch.int32
        quantized = residual if self.quantized is None else self.quantized[first:last].view(codes)
        return norm, residual, quantized, residual if self.scales is None else self.scales[first:last]

    def result(self, chunk_rows: int) -> tuple[Tensor, ...]:
        """(norm, quantized, scales, residual), without those that are not written."""
        written = (output for output in (self.norm, self.quantized, self.scales) if output is not None)
        return (*written, ShardedResidual.of(self.residual, chunk_rows))


class RsNormAg:
    """RS_NORM_AG of one group."""

    def __init__(self, workspace: SymmetricWorkspace) -> None:
        self.workspace = workspace

    def chunk_rows(self, hidden: int, dtype: torch.dtype) -> int:
        """Rows by which `all_reduce_norm` of a tensor [T, hidden] shards."""
        return chunk_rows_of(hidden * dtype.itemsize // 16, self.workspace.twoshot_vectors, self.workspace.world)

    def all_reduce_norm(
        self, x: Tensor | Unscaled, fusion: ResidualRmsNorm, shape: tuple[int, int, int] | None = None
    ) -> tuple[Tensor, ...]:
        """The sum over ranks of x [T, H] (contiguous, 16-byte aligned; H a multiple of 16) and its fusion (none or fp8), in new
        tensors. All ranks get all rows, but of the new residual, which is a ShardedResidual. fusion.residual: a
        tensor, or the ShardedResidual of such a call. shape: see `launch_of`."""
        from phalanx.kernels.dtypes import DTYPE_NAMES
        from phalanx.kernels.sequence_parallel.rs_norm_ag import rs_norm_ag

        values, row_scales, column_scales = x if isinstance(x, Unscaled) else (x, None, None)
        workspace, outputs, (tokens, hidden) = self.workspace, Outputs(values, fusion), values.shape
        pitch, take = hidden * values.element_size() // 16, hidden * outputs.gathered.element_size() // 16
        chunk_rows = self.chunk_rows(hidden, values.dtype)
        residual = local_residual(fusion.residual, tokens, chunk_rows)
        for first in range(0, tokens, chunk_rows):
            last = min(tokens, first + chunk_rows)
            launch = launch_of(last - first, pitch, take, workspace.world, workspace.num_sms, shape)
            rs_norm_ag[(launch.programs,)](
                values[first:last].view(torch.int32), None if row_scales is None else row_scales[first:last], column_scales,
                residual[first:last].view(torch.int32), fusion.weight.view(torch.int32), outputs.pointers(first, last),
                outputs.gathered[first:last].view(torch.int32), outputs.residual if fusion.scale is None else fusion.scale,
                workspace.addresses, workspace.epoch, workspace.half, last - first, hidden, launch.movers, fusion.eps,
                KIND=DTYPE_NAMES[values.dtype], QUANT=outputs.mode, KEEP_NORM=outputs.keep_norm, RANK=workspace.rank,
                WORLD=workspace.world, BLOCK=launch.block, FLAT=launch.flat, TAKE=launch.take, WARPS=launch.warps,
                SM=workspace.sm, num_warps=launch.warps, maxnreg=launch.registers, launch_pdl=workspace.sm >= 90,
            )  # fmt: skip
        return outputs.result(chunk_rows)

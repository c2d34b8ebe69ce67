# SPDX-License-Identifier: Apache-2.0
"""The residual stream between sequence-parallel all-reduces: each rank holds its own rows (Megatron's sequence parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

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

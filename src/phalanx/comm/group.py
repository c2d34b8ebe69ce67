# SPDX-License-Identifier: Apache-2.0
"""The `Group` protocol, through which the ranks of a model communicate, and the fusions of its all-reduce.

A model sees ranks only through the group it is given. `Solo` is the group of one; `comm.local` has in-process ranks for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from phalanx.kernels.scaled_tensors import Unscaled


@dataclass(frozen=True)
class ResidualRmsNorm:
    """Fuse the residual add, RMSNorm and quantization to the sum.

    residual [T, H] in the tensor's dtype; weight [H]; eps. quant: "none", "fp8" or "nvfp4". scale: fp8 static scale (fp32 scalar
    tensor; quantized = value / scale) or nvfp4 global scale; None for fp8 means one scale per token, returned. keep_norm: return
    the norm beside the quantized value (the OUT_QUANT variants).

    The sum is rounded to the tensor's dtype before the residual is added, as the unfused path does.

    accepts_sharded: the caller accepts the new residual as a `sequence_parallel.ShardedResidual`, of which each rank holds valid
    values in its own rows only. It passes that on as the residual of the next all-reduce, or unshards it. A group may return a
    sharded residual, and need not.
    """

    residual: Tensor
    weight: Tensor
    eps: float
    quant: Literal["none", "fp8", "nvfp4"] = "none"
    scale: Tensor | None = None
    keep_norm: bool = False
    accepts_sharded: bool = False


class ScatterTargets(NamedTuple):
    """Where a GEMM writes its output [T, H], so that each rank's rows go straight to that rank. targets: for every rank, this one's
    last: (rows, the tensor [rows, H] to write them into). finish: once all are written, the result of `Group.all_reduce` of the
    output with the fusion."""

    targets: Sequence[tuple[slice, Tensor]]
    finish: Callable[[], tuple[Tensor, ...]]


class Splits(NamedTuple):
    """Rows that a rank sends to each rank of its group, and receives from each."""

    sent: Sequence[int]
    received: Sequence[int]


class Group(Protocol):
    """Ranks that compute together. Every method is collective: all ranks of the group call it in the same order."""

    @property
    def rank(self) -> int:
        """This rank's index in the group, 0 .. size-1."""

    @property
    def size(self) -> int: ...

    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: None = None) -> Tensor: ...
    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]: ...
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm | None = None) -> Tensor | tuple[Tensor, ...]:
        """The sum over ranks of x [T, H], or of a GEMM output whose scales are still to be applied; x may be overwritten. With a
        fusion: (norm, residual), or as the fusion says (quantized values and scales first, the new residual last)."""

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The ranks' equally shaped tensors, joined along a dim in rank order."""

    def all_to_all(self, x: Tensor, splits: Splits | None = None) -> Tensor:
        """x [sum of splits.sent, ...], rank-major: its next sent[r] rows go to rank r. Returns [sum of splits.received, ...],
        rank-major: the next received[r] rows come from rank r. Without splits all ranks send and receive the same number."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x [size * n, ...] -> [n, ...]: the sum over ranks of rows rank * n .. (rank + 1) * n of their x: in fp32, in rank order,
        rounded once."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Rank `source`'s x, written into every rank's x."""

    def send(self, x: Tensor, to: int) -> None:
        """Send x to a rank of the group; x may be rewritten once this returns (on GPU: in stream order)."""

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill x with the tensor that rank `source` sends."""

    def barrier(self) -> None: ...

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor for a producer to write into and pass to all_reduce. Every group gives ordinary memory: its strategies read
        where the producer wrote (`TunedGroup.empty` says why that is enough)."""

    def gemm_reduce_scatter_targets(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> ScatterTargets | None:
        """For a GEMM output [tokens, hidden] in the residual's dtype that is to be summed with `fusion`: where to write it instead
        of passing it to `all_reduce`, or None on all ranks where the group wants the tensor. One at a time: `finish` comes before
        any other call of the group."""


class Solo:
    """The group of one rank: every collective is the identity."""

    rank = 0
    size = 1

    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: None = None) -> Tensor: ...
    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]: ...
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm | None = None) -> Tensor | tuple[Tensor, ...]:
        x = with_scales(x)
        return x if fusion is None else finish(x, fusion)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, splits: Splits | None = None) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise IndexError(f"rank {to} is not in a group of one")

    def receive(self, x: Tensor, source: int) -> Tensor:
        raise IndexError(f"rank {source} is not in a group of one")

    def barrier(self) -> None:
        return

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def gemm_reduce_scatter_targets(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> None:
        return None


def finish(total: Tensor, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
    """The fusion as one kernel after the sum `total` [T, H]: what an unfused strategy runs."""
    from phalanx import kernels

    return kernels.residual_rms_norm_quant(
        total, fusion.residual, fusion.weight, fusion.eps, quant=fusion.quant, scale=fusion.scale, keep_norm=fusion.keep_norm
    )


def by_rank(x: Tensor, size: int) -> Tensor:
    """x [size * n, ...] -> [size, n, ...], a view."""
    return x.view(size, x.shape[0] // size, *x.shape[1:])


def sum_in_rank_order(parts: Tensor) -> Tensor:
    """parts [size, ...] -> ((part 0 + part 1) + part 2) + ..., in fp32 where they are floats of fewer bits, rounded once."""
    if len(parts) == 1:
        return parts[0]
    narrow = parts.is_floating_point() and parts.element_size() < 4
    total = parts[0].float() + parts[1] if narrow else parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total.to(parts.dtype)


def with_scales(x: Tensor | Unscaled) -> Tensor:
    """x with its scales applied, for a reader that applies none. The values of an Unscaled may be overwritten."""
    if not isinstance(x, Unscaled):
        return x
    if x.values.is_cuda:
        from phalanx.kernels.gemm.apply_scales import apply_scales

        return apply_scales(x)
    return x.to_fp32().to(x.values.dtype)

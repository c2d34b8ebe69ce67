# SPDX-License-Identifier: Apache-2.0
"""How ranks agree: the `Group` seam, and the fusions of its all-reduce.

A model sees ranks only through the group it is given. `Solo` is the group of one; `comm.local` has in-process ranks for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from phalanx.kernels.reference import Unscaled


@dataclass(frozen=True)
class ResidualRmsNorm:
    """Fuse `residual + sum`, RMSNorm and quantization behind the sum.

    residual [T, H] in the tensor's dtype; weight [H]; eps. quant: "none", "fp8" or "nvfp4". scale: fp8 static scale (fp32 scalar
    tensor; quantized = value / scale) or nvfp4 global scale; None for fp8 means one scale per token, returned. keep_norm: return
    the norm beside the quantized value (the OUT_QUANT variants).

    The sum is rounded to the tensor's dtype before the residual is added, as the unfused path does.

    may_own: the caller takes the new residual back as `rows.OwnedRows`, of which each rank holds its own rows alone, and hands it
    on to the next all-reduce as its residual, or makes it whole. A group may give it back so, and need not.
    """

    residual: Tensor
    weight: Tensor
    eps: float
    quant: Literal["none", "fp8", "nvfp4"] = "none"
    scale: Tensor | None = None
    keep_norm: bool = False
    may_own: bool = False


class Spread(NamedTuple):
    """A product [T, H] that goes straight to who owns its rows. pieces: of all ranks, this one's last: (rows, the tensor [rows, H]
    to write them into). finish: once they are written, what `Group.all_reduce` of the product with the fusion gives."""

    pieces: Sequence[tuple[slice, Tensor]]
    finish: Callable[[], tuple[Tensor, ...]]


class Group(Protocol):
    """Ranks that work on one thing. Every method is collective: all ranks of the group call it in the same order."""

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
        """The sum over ranks of x [T, H], or of a product whose scales are still to be applied; x may be overwritten. With a
        fusion: (norm, residual), or as the fusion says (quantized values and scales first, the new residual last)."""

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The ranks' equally shaped tensors, joined along a dim in rank order."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Rank `source`'s x, written into everybody's x."""

    def send(self, x: Tensor, to: int) -> None:
        """Hand x to a rank of the group; x may be rewritten once this returns (on GPU: in stream order)."""

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill x with what rank `source` sends."""

    def barrier(self) -> None: ...

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor for a producer to write into and hand to all_reduce; symmetric memory where the group has it."""

    def spread(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> Spread | None:
        """For a product [tokens, hidden] in the residual's dtype that is to be summed with `fusion`: where to write it instead of
        handing it to `all_reduce`, or None on all ranks where the group wants it whole. One at a time: it is finished before
        anything else is asked of the group."""


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

    def spread(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> None:
        return None


def finish(total: Tensor, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
    """The fusion as one kernel after the sum `total` [T, H]: what an unfused strategy runs."""
    from phalanx import kernels

    return kernels.residual_rms_norm_quant(
        total, fusion.residual, fusion.weight, fusion.eps, quant=fusion.quant, scale=fusion.scale, keep_norm=fusion.keep_norm
    )


def with_scales(x: Tensor | Unscaled) -> Tensor:
    """x, finished: for a reader that applies no scales. A product's values may be overwritten."""
    if not isinstance(x, Unscaled):
        return x
    if x.values.is_cuda:
        from phalanx.kernels.products.scale_sums import scale_sums

        return scale_sums(x)
    return x.wide().to(x.values.dtype)

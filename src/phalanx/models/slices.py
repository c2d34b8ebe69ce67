# SPDX-License-Identifier: Apache-2.0
"""Which part of which checkpoint tensor goes where: every layer declares its own `Slice`s, and `weights` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx import kernels
from phalanx.comm.group import Group
from phalanx.config.quantization import Quantization

_CHUNK_ROWS = 4096  # quantized together, so that their copy in fp32 stays small


@dataclass(frozen=True)
class Slice:
    """Rows (dim 0) or columns (dim 1) begin .. begin + target.shape[dim] of checkpoint tensor `name`, whose full shape by
    config.json is `shape`; they are copied into `target`, a view of a weight on this rank.

    scale: where the target is e4m3 and the checkpoint is not: one per row of the target, fp32, computed as the rows are stored.
    Ranks that hold other columns of the same rows have scales of their own, since each applies them to its own partial sum.
    """

    name: str
    shape: tuple[int, ...]
    target: Tensor
    begin: int = 0
    dim: int = 0
    scale: Tensor | None = None

    @property
    def end(self) -> int:
        return self.begin + self.target.shape[self.dim]

    def store(self, values: Tensor) -> None:
        """Store the values that were read, of the target's shape."""
        if self.scale is None:
            self.target.copy_(values)
            return
        for at in range(0, len(values), _CHUNK_ROWS):
            rows = slice(at, at + _CHUNK_ROWS)
            quantized, scale = kernels.quantize_fp8(values[rows].to(self.target.device))
            self.target[rows].copy_(quantized)
            self.scale[rows].copy_(scale.squeeze(-1))


@dataclass(frozen=True)
class Scale:
    """A quantization scale of the checkpoint, which has one of `shapes`. `store` takes all of it, in fp32, on CPU.

    may_be_zero: the scale of weights that are all zero may be 0. unset: the value that stands for a scale that was not calibrated.
    inputs: input features of the GEMM whose weight it scales; 0 for the scale of activations.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    store: Callable[[Tensor], None]
    may_be_zero: bool = False
    unset: float | None = None
    inputs: int = 0


@dataclass(frozen=True)
class LayerContext:
    """What a layer is built for: the ranks that split it, the dtype of weights and arithmetic, the device.

    quantization: which linear layers are in FP8 instead, and how. fp8_gemm: their activations are FP8 too; else their weights are
    dequantized for each GEMM. fp8_cache: keys and values are stored in FP8.
    """

    group: Group
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None
    fp8_gemm: bool = False
    fp8_cache: bool = False

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values in the cache."""
        return torch.float8_e4m3fn if self.fp8_cache else self.dtype

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialized weight, in the context's dtype unless another is given."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)


class Sliced(nn.Module):
    """A layer with weights of its own."""

    def slices(self) -> Iterator[Slice]:
        """What to read from a checkpoint, covering every weight of this layer."""
        raise NotImplementedError

    def scales(self) -> Iterator[Scale]:
        """The quantization scales to read beside them."""
        return iter(())

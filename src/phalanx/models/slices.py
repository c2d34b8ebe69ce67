# SPDX-License-Identifier: Apache-2.0
"""Which part of which checkpoint tensor goes where: every layer declares its own `Slice`s, and `weights` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from phalanx import kernels
from phalanx.comm.group import Group, Solo
from phalanx.comm.one_sided import OneSided
from phalanx.config.quantization import Quantization
from phalanx.plan.memory import INT8_KV, KvFormat
from phalanx.tables.exchange import ExchangeTable

_CHUNK_ROWS = 4096  # quantized together, so that their copy in fp32 stays small


@dataclass(frozen=True)
class Stacked:
    """Where the tensor of an expert is in a checkpoint that has all experts of a layer in one: tensor `name` of `shape`
    [experts, rows, columns], of which it is rows from `row` on of expert `expert`. A tensor of two dims is the whole of another
    name."""

    name: str
    shape: tuple[int, ...]
    expert: int = 0
    row: int = 0


@dataclass(frozen=True)
class Slice:
    """Rows (dim 0) or columns (dim 1) begin .. begin + target.shape[dim] of checkpoint tensor `name`, whose full shape by
    config.json is `shape`; they are copied into `target`, a view of a weight on this rank.

    scale: where the target is e4m3 and the checkpoint is not: one per row of the target, fp32, computed as the rows are stored.
    Ranks that hold other columns of the same rows have scales of their own, since each applies them to its own partial sum.
    stacked: where it is in a checkpoint that does not have `name`. at: the part of the stored tensor to read, where that is not
    rows or columns; `arrange` turns it into the target's shape. dequantize: gets the values instead of the target, where the
    checkpoint has them in e4m3 and the target is not.
    """

    name: str
    shape: tuple[int, ...]
    target: Tensor
    begin: int = 0
    dim: int = 0
    scale: Tensor | None = None
    stacked: Stacked | None = None
    at: tuple[slice, ...] = ()
    arrange: Callable[[Tensor], Tensor] = lambda values: values
    dequantize: Callable[[Tensor], None] | None = None

    @property
    def end(self) -> int:
        return self.begin + self.target.shape[self.dim]

    def store(self, values: Tensor) -> None:
        """Store the values that were read, of the target's shape."""
        if self.dequantize is not None:
            self.dequantize(values)
            return
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

    dp: the ranks that hold the same slices for other requests; experts are split over them, too. expert_exchange: how tokens get
    there, see `EngineOptions`. one_sided: over dp, where they may go that way; exchange_table: when, None for always. moe_ep: ranks
    of the group that experts are split over. redundant_experts: copies beside a layer's experts, on all ranks together. traffic:
    experts are drawn by a power law with this exponent, instead of computed by the router; None: they are not. quantization: which
    linear layers are in FP8 instead, and how. fp8_gemm: their activations are FP8 too; else their weights are dequantized for each
    GEMM. fp8_cache: keys and values are stored in FP8; int8_cache: in int8, with a scale for each.
    """

    group: Group
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None
    fp8_gemm: bool = False
    fp8_cache: bool = False
    int8_cache: bool = False
    moe_ep: int = 1
    traffic: float | None = None
    dp: Group = field(default_factory=Solo)
    expert_exchange: str = "ALL_GATHER"
    one_sided: OneSided | None = None
    exchange_table: ExchangeTable | None = None
    redundant_experts: int = 0

    @property
    def expert_runs(self) -> int:
        """How many runs the experts of a layer are split into."""
        return self.dp.size * self.moe_ep

    @property
    def moe_tp(self) -> int:
        """How many ranks share a run of experts, each with a slice of every expert."""
        return self.group.size // self.moe_ep

    @property
    def expert_run(self) -> int:
        """Which run is this rank's."""
        return self.dp.rank * self.moe_ep + self.group.rank // self.moe_tp

    @property
    def moves_experts(self) -> bool:
        """Whether experts can move between ranks: those of each layer are spread over ranks of the group, and of it alone."""
        return self.moe_ep > 1 and self.dp.size == 1

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values in the cache."""
        if self.int8_cache:
            return torch.int8
        return torch.float8_e4m3fn if self.fp8_cache else self.dtype

    @property
    def kv_format(self) -> KvFormat:
        """The same as the planner counts it."""
        return INT8_KV if self.int8_cache else KvFormat(self.cache_dtype.itemsize)

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

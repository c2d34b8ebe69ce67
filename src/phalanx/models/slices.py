# SPDX-License-Identifier: Apache-2.0
"""Which part of which checkpoint tensor goes where: every layer declares its own `Slice`s, and `weights` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from phalanx import kernels
from phalanx.comm.group import Group, Solo
from phalanx.comm.one_sided import OneSided
from phalanx.config.quantization import Quantization
from phalanx.kernels.adapters.rows import AdapterBatch
from phalanx.kernels.capabilities import has_fp8_gemm
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.layout.cache import kv_dtype
from phalanx.layout.families import WeightTensor
from phalanx.tables.exchange import ExchangeTable

_CHUNK_ROWS = 4096  # quantized together, so that their copy in fp32 stays small


@dataclass(frozen=True)
class Stacked:
    """Where a tensor is in a checkpoint that has several in one (`declare.Fused`): rows from `row` on of tensor `name` of `shape`,
    which has all experts of a layer ([experts, rows, columns], of which it is expert `expert`) or none. transposed: see `Fused`."""

    name: str
    shape: tuple[int, ...]
    expert: int = 0
    row: int = 0
    transposed: bool = False

    @classmethod
    def of(cls, tensor: WeightTensor, expert: int = 0) -> Stacked | None:
        """Of a declared tensor; None where each checkpoint has it alone."""
        fused = tensor.fused
        return None if fused is None else cls(fused.name, tensor.fused_shape, expert, fused.row, fused.transposed)


@dataclass(frozen=True)
class Slice:
    """Rows (dim 0) or columns (dim 1) begin .. begin + target.shape[dim] of checkpoint tensor `name`, whose full shape by
    config.json is `shape`; they are copied into `target`, a view of a weight on this rank.

    scale: where the target is e4m3 and the checkpoint is not: one per row of the target, fp32, computed as the rows are stored.
    Ranks that hold other columns of the same rows have scales of their own, since each applies them to its own partial sum.
    stacked: where it is in a checkpoint that does not have `name`. at: the part of the stored tensor to read, where that is not
    rows or columns; `arrange` turns it into the target's shape.
    take: gets the values instead of the target, where the checkpoint has them in another form, of one of `dtypes`; a target on the
    meta device only says what they are. absent: called where the checkpoint does not have the tensor; None: it must have it.
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
    take: Callable[[Tensor], None] | None = None
    dtypes: tuple[str, ...] = ()
    absent: Callable[[], None] | None = None

    @property
    def end(self) -> int:
        return self.begin + self.target.shape[self.dim]

    def store(self, values: Tensor) -> None:
        """Store the values that were read, of the target's shape."""
        if self.take is not None:
            self.take(values)
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
    inputs: input features of the GEMM whose weight it scales; 0 for the scale of activations. largest: of the stored weights.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    store: Callable[[Tensor], None]
    may_be_zero: bool = False
    unset: float | None = None
    inputs: int = 0
    largest: float = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class WeightPart:
    """What a rank holds of the weight of checkpoint layer `name`, which is `shape` [out, in]: some of its rows, or of its columns.
    stacked: see `Slice`."""

    name: str
    shape: tuple[int, ...]
    rows: range
    columns: range
    stacked: Stacked | None = None


@dataclass(frozen=True)
class LayerContext:
    """What a layer is built for.

    declared: the model's tensors by their names (with {expert}, of experts' tensors).
    group: the ranks that split it; dtype: of arithmetic, and of weights that are not quantized; device.
    quantization: which linear layers are in FP8, and how.
    fp8_gemm: activations of those are FP8, too; else their weights are dequantized for each GEMM. None: where the device can.
    kv_cache_dtype: of keys and values: "model" (dtype), "fp8", or "int8", with a scale for each.
    dp: the ranks that hold the same slices for other requests; experts are split over them, too.
    dcp: the ranks of `group` over which the tokens of latents are divided.
    moe_ep: ranks of `group` that experts are split over. redundant_experts: copies of a layer's experts, on all ranks together.
    expert_exchange: how tokens get to experts over dp, see `EngineOptions`. one_sided: through what they may go that way.
    exchange_table: when they do; None for always.
    row_by_row: of several tokens, each is computed alone, so that its bits do not depend on the others: `deterministic` on a CPU.
    batch_invariant: the kernels of a GPU give a token's bits whatever other tokens are beside it: `deterministic` there.
    traffic: experts are drawn by a power law with this exponent, instead of computed by the router; None: they are not.
    int4_fp8: in steps of many tokens, activations are in FP8 where weights are 4-bit integers.
    last_embeds: the last pipeline stage has the embedding, too: what proposes drafts there shares it.
    adapters: what linear layers that have room for adapters share; None: there are none.
    """

    group: Group
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None
    fp8_gemm: bool | None = None
    kv_cache_dtype: str = "model"
    moe_ep: int = 1
    traffic: float | None = None
    dp: Group = field(default_factory=Solo)
    expert_exchange: str = "ALL_GATHER"
    one_sided: OneSided | None = None
    exchange_table: ExchangeTable | None = None
    redundant_experts: int = 0
    row_by_row: bool = False
    batch_invariant: bool = False
    int4_fp8: bool = False
    last_embeds: bool = False
    adapters: AdapterBatch | None = None
    dcp: Group = field(default_factory=Solo)
    declared: Mapping[str, WeightTensor] = field(default_factory=dict)

    def parts(self, *names: str) -> list[WeightPart]:
        """What this rank holds of the weights of these checkpoint layers, as their family declares it."""
        parts = []
        for name in names:
            tensor = self.declared[f"{name}.weight"]
            pieces, stacked, shape = tensor.parts(self.group.size, self.group.rank), Stacked.of(tensor), tensor.shape
            scheme = None if self.quantization is None else self.quantization.of(name)
            several = tensor.fused is not None and tensor.fused.rows > tensor.shape[0]
            if stacked is not None and several and scheme is not None and not scheme.on_load:  # tools quantize what is on disk
                name, shape, row = stacked.name.removesuffix(".weight"), tensor.fused_shape, stacked.row
                pieces = tuple((range(rows.start + row, rows.stop + row), columns) for rows, columns in pieces)
                stacked = None
            parts += [WeightPart(name, shape, rows, columns, stacked) for rows, columns in pieces]
        return parts

    def expert_parts(self, tensors: Sequence[WeightTensor], experts: Iterable[int]) -> list[WeightPart]:
        """What this rank holds of the tensors of these experts, one expert below the other."""
        parts = []
        for expert in experts:
            for tensor in tensors:
                rows, columns = self.expert_part(tensor)
                name = tensor.name.format(expert=expert).removesuffix(".weight")
                parts.append(WeightPart(name, tensor.shape, rows, columns, Stacked.of(tensor, expert)))
        return parts

    def of_gemm(self, prefix: str, gemm: str) -> list[WeightTensor]:
        """The tensors of a GEMM of the layer with this name."""
        return [each for each in self.declared.values() if each.gemm == gemm and each.name.startswith(f"{prefix}.")]

    def expert_part(self, tensor: WeightTensor) -> tuple[range, ...]:
        """What each rank that has an expert holds of its tensor."""
        (part,) = tensor.parts(self.moe_tp, self.group.rank % self.moe_tp)
        return part

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
    def kv_dtype(self) -> str:
        """Of keys and values in the cache, by the name that `layout.cache` has for it."""
        return kv_dtype(self.kv_cache_dtype, DTYPE_NAMES[self.dtype])

    @property
    def multiplies_fp8(self) -> bool:
        """Whether FP8 layers may quantize their activations."""
        return has_fp8_gemm(self.device) if self.fp8_gemm is None else self.fp8_gemm

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialized weight, in the context's dtype unless another is given."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)


class Sliced(nn.Module):
    """A layer with weights of its own."""

    def slices(self) -> Iterator[Slice]:
        """What to read from a checkpoint, covering every weight of this layer."""
        raise NotImplementedError

    def dummy_slices(self) -> Iterator[Slice]:
        """Those that random values are made for."""
        return self.slices()

    def scales(self) -> Iterator[Scale]:
        """The quantization scales to read beside them."""
        return iter(())

    def reading(self) -> None:
        """A checkpoint's slices and scales are to be stored, for the first time or anew."""

    def loaded(self) -> None:
        """All of a checkpoint's slices and scales have been stored: bring them into the form in which the layer computes."""


class TensorPart(Sliced):
    """weight: this rank's part of a declared tensor that no GEMM multiplies."""

    def __init__(self, name: str, *, context: LayerContext) -> None:
        super().__init__()
        self.tensor = context.declared[name]
        self.parts = self.tensor.parts(context.group.size, context.group.rank)
        rows = sum(len(part[0]) for part in self.parts)
        dtype = torch.float32 if self.tensor.kept == "fp32" else None
        self.weight = context.weight(rows, *map(len, self.parts[0][1:]), dtype=dtype)

    def slices(self) -> Iterator[Slice]:
        at = 0
        for rows, *_ in self.parts:
            yield Slice(self.tensor.name, self.tensor.shape, self.weight[at : at + len(rows)], rows.start)
            at += len(rows)

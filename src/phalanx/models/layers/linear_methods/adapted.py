# SPDX-License-Identifier: Apache-2.0
"""A linear layer to whose output adapters add (`Adapted`): around the method of the layer's own weight, whichever that is.

The delta is added before whatever follows the layer: to q, k and v before RoPE, to gate and up before SiLU, and to a row-parallel
layer's partial sum before the all-reduce, since B (A x) is the sum over ranks of B times their parts of A x. In a step whose
requests have no adapter of this layer, the layer is what it is without this class: the same kernels, and the same fusions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.errors import ModelError
from phalanx.kernels.adapters.dispatch import Delta
from phalanx.kernels.adapters.rows import AdapterBatch, AdapterFactors, AdapterRows, GemvDelta
from phalanx.kernels.gemm.linear import linear_with_delta
from phalanx.kernels.scaled_tensors import GemvArgs, Unscaled
from phalanx.layout.adapter import slot_rank
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear_methods.method import Fusion, LinearMethod
from phalanx.models.slices import LayerContext, Scale, Slice, WeightPart


class LayerFactors(NamedTuple):
    """What an adapter has for a layer on this rank, in host memory. a: by the number of its part, [rank, in]. b: one for each run
    of the layer's rows, [rows, rank], times the scale; None for those that it leaves alone. ranks [parts] int32."""

    a: Mapping[int, Tensor]
    b: Sequence[Tensor | None]
    ranks: Tensor


class Adapted(LinearMethod):
    """`method`, and the adapters' factors, zero until they are placed. names: of the checkpoint layers, each of which has an A of
    its own."""

    def __init__(self, method: LinearMethod, adapters: AdapterBatch, context: LayerContext) -> None:
        super().__init__(method.parts, context)
        if method.input_quantizer is not None:
            raise ModelError(
                f"max_loras={adapters.slots} does not work with this checkpoint",
                held=f"{method.parts[0].name} takes activations in FP8", why="adapters multiply activations in 16 bit",
                next="use a checkpoint in 16 bit, int4 or int8, or max_loras=0",
            )  # fmt: skip
        self.method, self.adapters = method, adapters
        self.names = list(dict.fromkeys(part.name for part in method.parts))
        slots, room, device = adapters.slots, slot_rank(adapters.max_rank), context.device
        columns: list[tuple[int, int, int]] = []
        for part, rows in self._placed():
            number = self.names.index(part.name)
            if columns and columns[-1][0] == number:
                columns[-1] = number, columns[-1][1], rows.stop
            else:
                columns.append((number, rows.start, rows.stop))
        # No parameters: a checkpoint has none of them, and layers of one kind have the same.
        self.factors = AdapterFactors.empty(slots, room, self.in_features, columns, self.dtype, device)
        self.row_order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.factors.a.nbytes + self.factors.b.nbytes

    def runs(self) -> Iterator[tuple[int, WeightPart]]:
        """Each part of the weight, with the number of its name."""
        return ((self.names.index(part.name), part) for part in self.parts)

    def in_slot(self, slot: int) -> list[Tensor]:
        """All that the layer has of a slot, on the device."""
        return [self.factors.a[slot], self.factors.b[slot], self.factors.ranks[slot]]

    def to_place(self, slot: int, layer: LayerFactors) -> Iterator[tuple[Tensor, Tensor]]:
        """(Where to, what): the copies that bring an adapter's factors into a slot."""
        a, b, ranks = self.in_slot(slot)
        yield ranks, layer.ranks
        for number, values in layer.a.items():
            yield a[number * b.shape[1] :][: len(values)], values
        for (_, rows), values_b in zip(self._placed(), layer.b, strict=True):
            if values_b is not None:
                yield b[rows, : values_b.shape[1]], values_b

    def placed(self, slot: int, layer: LayerFactors | None) -> None:
        """The copies have been queued. None: the adapter leaves the layer alone."""
        self.factors.ranks_cpu[slot] = [0] * len(self.names) if layer is None else layer.ranks.tolist()
        if layer is not None and self.row_order is not None:
            self.factors.b[slot].copy_(self.factors.b[slot][self.row_order])

    def _rows(self) -> AdapterRows | None:
        """The tokens of this forward that have an adapter of this layer; None where none has. A graph is for all that may come."""
        rows = self.adapters.rows
        if rows is None or rows.slots is None:
            return rows
        return rows if any(any(self.factors.ranks_cpu[slot]) for slot in rows.slots) else None

    def _with_delta(self, gemm: Callable[[], Tensor | Unscaled], x: Activation) -> Tensor | Unscaled:
        """The output of `gemm` for x, with the delta of adapters."""
        rows = self._rows()
        if rows is None:
            return gemm()
        assert isinstance(x, Tensor)
        assert x.shape[0] == rows.total, "a layer that sees other tokens than the batch cannot be adapted"
        delta = Delta.begin(x, self.factors, rows)
        out = gemm()
        assert isinstance(out, Tensor)
        return delta.add_to(out)

    def _gemv(self, x: Activation, bias: Tensor | None, group: Group | None = None) -> Tensor | None:
        """The output for one token of a captured step, delta and all, by one kernel, in a tensor of the group's where there is one.
        None: a GEMM, and then the delta."""
        rows = self.adapters.rows
        if x.shape[0] > 1 or rows is None or rows.total != 1 or not self.fuses("gemv"):
            return None  # also where the layer sees one token of a batch of more: it may not be the adapter's
        out = None if group is None else group.empty(1, self.out_features, dtype=self.dtype, device=self.factors.a.device)
        return linear_with_delta(self.gemv_args(x, bias), out)

    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        fused = self._gemv(x, bias)
        out = self._with_delta(partial(self.method.multiply, x, bias), x) if fused is None else fused
        assert isinstance(out, Tensor)
        return out

    def plain_multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        out = self._with_delta(partial(self.method.plain_multiply, x, bias), x)
        assert isinstance(out, Tensor)
        return out

    def unscaled(self, x: Activation, bias: Tensor | None = None) -> Tensor | Unscaled:
        out = self._gemv(x, bias)
        return self._with_delta(partial(self.method.unscaled, x, bias), x) if out is None else out

    def for_sum(self, x: Activation, bias: Tensor | None, group: Group) -> Tensor | Unscaled:
        out = self._gemv(x, bias, group)
        return self._with_delta(partial(self.method.for_sum, x, bias, group), x) if out is None else out

    def fuses(self, fusion: Fusion) -> bool:
        """As the method, but for what leaves no room for a delta."""
        rows = self._rows()
        with_delta = fusion == "bias" or rows is None or (fusion == "gemv" and rows.step is not None)
        return with_delta and self.method.fuses(fusion)

    def gemv_args(self, x: Activation, bias: Tensor | None) -> GemvArgs:
        args, rows = self.method.gemv_args(x, bias), self._rows()
        return args if rows is None else args._replace(delta=GemvDelta.of(self.factors, rows))

    def write_into(self, x: Activation, bias: Tensor | None, targets: Sequence[tuple[slice, Tensor]]) -> None:
        self.method.write_into(x, bias, targets)

    def reorder_rows(self, rows: list[int]) -> None:
        self.method.reorder_rows(rows)
        self.row_order = torch.tensor(rows, device=self.factors.b.device)

    def input_scales(self, names: Iterable[str]) -> Iterator[Scale]:
        return self.method.input_scales(names)

    def slices(self) -> Iterator[Slice]:
        """None: `method` is a layer with weights of its own."""
        return iter(())


def adapted(method: LinearMethod, context: LayerContext) -> LinearMethod:
    """The method of a layer, with room for adapters where the engine has any."""
    return method if context.adapters is None else Adapted(method, context.adapters, context)

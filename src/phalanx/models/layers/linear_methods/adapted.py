# SPDX-License-Identifier: Apache-2.0
"""A linear layer to whose output adapters add (`Adapted`): around the method of the layer's own weight, whichever that is.

The delta is added before whatever follows the layer: to q, k and v before RoPE, to gate and up before SiLU, and to a row-parallel
layer's partial sum before the all-reduce, since B (A x) is the sum over ranks of B times their parts of A x. In a step whose
requests have no adapter of this layer, the layer is what it is without this class: the same kernels, and the same fusions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.errors import ModelError
from phalanx.kernels.adapters.dispatch import add_delta
from phalanx.kernels.adapters.rows import AdapterBatch, AdapterFactors, AdapterRows, column_tiles
from phalanx.kernels.scaled_tensors import GemvArgs, Unscaled
from phalanx.layout.adapter import slot_rank
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear_methods.method import Fusion, LinearMethod
from phalanx.models.slices import LayerContext, Scale, Slice, WeightPart


class LayerFactors(NamedTuple):
    """What an adapter has for a layer on this rank, in host memory. a: by the number of its part, [rank, in]. b: one for each run
    of the layer's rows, [rows, rank], times the scale; None for those that it leaves alone."""

    a: Mapping[int, Tensor]
    b: Sequence[Tensor | None]


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
        self.factors = AdapterFactors(
            torch.zeros(slots, len(self.names) * room, self.in_features, dtype=self.dtype, device=device),
            torch.zeros(slots, self.out_features, room, dtype=self.dtype, device=device),
            torch.zeros(slots, len(self.names), dtype=torch.int32, device=device), columns, column_tiles(columns, device),
            [[0] * len(self.names) for _ in range(slots)],
        )  # fmt: skip
        self.row_order: list[int] = []

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.factors.a.nbytes + self.factors.b.nbytes

    def runs(self) -> Iterator[tuple[int, WeightPart]]:
        """Each part of the weight, with the number of its name."""
        return ((self.names.index(part.name), part) for part in self.parts)

    @torch.inference_mode()
    def place(self, slot: int, layer: LayerFactors | None) -> None:
        """Write an adapter's factors into a slot, over all that another one left there; None: it leaves the layer alone. In the
        order of the device's queue."""
        a, b, ranks, room = self.factors.a[slot], self.factors.b[slot], [0] * len(self.names), self.factors.b.shape[2]
        if layer is not None or any(self.factors.ranks_cpu[slot]):
            a.zero_()
            b.zero_()
        if layer is not None:
            for number, values in layer.a.items():
                ranks[number] = len(values)
                a[number * room : number * room + len(values)].copy_(values, non_blocking=True)
            for (_, rows), values_b in zip(self._placed(), layer.b, strict=True):
                if values_b is not None:
                    b[rows, : values_b.shape[1]].copy_(values_b, non_blocking=True)
            if self.row_order:
                b.copy_(b[self.row_order])
        self.factors.ranks_cpu[slot] = ranks
        self.factors.ranks[slot].copy_(torch.tensor(ranks, dtype=torch.int32))

    def _rows(self) -> AdapterRows | None:
        """The tokens of this forward that have an adapter of this layer; None where none has. A graph is for all that may come."""
        rows = self.adapters.rows
        if rows is None or rows.slots is None:
            return rows
        return rows if any(any(self.factors.ranks_cpu[slot]) for slot in rows.slots) else None

    def _with_delta(self, out: Tensor | Unscaled, x: Activation) -> Tensor | Unscaled:
        rows = self._rows()
        if rows is None:
            return out
        assert isinstance(x, Tensor)
        assert isinstance(out, Tensor)
        assert x.shape[0] == rows.total, "a layer that sees other tokens than the batch cannot be adapted"
        return add_delta(out, x, self.factors, rows)

    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        out = self._with_delta(self.method.multiply(x, bias), x)
        assert isinstance(out, Tensor)
        return out

    def plain_multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        out = self._with_delta(self.method.plain_multiply(x, bias), x)
        assert isinstance(out, Tensor)
        return out

    def unscaled(self, x: Activation, bias: Tensor | None = None) -> Tensor | Unscaled:
        return self._with_delta(self.method.unscaled(x, bias), x)

    def for_sum(self, x: Activation, bias: Tensor | None, group: Group) -> Tensor | Unscaled:
        return self._with_delta(self.method.for_sum(x, bias, group), x)

    def fuses(self, fusion: Fusion) -> bool:
        """As the method, but for what leaves no room for a delta."""
        return self.method.fuses(fusion) and (fusion == "bias" or self._rows() is None)

    def gemv_args(self, x: Activation, bias: Tensor | None) -> GemvArgs:
        return self.method.gemv_args(x, bias)

    def write_into(self, x: Activation, bias: Tensor | None, targets: Sequence[tuple[slice, Tensor]]) -> None:
        self.method.write_into(x, bias, targets)

    def reorder_rows(self, rows: list[int]) -> None:
        self.method.reorder_rows(rows)
        self.row_order = rows

    def input_scales(self, names: Iterable[str]) -> Iterator[Scale]:
        return self.method.input_scales(names)

    def slices(self) -> Iterator[Slice]:
        """None: `method` is a layer with weights of its own."""
        return iter(())


def adapted(method: LinearMethod, context: LayerContext) -> LinearMethod:
    """The method of a layer, with room for adapters where the engine has any."""
    return method if context.adapters is None else Adapted(method, context.adapters, context)

# SPDX-License-Identifier: Apache-2.0
"""Weights in 16 or 32 bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

from phalanx import kernels
from phalanx.comm.group import Group
from phalanx.kernels.scaled_tensors import GemvArgs
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear_methods.method import Fusion, GroupedWeight, LinearMethod, weight_slice
from phalanx.models.slices import LayerContext, Slice, WeightPart


class Unquantized(LinearMethod):
    """weight [out, in] in the model's dtype."""

    def __init__(self, parts: Sequence[WeightPart], context: LayerContext) -> None:
        super().__init__(parts, context)
        self.weight = context.weight(self.out_features, self.in_features)

    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        return kernels.linear(x, self.weight, bias)

    def plain_multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self.weight, bias)

    def for_sum(self, x: Activation, bias: Tensor | None, group: Group) -> Tensor:
        assert isinstance(x, Tensor)
        out = group.empty(x.shape[0], self.out_features, dtype=self.dtype, device=x.device)
        return kernels.linear(x, self.weight, bias, out=out)

    def fuses(self, fusion: Fusion) -> bool:
        return True

    def gemv_args(self, x: Activation, bias: Tensor | None) -> GemvArgs:
        return GemvArgs.of(x, self.weight, bias, self.dtype)

    def write_into(self, x: Activation, bias: Tensor | None, targets: Sequence[tuple[slice, Tensor]]) -> None:
        assert isinstance(x, Tensor)
        for rows, out in targets:
            kernels.linear(x[rows], self.weight, bias, out=out)

    def reorder_rows(self, rows: list[int]) -> None:
        self.weight.copy_(self.weight[rows])

    def grouped(self) -> GroupedWeight:
        """For the GEMMs of experts, of which it has some, one below the other."""
        return GroupedWeight(self.weight)

    def slices(self) -> Iterator[Slice]:
        for part, here in self._placed():
            yield weight_slice(part, self.weight[here])

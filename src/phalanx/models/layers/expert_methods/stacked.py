# SPDX-License-Identifier: Apache-2.0
"""Experts that a checkpoint has in one tensor for all of a layer, as gpt-oss: with biases, and gate and up in alternate rows.

Here each expert's gate rows come before its up rows, so that a rank's kernels read two runs. The bias of `down` is inside an
expert's weight, and is added by one of the ranks that share the expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from phalanx.config.experts import Experts
from phalanx.kernels.moe.tensors import ExpertTensors
from phalanx.layout.families import WeightTensor
from phalanx.models.layers.expert_methods.method import ExpertMethod
from phalanx.models.slices import LayerContext, Slice, Sliced


class StackedLinear(Sliced):
    """One projection of this rank's experts. weight [experts * rows, columns], the experts one below the other. bias
    [experts * rows], or None where there is none, or another rank adds it."""

    def __init__(self, tensor: WeightTensor, local: Sequence[int], *, has_bias: bool, context: LayerContext) -> None:
        super().__init__()
        self.tensor, self.local, self.part = tensor, local, context.expert_part(tensor)
        self.rows, self.columns = map(len, self.part)
        self._allocate(context)
        self.bias = context.weight(len(local) * self.rows) if has_bias else None

    def _allocate(self, context: LayerContext) -> None:
        self.weight = context.weight(len(self.local) * self.rows, self.columns)
        self.weight_scale: nn.Parameter | None = None

    def slices(self) -> Iterator[Slice]:
        tensor, rows = self.tensor, slice(self.part[0].start, self.part[0].stop)
        for number, expert in enumerate(self.local):
            one, here = slice(expert, expert + 1), slice(number * self.rows, (number + 1) * self.rows)
            yield from self._of_expert(one, rows, slice(self.part[1].start, self.part[1].stop), here)
            if self.bias is not None:
                shape = tensor.experts, tensor.shape[0]
                yield Slice(f"{tensor.name}_bias", shape, self.bias[here], at=(one, rows), arrange=lambda v: self.in_rows(v[0]))

    def _of_expert(self, one: slice, rows: slice, columns: slice, here: slice) -> Iterator[Slice]:
        """What to read for the weight of an expert, which has the rows `here`."""
        shape = self.tensor.experts, *self.tensor.shape[::-1]
        yield Slice(
            self.tensor.name, shape, self.weight[here], at=(one, columns, rows), arrange=lambda values: self.in_rows(values[0].t())
        )

    def in_rows(self, values: Tensor) -> Tensor:
        """Rows [n, ...] in the order of the checkpoint -> in that of the weight."""
        return torch.cat((values[0::2], values[1::2])) if self.tensor.gemm == "experts_gate_up" else values


class StackedExperts(ExpertMethod):
    """In 16 or 32 bit."""

    linear = StackedLinear

    def __init__(
        self, gate_up: Sequence[WeightTensor], down: WeightTensor, local: Sequence[int], experts: Experts, context: LayerContext
    ) -> None:
        super().__init__(gate_up, down, local, experts, context)
        self.count, self.swiglu = len(local), experts.swiglu
        first = context.group.rank % context.moe_tp == 0
        (both,) = gate_up
        self.gate_up_proj = self.linear(both, local, has_bias=experts.biases, context=context)
        self.down_proj = self.linear(down, local, has_bias=experts.biases and first, context=context)

    def tensors(self, first: int) -> ExpertTensors:
        gate_up, down = self.gate_up_proj, self.down_proj
        return ExpertTensors(
            self.count, first, gate_up.weight, down.weight, gate_up.weight_scale, down.weight_scale, gate_up_bias=gate_up.bias,
            down_bias=down.bias, swiglu=self.swiglu,
        )  # fmt: skip

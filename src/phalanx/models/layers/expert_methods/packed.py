# SPDX-License-Identifier: Apache-2.0
"""Experts in a form that a linear method reads and packs for each of them, as 4-bit integers and NVFP4: their projections lie side
by side in one memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from phalanx.config import dotted_path
from phalanx.config.experts import Experts
from phalanx.kernels.moe.tensors import ExpertTensors
from phalanx.layout.families import WeightTensor
from phalanx.models.layers.expert_methods.method import ExpertMethod
from phalanx.models.layers.linear_methods.int4 import Int4Linear
from phalanx.models.layers.linear_methods.nvfp4 import Nvfp4Linear
from phalanx.models.slices import LayerContext


class PackedStack(nn.Module):
    """One projection of each of this rank's experts, or gate and up. memory: the tensors of its packed weight, with a dim of
    experts before the others."""

    def __init__(self, tensors: Sequence[WeightTensor], local: Sequence[int], context: LayerContext) -> None:
        super().__init__()
        parts = [context.expert_parts(tensors, [expert]) for expert in local]
        assert context.quantization is not None
        scheme = context.quantization.of(parts[0][0].name)
        assert scheme is not None
        assert scheme.linear_method is not None
        method: type[Int4Linear | Nvfp4Linear] = dotted_path.load(scheme.linear_method, option="linear_method")
        context = replace(context, quantization=scheme)
        of_expert = method.memory_of(parts[0], context)
        self.memory = nn.ParameterList(context.weight(len(local), *each.shape, dtype=each.dtype) for each in of_expert)
        self.experts = nn.ModuleList(
            method(part, context, [each[number] for each in self.memory]) for number, part in enumerate(parts)
        )  # fmt: skip

    @property
    def weight(self) -> Any:
        """As the kernels take it: see `ExpertTensors.packed`."""
        first = self.experts[0]
        assert isinstance(first, Int4Linear | Nvfp4Linear)
        return type(first.weight)(*self.memory, *first.weight[len(self.memory) :])


class PackedExperts(ExpertMethod):
    """Of checkpoints in such a form, or rounded while they load."""

    def __init__(
        self, gate_up: Sequence[WeightTensor], down: WeightTensor, local: Sequence[int], experts: Experts, context: LayerContext
    ) -> None:
        super().__init__(gate_up, down, local, experts, context)
        self.count, self.gated, self.gelu = len(local), experts.gated, experts.gelu
        self.gate_up_proj, self.down_proj = PackedStack(gate_up, local, context), PackedStack([down], local, context)

    def tensors(self, first: int) -> ExpertTensors:
        gate_up, down = self.gate_up_proj.weight, self.down_proj.weight
        return ExpertTensors(
            self.count, first, gate_up.words, down.words, packed=(gate_up, down), gated=self.gated, gelu=self.gelu
        )  # fmt: skip

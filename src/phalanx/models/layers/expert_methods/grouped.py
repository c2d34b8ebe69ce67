# SPDX-License-Identifier: Apache-2.0
"""Experts in 16 bit, in FP8 with a scale for each row or block, or in int8: their weights are those of two linear methods, in which
each expert is some rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.config.experts import Experts
from phalanx.errors import ModelError
from phalanx.kernels.moe.heuristics import BLOCK_K
from phalanx.kernels.moe.tensors import ExpertTensors
from phalanx.layout.families import WeightTensor
from phalanx.models.layers.expert_methods.method import ExpertMethod
from phalanx.models.layers.linear_methods.choose import linear_method
from phalanx.models.layers.linear_methods.fp8 import Fp8
from phalanx.models.layers.linear_methods.fp8_block import Fp8Block
from phalanx.models.layers.linear_methods.unquantized import Unquantized
from phalanx.models.slices import LayerContext, Scale


class GroupedExperts(ExpertMethod):
    """gate_up_proj [experts * 2 * inner, hidden], down_proj [experts * hidden, inner]: the experts one below the other."""

    def __init__(
        self, gate_up: Sequence[WeightTensor], down: WeightTensor, local: Sequence[int], experts: Experts, context: LayerContext
    ) -> None:
        super().__init__(gate_up, down, local, experts, context)
        self.count, self.gated, self.gelu, self.elsewhere = len(local), experts.gated, experts.gelu, dict[str, list[str]]()
        self.batch_invariant = context.batch_invariant
        methods = []
        for name, tensors in (("gate_up_proj", gate_up), ("down_proj", [down])):
            method = linear_method(context.expert_parts(tensors, local), context)
            assert isinstance(method, Unquantized | Fp8)
            if isinstance(method, Fp8Block) and method.block[1] != BLOCK_K:
                raise ModelError(
                    f"{tensors[0].name.format(expert=0)} is in FP8 with a scale for each {method.block[1]} columns",
                    held=f"experts' GEMMs take {BLOCK_K}",
                    next="use a checkpoint with blocks of 128 columns, or the 16-bit one with dtype='fp8'",
                )  # fmt: skip
            methods.append(method)
            if context.moves_experts:
                others = (expert for expert in range(experts.count) if expert not in local)
                self.elsewhere[name] = [part.name for part in context.expert_parts(tensors, others)]
        self.gate_up_proj, self.down_proj = methods
        self.input_quantizer = self.gate_up_proj.input_quantizer

    def tensors(self, first: int) -> ExpertTensors:
        gate_up, down = self.gate_up_proj.grouped(), self.down_proj.grouped()
        return ExpertTensors(
            self.count, first, gate_up.weight, down.weight, gate_up.scale, down.scale, gate_up.input_scale, down.input_scale,
            down.begin, gate_up.quantizes and down.quantizes, gated=self.gated, gelu=self.gelu,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def scales(self) -> Iterator[Scale]:
        """Of experts that other ranks have: they may move here, so a static scale of inputs covers them, too."""
        for method, names in zip((self.gate_up_proj, self.down_proj), self.elsewhere.values(), strict=bool(self.elsewhere)):
            yield from method.input_scales(names)

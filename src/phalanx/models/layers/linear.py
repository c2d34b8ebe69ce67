# SPDX-License-Identifier: Apache-2.0
"""Linear layers, named for the way the ranks of a tensor-parallel group split them. How the weight is held and multiplied is the
business of the layer's `method`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from phalanx.comm.group import ResidualRmsNorm, ScatterTargets
from phalanx.comm.sequence_parallel import unshard
from phalanx.kernels.scaled_tensors import GemvArgs, Unscaled
from phalanx.models.layers.activation import Activation, NormOutput
from phalanx.models.layers.linear_methods.adapted import adapted
from phalanx.models.layers.linear_methods.batch_invariant import batch_invariant
from phalanx.models.layers.linear_methods.choose import linear_method
from phalanx.models.layers.linear_methods.method import LinearMethod
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext, Slice, Sliced, WeightPart


def _method(parts: Sequence[WeightPart], context: LayerContext) -> LinearMethod:
    return adapted(batch_invariant(linear_method(parts, context), context), context)


class ColumnParallelLinear(Sliced):
    """y = x W^T + b, split by output features: each rank computes some of them, without communication.

    Its weight is [local_out, in]: the given parts, one below the other. row_order: the order into which its rows are put once they
    have been read; none: as they are.
    """

    def __init__(self, parts: Sequence[WeightPart], *, bias: bool, context: LayerContext) -> None:
        super().__init__()
        self.parts, self.row_order, self.context = tuple(parts), list[int](), context
        self.method = _method(parts, context)
        self.bias = context.weight(self.method.out_features) if bias else None

    @classmethod
    def of(cls, *names: str, context: LayerContext) -> ColumnParallelLinear:
        """Checkpoint layers of one input as one GEMM: this rank's part of each, in order."""
        return cls(context.parts(*names), bias=f"{names[0]}.bias" in context.declared, context=context)

    def forward(self, x: Activation, *, may_stay_unscaled: bool = False) -> Tensor | Unscaled:
        """x [T, in] -> [T, local_out]. may_stay_unscaled: the reader can apply the scales of a GEMM."""
        return self.method.unscaled(x, self.bias) if may_stay_unscaled else self.method.multiply(x, self.bias)

    def gemv_args(self, x: Activation) -> GemvArgs | None:
        """The operands of a GEMV that is fused with the op behind it, for x [1, in]. None for more tokens, and where the method
        refuses."""
        return self.method.gemv_args(x, self.bias) if x.shape[0] == 1 and self.method.fuses("gemv") else None

    def take_plain(self) -> None:
        """As `ParallelLMHead.take_plain`."""
        self.context = replace(self.context, quantization=None)
        self.method = _method(self.parts, self.context)

    def loaded(self) -> None:
        if self.row_order:
            self.method.reorder_rows(self.row_order)
            if self.bias is not None:
                self.bias.copy_(self.bias[self.row_order])

    def slices(self) -> Iterator[Slice]:
        at = 0
        for part in self.parts:
            if self.bias is not None:
                here = self.bias[at : at + len(part.rows)]
                yield Slice(f"{part.name}.bias", part.shape[:1], here, part.rows.start)
            at += len(part.rows)


class RowParallelLinear(Sliced):
    """y = x W^T + b, split by input features: each rank holds a partial sum, which the all-reduce completes. What follows in a
    decoder, the residual add and the next norm, is fused to the all-reduce. The bias is added once: by the first rank to
    its partial sum; or, where the method does not fuse it, after the sum.

    Its weight is [out, in / tp]; bias [out], complete on each rank. `local`: the input features of this rank.
    multiplier: of y, before the residual add (Granite). The GEMM's own fusions do not know it, and so they are refused.
    output_norm: of y, before the residual add (OLMo-2, Gemma-2): it needs the whole sum, and so nothing is fused to the all-reduce.
    """

    def __init__(self, part: WeightPart, *, bias: bool, multiplier: float = 1.0, context: LayerContext) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.output_norm: RmsNorm | None = None
        self.name, self.local, self.context, self.out_features = part.name, part.columns, context, part.shape[0]
        self.parts, self.method = (part,), _method([part], context)
        self.bias = context.weight(self.out_features) if bias else None

    @classmethod
    def of(cls, name: str, context: LayerContext, *, multiplier: float = 1.0) -> RowParallelLinear:
        """Checkpoint layer `name`."""
        (part,) = context.parts(name)
        return cls(part, bias=f"{name}.bias" in context.declared, multiplier=multiplier, context=context)

    def forward(self, x: Activation, residual: Tensor, norm: RmsNorm | None) -> tuple[NormOutput, Tensor]:
        """x [T, in / tp], residual [T, out] -> (norm(residual + y), residual + y); without a norm, the new residual twice.

        The norm comes quantized where it feeds a layer that takes it so. The residual comes in and goes out as a tensor or as a
        `ShardedResidual`; without a norm it goes out as a tensor.
        """
        group = self.context.group
        late_bias = None if self.method.fuses("bias") or self.bias is None else self._multiplied(self.bias)
        if norm is not None and norm.fuses and late_bias is None and self.output_norm is None:
            fusion = norm.fusion(residual, accepts_sharded=True)
            scattered = self._gemm_reduce_scatter(x, fusion)
            return norm.unpack(group.all_reduce(self._all_reduce_input(x), fusion) if scattered is None else scattered.finish())
        total, residual = group.all_reduce(self._all_reduce_input(x)), unshard(residual, group)
        if late_bias is not None:
            total = total + late_bias
        if self.output_norm is not None:
            total = self.output_norm(total)
        if norm is not None:
            return norm.of_sum(total, residual)
        residual = residual + total
        return residual, residual

    def take_plain(self) -> None:
        """As `ParallelLMHead.take_plain`."""
        self.context = replace(self.context, quantization=None)
        self.method = _method(self.parts, self.context)

    def partial_sum(self, x: Activation) -> Tensor:
        """x [T, in / tp] -> what this rank adds to the sum, [T, out]: for a block that adds other parts before the all-reduce."""
        return self._multiplied(self.method.multiply(x, self._own_bias()))

    def _all_reduce_input(self, x: Activation) -> Tensor | Unscaled:
        """As `partial_sum`, in the form in which `Group.all_reduce` takes it: its scales may still be missing."""
        group, bias = self.context.group, self._own_bias() if self.method.fuses("bias") else None
        if group.size == 1 or self.multiplier != 1.0:
            return self._multiplied(self.method.multiply(x, bias))
        return self.method.for_sum(x, bias, group)

    def _multiplied(self, values: Tensor) -> Tensor:
        return values if self.multiplier == 1.0 else values * self.multiplier

    def _own_bias(self) -> Tensor | None:
        """What this rank adds to its partial sum."""
        return self.bias if self.context.group.rank == 0 else None

    def _gemm_reduce_scatter(self, x: Activation, fusion: ResidualRmsNorm) -> ScatterTargets | None:
        """The partial sum, written straight to the ranks that sum its rows, where the group wants that; else None."""
        if self.multiplier != 1.0 or not self.method.fuses("reduce_scatter"):
            return None
        scatter = self.context.group.gemm_reduce_scatter_targets(fusion.residual.shape[0], self.out_features, fusion)
        if scatter is not None:
            self.method.write_into(x, self._own_bias(), scatter.targets)
        return scatter

    def slices(self) -> Iterator[Slice]:
        if self.bias is not None:
            yield Slice(f"{self.name}.bias", (self.out_features,), self.bias)

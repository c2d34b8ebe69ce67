# SPDX-License-Identifier: Apache-2.0
"""Linear layers, named for the way the ranks of a tensor-parallel group split them.

A layer in FP8 (`fp8`) holds e4m3 weights with scales. Its input is in 16 or 32 bit, or quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx import kernels
from phalanx.comm.group import ResidualRmsNorm, ScatterTargets, finish
from phalanx.comm.sequence_parallel import unshard
from phalanx.kernels.scaled_tensors import GemvArgs, Unscaled
from phalanx.models.layers.fp8 import Activation, NormOutput, add_weight
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext, Scale, Slice, Sliced
from phalanx.plan import shard


@dataclass(frozen=True)
class WeightRows:
    """Rows begin .. begin+count of the `total` output features of checkpoint layer `name`."""

    name: str
    total: int
    begin: int
    count: int


class ColumnParallelLinear(Sliced):
    """y = x W^T + b, split by output features: each rank computes some of them, without communication.

    weight [local_out, in]: the given runs of rows, one below the other.
    """

    weight: Tensor

    def __init__(self, rows: Sequence[WeightRows], in_features: int, *, bias: bool, context: LayerContext) -> None:
        super().__init__()
        self.rows = tuple(rows)
        self.in_features = in_features
        out = sum(run.count for run in rows)
        runs = [(run.begin, run.count) for run in rows]
        self.fp8 = add_weight(self, [run.name for run in rows], out, in_features, context=context, runs=runs)
        self.bias = context.weight(out) if bias else None

    def forward(self, x: Activation, *, may_stay_unscaled: bool = False) -> Tensor | Unscaled:
        """x [T, in] -> [T, local_out]. may_stay_unscaled: the reader can apply the scales of an FP8 GEMM."""
        if self.fp8 is not None:
            if may_stay_unscaled:
                return self.fp8.unscaled(x, self.weight, self.bias)
            return self.fp8.linear(x, self.weight, self.bias)
        assert isinstance(x, Tensor)
        return kernels.linear(x, self.weight, self.bias)

    def gemv_args(self, x: Activation) -> GemvArgs | None:
        """The operands of a GEMV that is fused with the op behind it, for x [1, in]. None for more tokens, and for a layer that
        dequantizes its weight for each GEMM."""
        if x.shape[0] != 1:
            return None
        if self.fp8 is None:
            return GemvArgs.of(x, self.weight, self.bias, self.weight.dtype)
        if not self.fp8.fp8_gemm:
            return None
        return GemvArgs.of(x, self.weight, self.bias, self.fp8.dtype, self.fp8.weight_scale, self.fp8.input_scale)

    def slices(self) -> Iterator[Slice]:
        at = 0
        for run in self.rows:
            here = slice(at, at + run.count)
            scale = None if self.fp8 is None else self.fp8.scale_on_load(here)
            yield Slice(f"{run.name}.weight", (run.total, self.in_features), self.weight[here], run.begin, scale=scale)
            if self.bias is not None:
                yield Slice(f"{run.name}.bias", (run.total,), self.bias[here], run.begin)
            at += run.count

    def scales(self) -> Iterator[Scale]:
        at = 0
        for run in self.rows:
            if self.fp8 is None:
                return
            rows, here = range(run.begin, run.begin + run.count), slice(at, at + run.count)
            yield from self.fp8.scales(run.name, (run.total, self.in_features), rows, here)
            at += run.count


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several layers of equal size on the same input, as one GEMM: each rank holds its slice of each, in order."""

    def __init__(
        self, names: Sequence[str], in_features: int, out_features: int, *, what: str, bias: bool, context: LayerContext
    ) -> None:
        local = shard.even(what, out_features, context.group.size, context.group.rank)
        rows = [WeightRows(name, out_features, local.start, len(local)) for name in names]
        super().__init__(rows, in_features, bias=bias, context=context)


class QkvParallelLinear(ColumnParallelLinear):
    """The query, key and value projections as one GEMM, split by heads; KV heads are replicated where the group has more ranks.

    forward: x [T, hidden] -> [T, (q + 2 kv) * head_dim], local heads. `heads` says which they are.
    """

    def __init__(
        self, name: str, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool, context: LayerContext
    ) -> None:
        heads = shard.heads(num_heads, num_kv_heads, context.group.size, context.group.rank)
        q = heads.q
        rows = [WeightRows(f"{name}.q_proj", num_heads * head_dim, q.start * head_dim, len(q) * head_dim)]
        for part in ("k_proj", "v_proj"):
            rows += [
                WeightRows(f"{name}.{part}", num_kv_heads * head_dim, run.start * head_dim, len(run) * head_dim)
                for run in _runs(heads.kv)
            ]
        super().__init__(rows, hidden_size, bias=bias, context=context)
        self.heads = heads


def _runs(numbers: Sequence[int]) -> list[range]:
    """Neighbours joined: (0, 1, 1) -> [0..1, 1..1], so that each run is read at once."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


class RowParallelLinear(Sliced):
    """y = x W^T + b, split by input features: each rank holds a partial sum, which the all-reduce completes. What follows in a
    decoder, the residual add and the next norm, is fused to the all-reduce. The bias is added once: by the first rank to
    its partial sum; or in FP8, whose scales come later, after the sum.

    weight [out, in / tp]; bias [out], complete on each rank. In FP8 a rank multiplies its partial sum by its own scales.
    """

    weight: Tensor

    def __init__(
        self, name: str, in_features: int, out_features: int, *, local: range, bias: bool, context: LayerContext
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.local, self.context = name, local, context
        self.in_features, self.out_features = in_features, out_features
        self.fp8 = add_weight(self, [name], out_features, len(local), context=context, begin=local.start)
        self.bias = context.weight(out_features) if bias else None

    def forward(self, x: Activation, residual: Tensor, norm: RmsNorm | None) -> tuple[NormOutput, Tensor]:
        """x [T, in / tp], residual [T, out] -> (norm(residual + y), residual + y); without a norm, the new residual twice.

        The norm comes quantized where it feeds a layer that takes it so. The residual comes in and goes out as a tensor or as a
        `ShardedResidual`; without a norm it goes out as a tensor.
        """
        group = self.context.group
        late_bias = self.bias if self.fp8 is not None else None
        if norm is not None and late_bias is None:
            fusion = norm.fusion(residual, accepts_sharded=True)
            scattered = self._gemm_reduce_scatter(x, fusion)
            return norm.unpack(group.all_reduce(self._all_reduce_input(x), fusion) if scattered is None else scattered.finish())
        total, residual = group.all_reduce(self._all_reduce_input(x)), unshard(residual, group)
        if late_bias is not None:
            total = total + late_bias
        if norm is not None:
            return norm.unpack(finish(total, norm.fusion(residual)))
        residual = residual + total
        return residual, residual

    def partial_sum(self, x: Activation) -> Tensor:
        """x [T, in / tp] -> what this rank adds to the sum, [T, out]: for a block that adds other parts before the all-reduce."""
        if self.fp8 is not None:
            return self.fp8.linear(x, self.weight, self._own_bias())
        assert isinstance(x, Tensor)
        return kernels.linear(x, self.weight, self._own_bias())

    def _all_reduce_input(self, x: Activation) -> Tensor | Unscaled:
        """As `partial_sum`, in the form in which `Group.all_reduce` takes it: its FP8 scales may still be missing."""
        group, context = self.context.group, self.context
        if self.fp8 is not None:  # a sum over ranks can apply the scales of the GEMM as it loads its output
            return self.fp8.unscaled(x, self.weight) if group.size > 1 else self.fp8.linear(x, self.weight)
        assert isinstance(x, Tensor)
        out = None
        if group.size > 1:
            out = group.empty(x.shape[0], self.out_features, dtype=context.dtype, device=context.device)
        return kernels.linear(x, self.weight, self._own_bias(), out=out)

    def _own_bias(self) -> Tensor | None:
        """What this rank adds to its partial sum in 16 or 32 bit."""
        return self.bias if self.context.group.rank == 0 else None

    def _gemm_reduce_scatter(self, x: Activation, fusion: ResidualRmsNorm) -> ScatterTargets | None:
        """The partial sum, written straight to the ranks that sum its rows, where the group wants that; else None."""
        if self.fp8 is not None and not self.fp8.can_write_into:
            return None
        scatter = self.context.group.gemm_reduce_scatter_targets(fusion.residual.shape[0], self.out_features, fusion)
        if scatter is None:
            return None
        if self.fp8 is not None:
            self.fp8.write_into(x, self.weight, scatter.targets)
        else:
            assert isinstance(x, Tensor)
            for rows, out in scatter.targets:
                kernels.linear(x[rows], self.weight, self._own_bias(), out=out)
        return scatter

    def slices(self) -> Iterator[Slice]:
        shape = (self.out_features, self.in_features)
        scale = None if self.fp8 is None else self.fp8.scale_on_load(slice(None))
        yield Slice(f"{self.name}.weight", shape, self.weight, self.local.start, dim=1, scale=scale)
        if self.bias is not None:
            yield Slice(f"{self.name}.bias", (self.out_features,), self.bias)

    def scales(self) -> Iterator[Scale]:
        if self.fp8 is not None:
            shape = (self.out_features, self.in_features)
            yield from self.fp8.scales(self.name, shape, range(self.out_features), slice(None))

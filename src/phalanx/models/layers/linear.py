# SPDX-License-Identifier: Apache-2.0
"""Linear layers, named for the way the ranks of a tensor-parallel group split them.

A layer in FP8 (`fp8`) holds e4m3 weights with scales, and takes activations as they are or quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx import kernels
from phalanx.comm.group import ResidualRmsNorm, Spread, finish
from phalanx.comm.rows import whole
from phalanx.kernels.reference import Unscaled
from phalanx.models.layers.fp8 import Activation, hold
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import Scale, Seat, Slice, Sliced
from phalanx.plan import shard


@dataclass(frozen=True)
class Rows:
    """Rows begin .. begin+count of the `total` output features of checkpoint layer `name`."""

    name: str
    total: int
    begin: int
    count: int


class ColumnParallelLinear(Sliced):
    """y = x W^T + b, split by output features: each rank computes some of them, and nobody needs to talk.

    weight [local_out, in]: the given runs of rows, below one another.
    """

    weight: Tensor

    def __init__(self, rows: Sequence[Rows], in_features: int, *, bias: bool, seat: Seat) -> None:
        super().__init__()
        self.rows = tuple(rows)
        self.in_features = in_features
        out = sum(run.count for run in rows)
        runs = [(run.begin, run.count) for run in rows]
        self.fp8 = hold(self, [run.name for run in rows], out, in_features, seat=seat, runs=runs)
        self.bias = seat.weight(out) if bias else None

    def forward(self, x: Activation, *, may_stay_unscaled: bool = False) -> Tensor | Unscaled:
        """x [T, in] -> [T, local_out], finished unless what reads it can apply an FP8 product's scales."""
        if self.fp8 is not None:
            if may_stay_unscaled:
                return self.fp8.unscaled(x, self.weight, self.bias)
            return self.fp8.linear(x, self.weight, self.bias)
        assert isinstance(x, Tensor)
        return kernels.linear(x, self.weight, self.bias)

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
    """Several equally wide layers on the same input, as one product: each rank holds its slice of each, in order."""

    def __init__(self, names: Sequence[str], in_features: int, out_features: int, *, what: str, bias: bool, seat: Seat) -> None:
        mine = shard.even(what, out_features, seat.group.size, seat.group.rank)
        rows = [Rows(name, out_features, mine.start, len(mine)) for name in names]
        super().__init__(rows, in_features, bias=bias, seat=seat)


class QkvParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one product, split by heads; KV heads are replicated where they must be.

    forward: x [T, hidden] -> [T, (q + 2 kv) * head_dim], local heads. `heads` says which they are.
    """

    def __init__(
        self, name: str, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool, seat: Seat
    ) -> None:
        self_heads = shard.heads(num_heads, num_kv_heads, seat.group.size, seat.group.rank)
        q = self_heads.q
        rows = [Rows(f"{name}.q_proj", num_heads * head_dim, q.start * head_dim, len(q) * head_dim)]
        for part in ("k_proj", "v_proj"):
            rows += [
                Rows(f"{name}.{part}", num_kv_heads * head_dim, run.start * head_dim, len(run) * head_dim)
                for run in _runs(self_heads.kv)
            ]
        super().__init__(rows, hidden_size, bias=bias, seat=seat)
        self.heads = self_heads


def _runs(numbers: Sequence[int]) -> list[range]:
    """Neighbours joined: (0, 1, 1) -> [0..1, 1..1], so that each run is read at once."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


class RowParallelLinear(Sliced):
    """y = x W^T + b, split by input features: each rank holds a partial sum, the all-reduce makes it whole, and what follows it in
    a decoder, the residual add and the next norm, is fused to it. The bias is added once, after the sum.

    weight [out, in / tp]; bias [out], whole on each rank. In FP8 a rank multiplies its partial sum by its own scales.
    """

    weight: Tensor

    def __init__(self, name: str, in_features: int, out_features: int, *, local: range, bias: bool, seat: Seat) -> None:
        super().__init__()
        self.name, self.local, self.seat = name, local, seat
        self.in_features, self.out_features = in_features, out_features
        self.fp8 = hold(self, [name], out_features, len(local), seat=seat, begin=local.start)
        self.bias = seat.weight(out_features) if bias else None

    def forward(self, x: Activation, residual: Tensor, norm: RmsNorm | None) -> tuple[Activation, Tensor]:
        """x [T, in / tp], residual [T, out] -> (norm(residual + y), residual + y); without a norm the residual stands for both.

        The norm comes quantized where it feeds a layer that takes it so. The residual comes in and goes out as a tensor or as
        `OwnedRows`, but whole where it stands for both.
        """
        group = self.seat.group
        if norm is not None and self.bias is None:
            fusion = norm.after(residual, may_own=True)
            spread = self._spread(x, fusion)
            return norm.taken(group.all_reduce(self._partial(x), fusion) if spread is None else spread.finish())
        total, residual = group.all_reduce(self._partial(x)), whole(residual, group)
        if self.bias is not None:
            total = total + self.bias
        if norm is not None:
            return norm.taken(finish(total, norm.after(residual)))
        residual = residual + total
        return residual, residual

    def _spread(self, x: Activation, fusion: ResidualRmsNorm) -> Spread | None:
        """The partial sum, written to who owns its rows, where the group wants that."""
        if self.fp8 is not None and not self.fp8.spreads:
            return None
        spread = self.seat.group.spread(x.shape[0], self.out_features, fusion)
        if spread is None:
            return None
        if self.fp8 is not None:
            self.fp8.into(x, self.weight, spread.pieces)
        else:
            assert isinstance(x, Tensor)
            for rows, out in spread.pieces:
                kernels.linear(x[rows], self.weight, out=out)
        return spread

    def _partial(self, x: Activation) -> Tensor | Unscaled:
        group, seat = self.seat.group, self.seat
        if self.fp8 is not None:  # a sum over ranks can apply the product's scales as it loads them
            return self.fp8.unscaled(x, self.weight) if group.size > 1 else self.fp8.linear(x, self.weight)
        assert isinstance(x, Tensor)
        out = None
        if group.size > 1:
            out = group.empty(x.shape[0], self.out_features, dtype=seat.dtype, device=seat.device)
        return kernels.linear(x, self.weight, out=out)

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

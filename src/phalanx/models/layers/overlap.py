# SPDX-License-Identifier: Apache-2.0
"""All-reduces of long steps beside the products of other tokens.

All that a decoder does between two attentions it does token by token. So a step's tokens are cut into parts, which follow one
another through it, and while what one part is to be summed with travels between the ranks, others are multiplied:

    products  o0 o1 o2 o3  mlp0 mlp1 mlp2 mlp3  qkv0 qkv1 qkv2 qkv3  attention
    sent         o0 o1 o2  o3   mlp0 mlp1 mlp2  mlp3
    finished        o0 o1  o2   o3   mlp0 mlp1  mlp2 mlp3

(each act under the product that runs beside it). A part is sent right behind its product, finished (added up, normed, and handed
out again) behind the product that follows, and taken right before its next one. Nothing waits where one kind of product ends: the
next kind's run beside its last sums. The order hangs on the number of tokens alone, so all ranks act in the same one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from phalanx.comm.rows.beside import TILE, Beside
from phalanx.kernels.scaled_mm import Quantized
from phalanx.models.layers.fp8 import Activation
from phalanx.models.layers.linear import RowParallelLinear
from phalanx.models.layers.norm import RmsNorm

PART_TOKENS = 1536
"""In a part, at least: products of fewer rows no longer fill a GPU, and lose more than a hidden sum gains. So steps of twice as
many tokens are cut, and longer ones."""
LAG = 1
"""Products between a part's own and the one behind which it is finished, this one counted: what is sent has as long to travel."""


class Overlap:
    """How one model's steps overlap. beside: what adds up, over the ranks that share its layers. least_tokens: of a part."""

    def __init__(self, beside: Beside, *, least_tokens: int = PART_TOKENS) -> None:
        if least_tokens < 1:
            raise ValueError(f"parts of at least {least_tokens} tokens were asked for; a part has at least 1")
        self._beside, self._least_tiles = beside, -(-least_tokens // TILE)

    def cut(self, tokens: int) -> list[slice]:
        """The parts of a step of so many tokens, in order: as many as may be, as alike as whole tiles can be. One of all tokens
        where it is too short for two parts, or too long for as many as there may be."""
        tiles = tokens // TILE
        count = min(self._beside.parts, tiles // self._least_tiles)
        if count < 2:
            return [slice(0, tokens)]
        each, more = divmod(tiles, count)
        ends = [TILE * (each * part + min(more, part)) for part in range(count)] + [tokens]
        found = [slice(begin, end) for begin, end in pairwise(ends)]
        return found if max(part.stop - part.start for part in found) <= self._beside.part_tokens else [slice(0, tokens)]

    def begin(self, x: Activation, residual: Tensor) -> Parts | None:
        """A step's norm(residual) and residual, both [T, hidden], in parts; None if it is not cut."""
        cuts = self.cut(x.shape[0])
        return Parts(self._beside, cuts, x, residual) if len(cuts) > 1 else None


class Parts:
    """One step's parts on their way through the layers. Whoever works on them takes each, in order, gives it back behind its next
    sum, and says when a product was none that ends in one (`multiplied`).

    cuts: where each part's tokens stand in the step.
    """

    def __init__(self, beside: Beside, cuts: Sequence[slice], x: Activation, residual: Tensor) -> None:
        self.cuts = tuple(cuts)
        self._beside = beside
        self._here: dict[int, tuple[Activation, Tensor]] = {at: (rows_of(x, cut), residual[cut]) for at, cut in enumerate(cuts)}
        self._residuals: dict[int, Tensor] = {}  # of what was taken or sent
        self._norms: dict[int, RmsNorm] = {}  # of what was sent
        self._unfinished: deque[tuple[int, int]] = deque()  # (part, products before its own), in the order of sending
        self._products = 0

    def take(self, part: int) -> Activation:
        """The part's norm(residual) [t, hidden], to be read before the part is given back."""
        if part not in self._here:
            while any(part == sent for sent, _ in self._unfinished):
                self._finish_oldest()
            self._here[part] = self._norms.pop(part).taken(self._beside.take(part))
        x, self._residuals[part] = self._here.pop(part)
        return x

    def give(self, part: int, layer: RowParallelLinear, x: Activation, norm: RmsNorm | None) -> None:
        """`layer(x, residual, norm)` of the part, x [t, in / tp]. Its sum travels beside what comes next, unless a bias or no norm
        follows it: then it is a whole all-reduce."""
        if norm is not None and layer.bias is None:
            self._beside.send(part, layer.partial(x))
            self._norms[part] = norm
            self._unfinished.append((part, self._products))
        else:
            self._here[part] = layer(x, self._residuals.pop(part), norm)
        self.multiplied()

    def multiplied(self) -> None:
        """A product was issued: what was sent LAG products before it is finished."""
        while self._unfinished and self._products - self._unfinished[0][1] >= LAG:
            self._finish_oldest()
        self._products += 1

    def joined(self) -> Tensor:
        """All parts' norm(residual) [T, hidden], not quantized, or their residual where no norm followed; behind the last layer."""
        while self._unfinished:
            self._finish_oldest()
        found = []
        for part in range(len(self.cuts)):
            x = self.take(part)
            assert isinstance(x, Tensor)
            found.append(x)
        return torch.cat(found)

    def _finish_oldest(self) -> None:
        part, _ = self._unfinished.popleft()
        self._beside.finish(part, self._norms[part].after(self._residuals.pop(part), may_own=True))


def rows_of(x: Activation, rows: slice) -> Activation:
    """Rows of x [T, H], with their scales."""
    if not isinstance(x, Quantized):
        return x[rows]
    return Quantized(x.values[rows], x.scale[rows] if x.scale.dim() else x.scale)

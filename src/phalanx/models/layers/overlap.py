# SPDX-License-Identifier: Apache-2.0
"""All-reduces of long steps beside the products of other tokens.

All that a decoder does between two attentions it does token by token. So a step's tokens are cut into parts, which follow one
another through it, and while the sum of one part is on its way between the ranks, others are multiplied:

    products  o0 o1 o2 o3  mlp0 mlp1 mlp2 mlp3  qkv0 qkv1 qkv2 qkv3  attention
    sums         o0 o1 o2 o3    mlp0 mlp1 mlp2 mlp3

On a GPU the sums have a stream of their own. Why no tensor is written while another stream reads it:

1. All else, every allocation included, is done on the caller's stream. Of what a sum touches there is one tensor: the partial
   product, summed in place (`Group.sum_beside`).
2. Before a sum, its stream waits for all that the caller's stream was given so far: the product, the group's collectives, and
   whoever used the tensor's memory before.
3. What `begin` returns holds the tensor. Called, it makes the caller's stream wait for the sum and reads the tensor there; only
   behind that wait is it let go, and the allocator hands memory that was let go to later work of the caller's stream alone.
4. Each is called before the forward ends, so whatever the caller's stream is given next, the group's other collectives among it,
   runs behind all sums. (A forward that raises ends its rank.)
5. The cut follows from the number of tokens alone: all ranks issue the same sums in the same order, and no two run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.kernels.scaled_mm import Quantized
from phalanx.models.layers.fp8 import Activation
from phalanx.models.layers.linear import RowParallelLinear
from phalanx.models.layers.norm import RmsNorm

MOST_PARTS = 4
"""Of one step. More hide more, and make smaller products."""
PART_TOKENS = 1024
"""In a part, at least: below it, products no longer fill a GPU. So steps of twice as many tokens are cut, and longer ones."""
TILE = 128
"""Parts are whole tiles of the products' rows, but for the last; it also keeps every part on a whole vector of 16 bytes."""
SPARED = 16
"""Multiprocessors that torch's products leave to the sums. A product that is as many programs as the GPU has multiprocessors takes
twice as long when a sum holds a few of them, as its last programs begin when the first ones have ended."""

Arriving = Callable[[], tuple[Activation, Tensor]]
"""Called once: waits, on the device, for what is on its way, and gives (norm(residual), residual) of a part [tokens, hidden]."""


class Overlap:
    """How one model's steps overlap. group: the ranks that share its layers. part_tokens: at least TILE."""

    def __init__(self, group: Group, device: torch.device, *, part_tokens: int = PART_TOKENS) -> None:
        self._group, self._device, self._part_tokens = group, device, part_tokens
        # Its few programs go first: they then run beside most of a product, not behind the programs that wait.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def cut(self, tokens: int) -> list[slice]:
        """The parts of a step of so many tokens, in order, as alike as whole tiles can be; one if it is too short to be cut."""
        tiles = -(-tokens // TILE)
        parts = max(1, min(MOST_PARTS, tokens // self._part_tokens)) if self._group.size > 1 else 1
        ends = [min(tokens, -(-tiles * part // parts) * TILE) for part in range(parts + 1)]
        return [slice(begin, end) for begin, end in pairwise(ends)]

    @contextmanager
    def sparing(self) -> Iterator[None]:
        """Products that are issued meanwhile leave room for sums on a GPU."""
        if self._stream is not None:
            torch._C._set_sm_carveout_experimental(SPARED)
        try:
            yield
        finally:
            if self._stream is not None:
                torch._C._set_sm_carveout_experimental(None)

    def begin(self, layer: RowParallelLinear, x: Activation, residual: Tensor, norm: RmsNorm | None) -> Arriving:
        """`layer(x, residual, norm)`, whose sum over the ranks runs meanwhile."""
        partial, done = layer.partial(x), None
        if self._stream is None:
            partial = self._group.sum_beside(partial)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._group.sum_beside(partial)
            done = self._stream.record_event()

        def arrive() -> tuple[Activation, Tensor]:
            if done is not None:
                torch.cuda.current_stream(self._device).wait_event(done)
            return layer.finished(partial, residual, norm)

        return arrive


def here(x: Activation, residual: Tensor, parts: Sequence[slice]) -> list[Arriving]:
    """What need not be waited for: x and residual [T, hidden], by parts."""

    def part(cut: slice) -> Arriving:
        mine: Activation = Quantized(x.values[cut], x.scale[cut]) if isinstance(x, Quantized) else x[cut]
        return lambda: (mine, residual[cut])

    return [part(cut) for cut in parts]

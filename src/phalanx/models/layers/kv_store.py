# SPDX-License-Identifier: Apache-2.0
"""Keys and values on their way into the cache: as they are, or in e4m3 with one scale for a layer's keys and one for its values."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx import kernels
from phalanx.kernels.products.one_token import qkv_rope_store
from phalanx.kernels.reference import Unscaled
from phalanx.models.batch import KvCache
from phalanx.models.layers.fp8 import Activation
from phalanx.models.layers.linear import QkvParallelLinear
from phalanx.models.layers.one_token import factors
from phalanx.models.slices import Seat, Slice, Sliced


class KvStore(Sliced):
    """Writes one layer's cache. `read_scales`: what its keys and values are to be multiplied by when read, None for 1.

    Scales are the checkpoint's (see `kv_scales`) where the cache is in FP8 and it has some; 1 otherwise, as keys and values stay
    well within +-448.
    """

    def __init__(self, name: str, *, seat: Seat) -> None:
        super().__init__()
        self.name, self.seat = name, seat
        self.read_scales: tuple[float, float] | None = None

    def forward(
        self, heads: Tensor | Unscaled, turns: tuple[Tensor, Tensor], q_heads: int, cache: KvCache, slots: Tensor
    ) -> Tensor:  # fmt: skip
        """heads [T, q_heads + 2 * kv_heads, head_dim], not turned yet; turns: cosines and sines of their positions. Keys, turned,
        and values go into slots [T] (see `Batch.kv_slots`); returns the queries, turned, [T, q_heads, head_dim]."""
        return kernels.rope_store(heads, *turns, cache.key, cache.value, slots, q_heads, self.read_scales)

    def of_one_token(
        self, x: Activation, qkv: QkvParallelLinear, turns: tuple[Tensor, Tensor], cache: KvCache, slots: Tensor
    ) -> Tensor | None:
        """forward(qkv(x)) in one kernel, if x is one token and there is one that takes it; else None, and nothing is stored."""
        found, q_heads = factors(x, qkv), len(qkv.heads.q)
        if found is None:
            return None
        return qkv_rope_store(found, *turns, cache.key, cache.value, slots, q_heads, self.read_scales)

    def slices(self) -> Iterator[Slice]:
        return iter(())

# SPDX-License-Identifier: Apache-2.0
"""Keys and values on their way into the cache: in the model's dtype; in e4m3 with one scale for a layer's keys and one for its
values; or in int8 with a scale for each token's key and value of each head."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx import kernels
from phalanx.kernels.gemm.gemv_fused import qkv_rope_store
from phalanx.kernels.reference import HeadNorm
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.models.cache import LayerCache
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear import ColumnParallelLinear
from phalanx.models.layers.rope import CosSin
from phalanx.models.slices import LayerContext, Slice, Sliced


class KvStore(Sliced):
    """Rotates queries and keys, and writes one layer's cache. `read_scales`: the factors of its cached keys and values when they
    are read, None for 1.

    The scales are the checkpoint's (see `kv_scales`) where the cache is in FP8 and the checkpoint has some; 1 otherwise, as keys
    and values stay well within +-448.
    """

    def __init__(self, name: str, *, context: LayerContext) -> None:
        super().__init__()
        self.name, self.context = name, context
        self.read_scales: tuple[float, float] | None = None

    def forward(
        self, heads: Tensor | Unscaled, cos_sin: CosSin, q_heads: int, cache: LayerCache, slots: Tensor,
        head_norm: HeadNorm | None = None,
    ) -> Tensor:  # fmt: skip
        """heads [T, q_heads + 2 * kv_heads, head_dim], not rotated yet; cos_sin: of the tokens' positions. Stores rotated keys, and
        values, in slots [T] (see `Batch.kv_slots`); returns the rotated queries [T, q_heads, head_dim]."""
        return kernels.rope_store(
            heads, *cos_sin[:2], cache.key, cache.value, slots, q_heads, self.read_scales, head_norm, cache.token_scales
        )

    def fused_with_gemv(
        self, x: Activation, qkv_proj: ColumnParallelLinear, q_heads: int, cos_sin: CosSin, cache: LayerCache,
        slots: Tensor,
    ) -> Tensor | None:  # fmt: skip
        """forward(qkv_proj(x)) in one kernel, for x of one token where a kernel takes it; else None, and nothing is stored.

        None for a cache in int8, too: its scales depend on complete heads, of which the GEMV's programs have parts."""
        gemv_args = qkv_proj.gemv_args(x)
        if gemv_args is None or cache.token_scales is not None:
            return None
        return qkv_rope_store(gemv_args, *cos_sin[:2], cache.key, cache.value, slots, q_heads, self.read_scales)

    def slices(self) -> Iterator[Slice]:
        return iter(())

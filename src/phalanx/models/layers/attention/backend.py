# SPDX-License-Identifier: Apache-2.0
"""The protocol of attention back ends over a paged KV cache.

A back end plans a batch once (`batch.attention = backend.plan(batch)`); every layer then calls that plan. `select.select_backend`
picks the back end.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from phalanx.kernels.attention.indexer import IndexQuery
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache


class AttentionPlan(Protocol):
    """One batch, ready for the attention of each layer."""

    def forward(
        self, query: Tensor, cache: LayerCache, *, window: int | None, scale: float,
        kv_scales: tuple[float, float] | None = None, out: Tensor | None = None, sinks: Tensor | None = None,
        cap: float | None = None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Each query attends to the keys of its own row up to its own position: to the last `window` of them (its own included), to
        those of its own run of `chunk` tokens, or to all.

        query [T, heads, head_dim]; the batch's own keys and values are in the cache already. kv_scales: the factors of the cached
        keys and of the cached values, where the cache is in e4m3; None for 1. sinks [heads]: one more logit in the softmax of
        each head, which takes its part of the weights and has no value. cap: scores s become cap * tanh(s / cap) before the
        softmax. Returns a tensor of query's shape and dtype, `out` where that is given; its values at padding tokens are undefined.
        """


class LatentAttentionPlan(Protocol):
    """One batch, ready for the latent attention of each layer. kv_slots: those of the batch, where this rank has the tokens."""

    kv_slots: Tensor

    def forward(
        self, query: Tensor, cache: LayerCache, *, up: Tensor, scale: float, index: IndexQuery | None = None
    ) -> Tensor:  # fmt: skip
        """As `AttentionPlan`, where a head's keys and values are up[head] times the cached latents. With sparse attention a query
        attends to the tokens that `index` chooses, by keys that are in the cache already; None: to those chosen last.

        query [T, heads, nope + rope], its last `rope` elements rotated; up [heads, nope + v, rank], rows of keys first. Returns
        [T, heads, v] in query's dtype.
        """


class GraphSupport(Protocol):
    """How a back end plans fixed batches (`Batch.fixed`). A forward with such a plan may be captured in a CUDA graph, and replayed
    with any lengths and block tables that the batch's tensors then hold."""

    captures_prefill: bool
    """Whether a fixed batch may have prefill rows; it may always have decode rows."""

    def max_prefill_pairs(self) -> float:
        """Up to how many (token, KV token) pairs, of all prefill rows of a batch together, a replay is faster than a plan of that
        batch alone; infinity where it is for any. As `short_kv_limit`, ask after a forward of the model."""

    def prompt_wave(self) -> tuple[int, int]:
        """How many tiles of a prompt the GPU computes at once, so that one more takes twice as long, and the tokens of each;
        0 and 0 where that is not known. As `short_kv_limit`, ask after a forward of the model."""

    def short_kv_limit(self, rows: int) -> int:
        """The KV length up to which a fixed batch of so many rows is better planned as `Batch.short`; 0 where that makes no
        difference. It covers the layers that have run: ask after a forward of the model."""


class AttentionBackend(Protocol):
    """How attention is computed on this device."""

    name: str

    @property
    def graphs(self) -> GraphSupport | None:
        """None for a back end that plans no fixed batches."""

    def plan(self, batch: Batch) -> AttentionPlan | LatentAttentionPlan:
        """Host work and copies to the device, once per batch. It reads no tensor back from the device."""

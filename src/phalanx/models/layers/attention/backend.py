# SPDX-License-Identifier: Apache-2.0
"""Attention over paged keys and values: the seam `AttentionBackend`, and the choice of one.

A back end plans a batch once (`batch.attention = backend.plan(batch)`), and every layer then asks that plan.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from phalanx.kernels import attention as kernels
from phalanx.models.batch import Batch, KvCache


class AttentionPlan(Protocol):
    """One batch, ready for each layer to attend."""

    def forward(
        self, query: Tensor, cache: KvCache, *, window: int | None, scale: float,
        kv_scales: tuple[float, float] | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Each query sees the keys of its own row up to its own position, the last `window` of them (itself among them) or all.

        query [T, heads, head_dim]; the batch's own keys and values are in the cache already. kv_scales: what the cached keys and
        the cached values are to be multiplied by, where the cache is quantized; None for 1. Returns query's shape and dtype,
        in `out` where one is given; what stands at padding tokens means nothing.
        """


class AttentionBackend(Protocol):
    """How attention is computed on this device."""

    name: str
    captures: bool
    """Whether it plans fixed batches (`Batch.fixed`) of rows of one token: a forward with such a plan may be captured in a CUDA
    graph, and replayed with whatever lengths and block tables the batch's tensors hold by then."""
    captures_prompts: bool
    """Whether it also plans fixed batches that have other rows."""

    def plan(self, batch: Batch) -> AttentionPlan:
        """Host work and copies to the device, once per batch; reads no tensor back from the device."""

    def short_up_to(self, rows: int) -> int:
        """Up to what KV length fixed batches of so many rows are better planned as `Batch.short`; 0 where that makes no difference.
        Known of the kinds of layers that were met: asked behind a forward of the model."""


def backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """On a GPU the house's kernels, where they take this: for rows of one token, and for rows of several if FlashInfer, which is
    better at these but over a cache in e4m3, is not installed or does not know dtype and head_dim. torch's
    scaled_dot_product_attention for the rest."""
    rest = _rest(device, dtype, head_dim)
    if kernels.takes(device, dtype, head_dim):
        from phalanx.models.layers.attention_decode import DecodeBackend

        if not kernels.takes_prefill(device, dtype, head_dim):
            return DecodeBackend(rest, device)
        return DecodeBackend(rest, device, "e4m3" if rest.name == "flashinfer" else "all")
    return rest


def _rest(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    if device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None:
        from phalanx.models.layers import attention_flashinfer

        if attention_flashinfer.fits(dtype, head_dim):
            return attention_flashinfer.FlashInferBackend(device, dtype)
    from phalanx.models.layers.attention_sdpa import SdpaBackend

    return SdpaBackend()

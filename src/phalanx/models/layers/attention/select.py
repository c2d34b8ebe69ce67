# SPDX-License-Identifier: Apache-2.0
"""Which attention back end runs on a device. The back ends load inside the function, so that none is imported in vain."""

from __future__ import annotations

import importlib.util

import torch

from phalanx.config.latent import Latent
from phalanx.kernels.attention import dispatch as kernels
from phalanx.models.layers.attention.backend import AttentionBackend


def select_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, latent: Latent | None = None, *,
    cache_dtype: torch.dtype | None = None, sinks: bool = False,
) -> AttentionBackend:  # fmt: skip
    """On CUDA: our Triton kernel for decode rows. Prefill rows use FlashInfer, except over a cache in FP8 or int8, with sinks, or
    where FlashInfer is missing or does not support dtype and head_dim: there our Triton prefill kernel runs. Otherwise torch's
    scaled_dot_product_attention.

    latent: of a model with latent attention, whose plans are `LatentAttentionPlan`s. cache_dtype, sinks: of all layers. Where they
    leave nothing to FlashInfer, it is not imported, which takes a second, and has no workspace on the device."""
    if latent is not None:
        return _latent_backend(device, dtype, latent)
    if not kernels.supports(device, dtype, head_dim):
        return _fallback(device, dtype, head_dim)
    from phalanx.models.layers.attention.triton import QUANTIZED, TritonBackend

    own_prefill = kernels.supports_prefill(device, dtype, head_dim)
    if own_prefill and (sinks or cache_dtype in QUANTIZED):
        from phalanx.models.layers.attention.sdpa import SdpaBackend

        return TritonBackend(SdpaBackend(), device, "all")
    fallback = _fallback(device, dtype, head_dim)
    if not own_prefill:
        return TritonBackend(fallback, device)
    return TritonBackend(fallback, device, "quantized" if fallback.name == "flashinfer" else "all")


def _latent_backend(device: torch.device, dtype: torch.dtype, latent: Latent) -> AttentionBackend:
    from phalanx.models.layers.attention.sdpa_latent import SdpaLatentBackend

    if not kernels.supports_latent(device, dtype, latent):
        return SdpaLatentBackend()
    from phalanx.models.layers.attention.triton_latent import TritonLatentBackend

    head_dim = latent.nope + latent.rope
    own_prefill = latent.v <= head_dim and kernels.supports_prefill(device, dtype, head_dim)
    return TritonLatentBackend(device, own_prefill=own_prefill)


def _fallback(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The back end for what our kernels do not run."""
    if device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None:
        from phalanx.models.layers.attention import flashinfer

        if flashinfer.supports(dtype, head_dim):
            return flashinfer.FlashInferBackend(device, dtype)
    from phalanx.models.layers.attention.sdpa import SdpaBackend

    return SdpaBackend()

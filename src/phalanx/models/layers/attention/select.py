# SPDX-License-Identifier: Apache-2.0
"""Which attention back end runs on a device. The back ends load inside the function, so that none is imported in vain."""

from __future__ import annotations

import importlib.util

import torch

from phalanx.comm.group import Group, Solo
from phalanx.config.latent import Latent
from phalanx.errors import ModelError
from phalanx.kernels.attention import dispatch as kernels
from phalanx.models.layers.attention.backend import AttentionBackend


def select_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, latent: Latent | None = None, *,
    cache_dtype: torch.dtype | None = None, block_size: int = 16, sinks: bool = False, windows: bool = True,
    capped: bool = False, by_torch: bool = False, most_tokens: int = 8192, batch_invariant: bool = False, dcp: Group | None = None,
) -> AttentionBackend:  # fmt: skip
    """On CUDA: our kernel for decode rows. Prefill rows use our kernels too in captured steps, over a cache in FP8 or int8, with
    sinks, where our warp-specialized kernel runs for all layers, and where FlashInfer is missing or does not support dtype and
    head_dim; and otherwise FlashInfer. Without kernels of ours, torch's scaled_dot_product_attention.

    latent: of a model with latent attention, whose plans are `LatentAttentionPlan`s. cache_dtype, block_size, sinks: of all
    layers; windows: whether any layer has one; capped: scores have a soft cap, which FlashInfer's kernels compute and ours do not;
    by_torch: see `ModelShape.attends_by_torch`; most_tokens: of a step. Where they leave nothing to FlashInfer, it is not
    imported, as its modules take a minute to compile at a first start, and memory of the device. batch_invariant: as of
    `TritonBackend`; raises ModelError where it cannot be. dcp: the ranks over which the tokens of latents are divided."""
    if batch_invariant:
        return _batch_invariant(device, dtype, head_dim, may=latent is None and not capped and not by_torch)
    if latent is not None:
        return _latent_backend(device, dtype, latent, most_tokens, dcp or Solo())
    if by_torch:
        from phalanx.models.layers.attention.sdpa import SdpaBackend

        return SdpaBackend()
    if capped or not kernels.supports(device, dtype, head_dim):
        return _fallback(device, dtype, head_dim)
    from phalanx.models.layers.attention.triton import QUANTIZED, TritonBackend

    own_prefill = kernels.supports_prefill(device, dtype, head_dim)
    fastest = not windows and kernels.supports_warp_specialized_prefill(device, dtype, head_dim, block_size)
    if own_prefill and (sinks or cache_dtype in QUANTIZED or fastest):
        from phalanx.models.layers.attention.sdpa import SdpaBackend

        return TritonBackend(SdpaBackend(), device, "all")
    fallback = _fallback(device, dtype, head_dim)
    if not own_prefill:
        return TritonBackend(fallback, device)
    return TritonBackend(fallback, device, "quantized" if fallback.name == "flashinfer" else "all")


def _batch_invariant(device: torch.device, dtype: torch.dtype, head_dim: int, *, may: bool) -> AttentionBackend:
    from phalanx.models.layers.attention.sdpa import SdpaBackend
    from phalanx.models.layers.attention.triton import TritonBackend

    if not may or not kernels.supports_prefill(device, dtype, head_dim):
        raise ModelError(
            "deterministic does not work with this model on a GPU",
            held=f"heads of {head_dim} in {dtype}" if may
            else "attention over latents, inside of chunks, of heads of several sizes, or with a soft cap",
            why="there is one attention kernel whose tokens do not depend on the batch, and it does not run these",
            next="leave deterministic out",
        )  # fmt: skip
    return TritonBackend(SdpaBackend(), device, "all", batch_invariant=True)


def _latent_backend(device: torch.device, dtype: torch.dtype, latent: Latent, most_tokens: int, dcp: Group) -> AttentionBackend:
    from phalanx.models.layers.attention.context_parallel import ContextParallel
    from phalanx.models.layers.attention.sdpa_latent import SdpaLatentBackend
    from phalanx.models.layers.attention.triton_latent import TritonLatentBackend

    context = ContextParallel(dcp) if dcp.size > 1 else None
    backend: SdpaLatentBackend | TritonLatentBackend = SdpaLatentBackend(context)
    if kernels.supports_latent(device, dtype, latent):
        head_dim = latent.nope + latent.rope
        own_prefill = latent.v <= head_dim and kernels.supports_prefill(device, dtype, head_dim)
        backend = TritonLatentBackend(device, own_prefill=own_prefill, most_tokens=most_tokens, context=context)
    if latent.indexer is None:
        return backend
    from phalanx.models.layers.attention.sparse_latent import SparseLatentBackend

    return SparseLatentBackend(backend, latent.indexer.topk)


def _fallback(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The back end for what our kernels do not run."""
    if device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None:
        from phalanx.models.layers.attention import flashinfer

        if flashinfer.supports(dtype, head_dim):
            return flashinfer.FlashInferBackend(device, dtype)
    from phalanx.models.layers.attention.sdpa import SdpaBackend

    return SdpaBackend()

# SPDX-License-Identifier: Apache-2.0
"""The ops before, between and behind a forward's GEMMs: each picks its Triton kernel on GPUs, and `reference` elsewhere."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

import phalanx.kernels.reference as reference
from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.ops.heuristics import MAX_QUANTIZED_COLUMNS
from phalanx.kernels.reference import HeadNorm
from phalanx.kernels.scaled_tensors import Quantized, Unscaled

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _kernel_takes(output: Tensor | Unscaled, *, of_tokens: bool = False) -> bool:
    """of_tokens: what each token has is contiguous, and tokens may be apart."""
    x = output.values if isinstance(output, Unscaled) else output
    return x.is_cuda and (x[:1] if of_tokens else x).is_contiguous() and x.dtype in _FLOATS and has_triton()


def _rows_are_vectors(x: Tensor, weight: Tensor | None = None) -> bool:
    """Whether rows, and a norm's weight, are made of vectors of 16 bytes that begin on multiples of 16 bytes."""
    aligned = x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0 and (weight is None or weight.data_ptr() % 16 == 0)
    readable = weight is None or weight.dtype in (x.dtype, torch.float32)
    return x.is_cuda and x.dtype in _FLOATS and aligned and readable and has_triton()


def embed(
    ids: Tensor, table: Tensor, begin: int = 0, last: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `reference.embed`."""
    if _rows_are_vectors(table) and table.is_contiguous():
        from phalanx.kernels.ops.embedding_rmsnorm import embed as kernel

        return kernel(ids, table, begin, last)
    return reference.embed(ids, table, begin, last)


def embed_norm(
    ids: Tensor, table: Tensor, last: tuple[Tensor, Tensor] | None, weight: Tensor, eps: float,
    quant: Literal["none", "fp8", "nvfp4"] = "none", scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See `reference.embed_norm`."""
    if _rows_are_vectors(table, weight) and table.is_contiguous():
        from phalanx.kernels.ops.embedding_rmsnorm import embed_norm as kernel

        return kernel(ids, table, last, weight, eps, quant, scale)
    return reference.embed_norm(ids, table, last, weight, eps, quant, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    if _rows_are_vectors(x, weight):
        from phalanx.kernels.ops.embedding_rmsnorm import rms_norm as kernel
        from phalanx.kernels.ops.embedding_rmsnorm import runs_of_rows

        if runs_of_rows(x) != (0, 0):
            return kernel(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def residual_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    quant: Literal["none", "fp8", "nvfp4"] = "none",
    scale: Tensor | None = None,
    keep_norm: bool = False,
) -> tuple[Tensor, ...]:
    """See `reference.residual_rms_norm_quant`."""
    if x.dim() == 2 and _rows_are_vectors(x, weight):
        from phalanx.kernels.ops.residual_rms_norm import residual_rms_norm as kernel

        return kernel(x, residual, weight, eps, quant=quant, scale=scale, keep_norm=keep_norm)
    return reference.residual_rms_norm_quant(x, residual, weight, eps, quant=quant, scale=scale, keep_norm=keep_norm)


def rope_cos_sin(positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """See `reference.rope_cos_sin`."""
    if positions.is_cuda and positions.is_contiguous() and has_triton():
        from phalanx.kernels.ops.rope_cos_sin import rope_cos_sin as kernel

        return kernel(positions, inv_freq, factor)
    return reference.rope_cos_sin(positions, inv_freq, factor)


def index_put_(table: Tensor, places: Tensor, values: Tensor) -> None:
    """See `reference.index_put_`."""
    if table.is_cuda and has_triton():
        from phalanx.kernels.ops.index_put import index_put_ as kernel

        kernel(table, places, values)
        return
    reference.index_put_(table, places, values)


def silu_mul(gate_up: Tensor | Unscaled, *, gelu: bool = False) -> Tensor:
    """See `reference.silu_mul`."""
    if _kernel_takes(gate_up):
        from phalanx.kernels.ops.silu_and_mul import silu_mul as kernel

        return kernel(gate_up, gelu=gelu)
    return reference.silu_mul(gate_up, gelu=gelu)


def silu_mul_quant_fp8(gate_up: Tensor | Unscaled, scale: Tensor | None = None, *, gelu: bool = False) -> Quantized:
    """See `reference.silu_mul_quant_fp8`."""
    if _kernel_takes(gate_up):
        from phalanx.kernels.ops.silu_and_mul import silu_mul_quant_fp8 as kernel

        return Quantized(*kernel(gate_up, scale, gelu=gelu))
    return Quantized(*reference.silu_mul_quant_fp8(gate_up, scale, gelu=gelu))


def quantize_fp8(x: Tensor, scale: Tensor | None = None, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_fp8`. counts [2] int32, on a GPU: the results have only counts[1] rows, and any values behind
    them."""
    if x.is_cuda and x.dim() == 2 and x.is_contiguous() and x.shape[1] <= MAX_QUANTIZED_COLUMNS and has_triton():
        from phalanx.kernels.ops.quantize_fp8 import quantize_fp8 as kernel

        return kernel(x, scale, counts)
    return reference.quantize_fp8(x, scale)


def latent_rope_store(
    query: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float, cache: Tensor, slots: Tensor, *,
    interleaved: bool,
) -> None:  # fmt: skip
    """See `reference.latent_rope_store`."""
    strided = all(each.stride(-1) == 1 for each in (query, latent))
    if query.is_cuda and query.dtype in _FLOATS and strided and cache.is_contiguous() and has_triton():
        from phalanx.kernels.ops.latent_rope_store import latent_rope_store as kernel

        kernel(query, latent, cos, sin, weight, eps, cache, slots, interleaved=interleaved)
        return
    reference.latent_rope_store(query, latent, cos, sin, weight, eps, cache, slots, interleaved=interleaved)


def rope_store(
    qkv: Tensor | Unscaled, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, q_heads: int,
    kv_scales: tuple[float, float] | None = None, head_norm: HeadNorm | None = None, token_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.rope_store`."""
    if _kernel_takes(qkv, of_tokens=True) and key_cache.is_contiguous() and value_cache.is_contiguous():
        from phalanx.kernels.ops.rope_kv_cache import rope_store as kernel

        return kernel(qkv, cos, sin, key_cache, value_cache, slots, q_heads, kv_scales, head_norm, token_scales)
    return reference.rope_store(qkv, cos, sin, key_cache, value_cache, slots, q_heads, kv_scales, head_norm, token_scales)

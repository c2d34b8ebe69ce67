# SPDX-License-Identifier: Apache-2.0
"""Which code runs what lies before, between and behind a forward's matrix products: the Triton kernels on GPUs, plain torch
elsewhere."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from phalanx.kernels import reference
from phalanx.kernels.norms import triton_is_here
from phalanx.kernels.reference import Unscaled

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _kernel_takes(product: Tensor | Unscaled) -> bool:
    x = product.values if isinstance(product, Unscaled) else product
    return x.is_cuda and x.is_contiguous() and x.dtype in _FLOATS and triton_is_here()


def _rows_fit(x: Tensor, weight: Tensor | None = None) -> bool:
    """Whether rows, and a norm's weight, are whole vectors of 16 bytes, where vectors may begin."""
    whole = x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0 and (weight is None or weight.data_ptr() % 16 == 0)
    alike = weight is None or weight.dtype == x.dtype
    return x.is_cuda and x.dtype in _FLOATS and whole and alike and triton_is_here()


def embed(
    ids: Tensor, table: Tensor, begin: int = 0, last: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `reference.embed`."""
    if _rows_fit(table) and table.is_contiguous():
        from phalanx.kernels.between.gather_norm import embed as kernel

        return kernel(ids, table, begin, last)
    return reference.embed(ids, table, begin, last)


def embed_norm(
    ids: Tensor, table: Tensor, last: tuple[Tensor, Tensor] | None, weight: Tensor, eps: float,
    quant: Literal["none", "fp8", "nvfp4"] = "none", scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See `reference.embed_norm`."""
    if _rows_fit(table, weight) and table.is_contiguous():
        from phalanx.kernels.between.gather_norm import embed_norm as kernel

        return kernel(ids, table, last, weight, eps, quant, scale)
    return reference.embed_norm(ids, table, last, weight, eps, quant, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    if _rows_fit(x, weight):
        from phalanx.kernels.between.gather_norm import rms_norm as kernel
        from phalanx.kernels.between.gather_norm import rows_of

        if rows_of(x) != (0, 0):
            return kernel(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def turns(positions: Tensor, inverse_wavelengths: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """See `reference.turns`."""
    if positions.is_cuda and positions.is_contiguous() and triton_is_here():
        from phalanx.kernels.between.angles import turns as kernel

        return kernel(positions, inverse_wavelengths, factor)
    return reference.turns(positions, inverse_wavelengths, factor)


def store_words(table: Tensor, places: Tensor, values: Tensor) -> None:
    """See `reference.store_words`."""
    if table.is_cuda and triton_is_here():
        from phalanx.kernels.between.scatter import store_words as kernel

        kernel(table, places, values)
        return
    reference.store_words(table, places, values)


def silu_mul(gate_up: Tensor | Unscaled) -> Tensor:
    """See `reference.silu_mul`."""
    if _kernel_takes(gate_up):
        from phalanx.kernels.between.silu_gate import silu_mul as kernel

        return kernel(gate_up)
    return reference.silu_mul(gate_up)


def silu_mul_quant_fp8(gate_up: Tensor | Unscaled, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.silu_mul_quant_fp8`."""
    if _kernel_takes(gate_up):
        from phalanx.kernels.between.silu_gate import silu_mul_quant_fp8 as kernel

        return kernel(gate_up, scale)
    return reference.silu_mul_quant_fp8(gate_up, scale)


def rope_store(
    qkv: Tensor | Unscaled, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, q_heads: int,
    kv_scales: tuple[float, float] | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.rope_store`."""
    if _kernel_takes(qkv) and key_cache.is_contiguous() and value_cache.is_contiguous():
        from phalanx.kernels.between.rope_to_cache import rope_store as kernel

        return kernel(qkv, cos, sin, key_cache, value_cache, slots, q_heads, kv_scales)
    return reference.rope_store(qkv, cos, sin, key_cache, value_cache, slots, q_heads, kv_scales)

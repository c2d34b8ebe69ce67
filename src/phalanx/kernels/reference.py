# SPDX-License-Identifier: Apache-2.0
"""Every op in plain torch, under the name of its kernel: the oracle of the kernels' tests, and what runs on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Unscaled(NamedTuple):
    """A product whose scales its reader applies: values [T, ...], N of them for each token, times rows [T, 1] fp32 times columns
    [N] fp32. What comes of one is computed in fp32 and rounded once, to the values' dtype."""

    values: Tensor
    rows: Tensor
    columns: Tensor

    def view(self, *shape: int) -> Unscaled:
        """The same with values of another shape [T, ...]."""
        return self._replace(values=self.values.view(*shape))

    def wide(self) -> Tensor:
        """The finished product, fp32."""
        flat = self.values.float().flatten(1) * self.rows * self.columns
        return flat.view(self.values.shape)

    @staticmethod
    def parts(product: Tensor | Unscaled) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(values, rows, columns), the scales None for a finished product."""
        return product if isinstance(product, Unscaled) else (product, None, None)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] / rms(x) * weight [H]; arithmetic in fp32, rounded to x's dtype before the weight (as transformers does)."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def embed(ids: Tensor, table: Tensor, begin: int = 0, last: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(rows `id - begin` of table [V, H] for ids [T] int64, zeros for an id that it does not hold; zeros), both [T, H].

    last: (last_tokens [slots], slots [T]), both int64: a negative id stands for last_tokens[slots[t]].
    """
    if last is not None:
        ids = torch.where(ids < 0, last[0][last[1]], ids)
    row = ids - begin
    elsewhere = (row < 0) | (row >= len(table))
    found = torch.nn.functional.embedding(row.masked_fill(elsewhere, 0), table).masked_fill(elsewhere.unsqueeze(-1), 0)
    return found, torch.zeros_like(found)


def embed_norm(
    ids: Tensor, table: Tensor, last: tuple[Tensor, Tensor] | None, weight: Tensor, eps: float,
    quant: Literal["none", "fp8", "nvfp4"] = "none", scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """residual_rms_norm_quant of the vectors that `embed` finds in the whole table: (norm, vectors), or quantized."""
    found, zeros = embed(ids, table, 0, last)
    return residual_rms_norm_quant(zeros, found, weight, eps, quant=quant, scale=scale)


def turns(positions: Tensor, inverse_wavelengths: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [T] int64 times inverse_wavelengths [half] fp32, times factor; both [T, half] fp32."""
    angles = positions.float().unsqueeze(-1) * inverse_wavelengths
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def store_words(table: Tensor, places: Tensor, values: Tensor) -> None:
    """table[places[k]] = values[k], for a flat table and places and values [K] int64, except where places[k] is negative. The
    others are distinct."""
    real = places >= 0
    table[places[real]] = values[real].to(table.dtype)


def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, H] in x's dtype; the sum is rounded once before the norm."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: Tensor | Unscaled) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 * I], gate in the first half of the columns -> [T, I]; both in gate_up's dtype."""
    if isinstance(gate_up, Unscaled):
        return silu_mul(gate_up.wide()).to(gate_up.values.dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of x [T, heads, D] by its token's angles, cos and sin [T, D / 2] fp32; element i pairs with i + D / 2.

    Arithmetic in fp32, rounded once to x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store key and value [T, kv_heads, D] in caches [num_blocks, block_size, kv_heads, D] at slots [T] int64, block * block_size +
    offset; a slot of -1 stores nothing. The other slots are distinct.

    Without a boolean index, whose size only the device knows: a padding token repeats what the token with the highest slot stores,
    or, where all are padding, what slot 0 holds.
    """
    padding = slots < 0
    real = slots.argmax().view(1)
    target = torch.where(padding, slots[real].clamp(min=0), slots)
    for part, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(-1, *cache.shape[2:])
        repeated = torch.where(padding[real, None, None], flat[:1], part[real])
        flat[target] = torch.where(padding[:, None, None], repeated, part)


def all_reduce(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' tensors: in fp32, in rank order, rounded once to their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def quantize_fp8(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, H] times 1 / scale as e4m3, clipped to +-448, and the scale (fp32): the given scalar, or one per token [T, 1], which
    maps the token's largest magnitude to 448."""
    wide = x.float()
    if scale is None:
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (wide * (1.0 / scale.float())).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def quantize_nvfp4(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H] as e2m1 pairs in uint8 [T, H / 2], the first of a pair in the low nibble, and e4m3 scales [T, H / 16], row by row.

    Each block of 16 has the scale largest magnitude / 6 / `scale` (the global one, a fp32 scalar); q x block scale x global scale
    gives x back. Ties go to the even code; NaN becomes 0 beside a scale that is NaN.
    """
    blocks = x.float().view(*x.shape[:-1], x.shape[-1] // 16, 16)
    codes = (blocks.abs().amax(-1) / (6.0 * scale)).clamp(max=448.0).to(torch.float8_e4m3fn)
    step = codes.float() * scale
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    values = (blocks * inverse.unsqueeze(-1)).flatten(-2)
    size = values.abs()
    nibble = torch.zeros_like(size, dtype=torch.uint8)
    for bound, reached in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (torch.gt, torch.ge) * 3 + (torch.gt,), strict=True):
        nibble += reached(size, bound)
    nibble |= (torch.signbit(values) & ~values.isnan()).to(torch.uint8) << 3
    return nibble[..., ::2] | nibble[..., 1::2] << 4, codes


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
    """residual_rms_norm and the norm's quantization: (norm, residual), or ([norm if keep_norm,] quantized, [scales,] residual).

    scale: fp8's static scale, or None for one per token, which is returned; nvfp4's global scale, whose block scales are returned.
    """
    norm, residual = residual_rms_norm(x, residual, weight, eps)
    if quant == "none":
        return norm, residual
    if quant == "fp8":
        quantized, found = quantize_fp8(norm, scale)
        scales = (found,) if scale is None else ()
    elif scale is None:
        raise ValueError("nvfp4 needs its global scale: a fp32 scalar tensor")
    else:
        quantized, found = quantize_nvfp4(norm, scale)
        scales = (found,)
    return (*((norm,) if keep_norm else ()), quantized, *scales, residual)


def silu_mul_quant_fp8(gate_up: Tensor | Unscaled, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """quantize_fp8 of silu_mul: e4m3 [T, I], and the scale, given or one per token [T, 1]."""
    return quantize_fp8(silu_mul(gate_up), scale)


def scaled_mm(values: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(values [T, in] e4m3 * row_scale [T, 1] or ()) @ (weight [out, in] e4m3 * scale [out]).T, in fp32, rounded to `dtype`."""
    return ((values.float() @ weight.float().t()) * row_scale * scale).to(dtype)


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype, *, block: int = 0, begin: int = 0) -> Tensor:
    """weight [out, in] e4m3 times its scales, fp32: one per row [out], or one for each `block` columns of a row [out, blocks],
    where the first column of the weight is number `begin` of the first block. In `dtype`."""
    if not block:
        return (weight.float() * scale.unsqueeze(-1)).to(dtype)
    spread = scale.repeat_interleave(block, dim=1)[:, begin : begin + weight.shape[1]]
    return (weight.float() * spread).to(dtype)


def rope_store(
    qkv: Tensor | Unscaled, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, q_heads: int,
    kv_scales: tuple[float, float] | None = None,
) -> Tensor:  # fmt: skip
    """rope of the query and key heads of qkv [T, q_heads + 2 * kv_heads, D], and write_kv of its key and value heads: the queries
    [T, q_heads, D]. cos, sin, caches and slots as there. Into a cache in e4m3 go keys and values divided by their kv_scales (None:
    1), clipped to +-448."""
    wide, dtype = (qkv.wide(), qkv.values.dtype) if isinstance(qkv, Unscaled) else (qkv, qkv.dtype)
    kv_heads = (wide.shape[1] - q_heads) // 2
    turned = rope(wide[:, : q_heads + kv_heads], cos, sin).to(dtype)
    parts = [turned[:, q_heads:], wide[:, q_heads + kv_heads :].to(dtype)]
    if key_cache.dtype == torch.float8_e4m3fn:
        scaled = [part.float() * (1.0 / scale) for part, scale in zip(parts, kv_scales or (1.0, 1.0), strict=True)]
        parts = [part.clamp(-448.0, 448.0).to(key_cache.dtype) for part in scaled]
    write_kv(parts[0], parts[1], key_cache, value_cache, slots)
    return turned[:, :q_heads]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [out, in] transposed -> [T, out]: summed in fp32, rounded once."""
    return (x.float() @ weight.float().t()).to(x.dtype)


def _in_groups(x: Tensor, size: int, begin: int) -> Tensor:
    """x [T, in] -> [T, groups, size], where x's first column is number `begin` of the first group; zeros around."""
    padded = torch.nn.functional.pad(x, (begin, -(begin + x.shape[1]) % size))
    return padded.view(x.shape[0], padded.shape[1] // size, size)


def quantize_groups(x: Tensor, size: int = 128, begin: int = 0) -> tuple[Tensor, Tensor]:
    """x [T, in] as e4m3 and fp32 scales [T, groups]: `quantize_fp8` of each `size` columns with a scale of their own, where the
    first column is number `begin` of the first group."""
    groups = _in_groups(x, size, begin)
    values, scale = quantize_fp8(groups)
    return values.flatten(1)[:, begin : begin + x.shape[1]].contiguous(), scale.squeeze(-1)


def block_scaled_mm(
    values: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, *, size: int = 128, begin: int = 0
) -> Tensor:  # fmt: skip
    """values [T, in] e4m3 with x_scale [T, groups] times weight [out, in] e4m3 with scale [out, groups], groups as in
    `quantize_groups`: each group's product in fp32 times both of its scales, added up in fp32, rounded to `dtype`."""
    total = torch.zeros(values.shape[0], weight.shape[0], device=values.device)
    for at in range(scale.shape[1]):
        here = slice(max(0, at * size - begin), (at + 1) * size - begin)
        total += (values[:, here].float() @ weight[:, here].float().t()) * x_scale[:, at, None] * scale[:, at]
    return total.to(dtype)

# SPDX-License-Identifier: Apache-2.0
"""Every op in plain torch, under the name of its dispatcher: the oracle of the kernels' tests, and the code that runs on CPU.

In the order of a forward pass: embedding, norm, quantization, GEMM, RoPE and KV cache, attention, SiLU, all-reduce, sampling.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.kernels.scaled_tensors import Unscaled

_NEVER = float("-inf")
_LOGITS_AT_ONCE = 2**24  # logits that sampling makes temporaries of at a time: 64 MiB of fp32
_BELOW_ONE = 1.0 - 2.0**-24  # the largest fp32 below 1


# Embedding and rotation angles


def embed(ids: Tensor, table: Tensor, begin: int = 0, last: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(embeddings, zeros), both [T, H]: rows `id - begin` of table [V, H] for ids [T] int64, zeros for an id outside the table.

    last: (last_tokens [slots], slots [T]), both int64: a negative id stands for last_tokens[slots[t]].
    """
    if last is not None:
        ids = torch.where(ids < 0, last[0][last[1]], ids)
    row = ids - begin
    outside = (row < 0) | (row >= len(table))
    vectors = torch.nn.functional.embedding(row.masked_fill(outside, 0), table).masked_fill(outside.unsqueeze(-1), 0)
    return vectors, torch.zeros_like(vectors)


def embed_norm(
    ids: Tensor, table: Tensor, last: tuple[Tensor, Tensor] | None, weight: Tensor, eps: float,
    quant: Literal["none", "fp8", "nvfp4"] = "none", scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`embed` from the whole table, then `residual_rms_norm_quant` of the embeddings: (norm, embeddings), or quantized."""
    vectors, zeros = embed(ids, table, 0, last)
    return residual_rms_norm_quant(zeros, vectors, weight, eps, quant=quant, scale=scale)


def rope_cos_sin(positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [T] int64 times inv_freq [half] fp32, times factor; both [T, half] fp32."""
    angles = positions.float().unsqueeze(-1) * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def index_put_(table: Tensor, places: Tensor, values: Tensor) -> None:
    """table[places[k]] = values[k], for a flat table and places and values [K] int64, except where places[k] is negative. The
    other places are distinct."""
    valid = places >= 0
    table[places[valid]] = values[valid].to(table.dtype)


# Norm and quantization


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] / rms(x) * weight [H] (x's dtype or fp32); in fp32, rounded to x's dtype before the weight (as transformers)."""
    values = x.float()
    scaled = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * scaled.to(x.dtype)).to(x.dtype)


def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, H] in x's dtype; the sum is rounded once before the norm."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


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
        quantized, token_scales = quantize_fp8(norm, scale)
        scales = (token_scales,) if scale is None else ()
    elif scale is None:
        raise ValueError("nvfp4 needs its global scale: a fp32 scalar tensor")
    else:
        quantized, block_scales = quantize_nvfp4(norm, scale)
        scales = (block_scales,)
    return (*((norm,) if keep_norm else ()), quantized, *scales, residual)


def quantize_fp8(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, H] times 1 / scale as e4m3, clipped to +-448, and the scale (fp32): the given scalar, or one per token [T, 1], which
    maps the token's largest magnitude to 448."""
    values = x.float()
    if scale is None:
        scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (values * (1.0 / scale.float())).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


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


def _in_groups(x: Tensor, size: int, begin: int) -> Tensor:
    """x [T, in] -> [T, groups, size], where x's first column is column `begin` of the first group; zeros around."""
    padded = torch.nn.functional.pad(x, (begin, -(begin + x.shape[1]) % size))
    return padded.view(x.shape[0], padded.shape[1] // size, size)


def per_token_group_quant_fp8(x: Tensor, size: int = 128, begin: int = 0) -> tuple[Tensor, Tensor]:
    """x [T, in] as e4m3 and fp32 scales [T, groups]: `quantize_fp8` of each `size` columns with a scale of their own, where the
    first column is column `begin` of the first group."""
    groups = _in_groups(x, size, begin)
    values, scale = quantize_fp8(groups)
    return values.flatten(1)[:, begin : begin + x.shape[1]].contiguous(), scale.squeeze(-1)


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype, *, block: int = 0, begin: int = 0) -> Tensor:
    """weight [out, in] e4m3 times its scales, fp32: one per row [out], or one for each `block` columns of a row [out, blocks],
    where the first column of the weight is column `begin` of the first block. In `dtype`."""
    if not block:
        return (weight.float() * scale.unsqueeze(-1)).to(dtype)
    by_column = scale.repeat_interleave(block, dim=1)[:, begin : begin + weight.shape[1]]
    return (weight.float() * by_column).to(dtype)


# GEMM


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [out, in] transposed -> [T, out]: summed in fp32, rounded once."""
    return (x.float() @ weight.float().t()).to(x.dtype)


def scaled_mm(values: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(values [T, in] e4m3 * row_scale [T, 1] or ()) @ (weight [out, in] e4m3 * scale [out]).T, in fp32, rounded to `dtype`."""
    return ((values.float() @ weight.float().t()) * row_scale * scale).to(dtype)


def block_scaled_mm(
    values: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, *, size: int = 128, begin: int = 0
) -> Tensor:  # fmt: skip
    """values [T, in] e4m3 with x_scale [T, groups] times weight [out, in] e4m3 with scale [out, groups], groups as in
    `per_token_group_quant_fp8`: each group's GEMM in fp32 times both of its scales, added up in fp32, rounded to `dtype`."""
    total = torch.zeros(values.shape[0], weight.shape[0], device=values.device)
    for group in range(scale.shape[1]):
        columns = slice(max(0, group * size - begin), (group + 1) * size - begin)
        total += (values[:, columns].float() @ weight[:, columns].float().t()) * x_scale[:, group, None] * scale[:, group]
    return total.to(dtype)


# RoPE and the KV cache


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of x [T, heads, D] by its token's angles, cos and sin [T, D / 2] fp32; element i pairs with i + D / 2.
    Arithmetic in fp32, rounded once to x's dtype."""
    values = x.float()
    cos, sin = torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)
    return (values * cos + values.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store key and value [T, kv_heads, D] in caches [num_blocks, block_size, kv_heads, D] at slots [T] int64, block * block_size +
    offset; a slot of -1 stores nothing. The other slots are distinct."""
    for part, cache in ((key, key_cache), (value, value_cache)):
        write_slots(part, cache, slots)


def write_slots(part: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store part [T, *shape], rounded, in cache [num_blocks, block_size, *shape]. slots: as of `write_kv`."""
    flat = cache.view(-1, *cache.shape[2:])
    if not slots.is_cuda:
        kept = slots >= 0
        part, slots = (part, slots) if kept.all() else (part[kept], slots[kept])
        flat[slots] = part.to(flat.dtype)
        return
    # No boolean index, whose size only the device knows: padding repeats what the token with the highest slot, or slot 0, stores.
    padding, last = slots < 0, slots.argmax().view(1)
    target = torch.where(padding, slots[last].clamp(min=0), slots)
    repeated = torch.where(padding[last, None, None], flat[:1], part[last])
    flat[target] = torch.where(padding[:, None, None], repeated, part).to(flat.dtype)


def _write_token_scales(scales: Tensor, token_scales: Tensor, slots: Tensor) -> None:
    """scales [T, kv_heads, 2] into token_scales [num_blocks, kv_heads, block_size, 2], as `write_slots`."""
    kv_heads, block_size = token_scales.shape[1:3]
    head = torch.arange(kv_heads, device=slots.device)
    place = ((slots // block_size)[:, None] * kv_heads + head) * block_size + (slots % block_size)[:, None]
    place = torch.where(slots[:, None] < 0, slots[:, None], place)
    write_slots(scales.view(-1, 1, 2), token_scales.view(-1, block_size, 1, 2), place.view(-1))


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> (its rows divided by their scales and rounded to nearest even, int8 [..., D]; the scales, bf16 [..., 1], with
    which a row's largest magnitude becomes 127).

    bf16 has the range of fp32, and rounding a scale costs no accuracy: the values are divided by the rounded scale, and the largest
    magnitude becomes 127 * (1 +- 2^-8) before its own rounding. A row of zeros has a scale that divides; one with NaN or infinite
    values has one that makes all of the row NaN.
    """
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127.0).to(torch.bfloat16)
    return (x * (1.0 / scale.float())).round().nan_to_num(0.0).to(torch.int8), scale


class HeadNorm(NamedTuple):
    """An RMS norm of each query head and each key head before rope: weights [D], in the model's dtype."""

    query: Tensor
    key: Tensor
    eps: float


def rope_store(
    qkv: Tensor | Unscaled, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, q_heads: int,
    kv_scales: tuple[float, float] | None = None, head_norm: HeadNorm | None = None, token_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """rope of the query and key heads of qkv [T, q_heads + 2 * kv_heads, D], and write_kv of its key and value heads: the queries
    [T, q_heads, D]. cos, sin, caches and slots as there. A cache in e4m3 takes keys and values divided by their kv_scales (None:
    1) and clipped to +-448; one in int8 those of `quantize_int8`, whose scales go into token_scales [num_blocks, kv_heads,
    block_size, 2] bf16, a key's before its value's. head_norm: queries and keys are normed first."""
    values, dtype = (qkv.to_fp32(), qkv.values.dtype) if isinstance(qkv, Unscaled) else (qkv, qkv.dtype)
    kv_heads = (values.shape[1] - q_heads) // 2
    if head_norm is not None:
        query, key, value = torch.split(values.to(dtype), [q_heads, kv_heads, kv_heads], dim=1)
        query, key = (rms_norm(*part, head_norm.eps) for part in ((query, head_norm.query), (key, head_norm.key)))
        values = torch.cat((query, key, value), dim=1)
    rotated = rope(values[:, : q_heads + kv_heads], cos, sin).to(dtype)
    parts = [rotated[:, q_heads:], values[:, q_heads + kv_heads :].to(dtype)]
    if key_cache.dtype == torch.float8_e4m3fn:
        scaled = [part.float() * (1.0 / scale) for part, scale in zip(parts, kv_scales or (1.0, 1.0), strict=True)]
        parts = [part.clamp(-448.0, 448.0).to(key_cache.dtype) for part in scaled]
    if token_scales is not None:
        (key, key_scale), (value, value_scale) = map(quantize_int8, parts)
        parts = [key, value]
        _write_token_scales(torch.cat((key_scale, value_scale), dim=-1), token_scales, slots)
    write_kv(parts[0], parts[1], key_cache, value_cache, slots)
    return rotated[:, :q_heads]


def _halves(x: Tensor) -> Tensor:
    """x [..., D] with the elements at even places before those at odd ones."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


def latent_rope_store(
    query: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float, cache: Tensor, slots: Tensor, *,
    interleaved: bool,
) -> None:  # fmt: skip
    """Between the projections of latent attention and its scores: rotate the last dims of each query head in place, and store each
    token's normed latent and rotated key.

    query [T, heads, nope + rope]; latent [T, rank + rope]: the down-projection's output; cos, sin [T, rope / 2] fp32; weight
    [rank] and eps of the latent's RMS norm; cache [blocks, block_size, 1, rank + rope] in the query's dtype or in e4m3, in which
    values are clipped to +-448; slots as of `write_kv`. interleaved: elements 2i and 2i + 1 are a pair, which is rotated into i and
    i + rope / 2; else i and i + rope / 2 are.
    """
    rank, rope_dim = weight.shape[0], 2 * cos.shape[1]
    pairs = _halves if interleaved else torch.Tensor.contiguous
    query[..., -rope_dim:] = rope(pairs(query[..., -rope_dim:]), cos, sin)
    key = rope(pairs(latent[:, None, rank:]), cos, sin)
    entry = torch.cat((rms_norm(latent[:, :rank], weight, eps).unsqueeze(1), key), dim=-1)
    if cache.dtype == torch.float8_e4m3fn:
        entry = entry.float().clamp(-448.0, 448.0).to(cache.dtype)
    write_slots(entry, cache, slots)


# Attention over the paged KV cache


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, kv_lengths: Tensor,
    *, scale: float, window: int | None = None, kv_scales: tuple[float, float] | None = None, sinks: Tensor | None = None,
    token_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each decode row's query over the row's cached keys: all, or the last `window` of them.

    query [R, q_heads, head_dim] in bf16, fp16 or fp32; caches [blocks, block_size, kv_heads, head_dim] in its dtype, in e4m3 to
    be multiplied by kv_scales (keys', values') when read, or in int8, to be multiplied by token_scales [blocks, kv_heads,
    block_size, 2] (a key's, its value's); q_heads is a multiple of kv_heads, neighbours share a KV head.
    block_tables [N, W] int32: row r has its tokens in the blocks of table row table_rows[r] ([R] int32 or int64; None for r
    itself). kv_lengths [R] int32, at least 1. sinks [q_heads]: a logit of each head
    that takes its part of the softmax and has no value. Computed in fp32; returns query's shape and dtype.
    """
    key_scale, value_scale = kv_scales or (1.0, 1.0)
    block_size, group = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    out = torch.empty_like(query)
    for row, length in enumerate(kv_lengths.tolist()):
        table = block_tables[row if table_rows is None else int(table_rows[row])]
        token = torch.arange(0 if window is None else max(0, length - window), length, device=query.device)
        block, offset = table[token // block_size].long(), token % block_size
        key, value = (
            (cache.view(torch.uint8)[block, offset].view(torch.float8_e4m3fn) if cache.dtype == torch.float8_e4m3fn
             else cache[block, offset]).float()
            for cache in (key_cache, value_cache)
        )  # fmt: skip
        if token_scales is not None:
            by_token = token_scales[block, :, offset].float()
            key, value = key * by_token[..., :1], value * by_token[..., 1:]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        score = torch.einsum("hd,nhd->hn", query[row].float(), key) * (scale * key_scale)
        if sinks is not None:
            score = torch.cat((score, sinks.float().unsqueeze(-1)), dim=-1)
        weight = score.softmax(-1)[:, : len(token)]
        out[row] = (torch.einsum("hn,nhd->hd", weight, value) * value_scale).to(query.dtype)
    return out


def latent_decode_attention(
    query: Tensor, rotated: Tensor, cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, kv_lengths: Tensor, *,
    scale: float, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each decode row's absorbed queries over its cached latents, which are keys, with the rotated key behind them, and values.

    query [R, heads, rank]: times the latent; rotated [R, heads, rope]: times the rotated key; cache [blocks, block_size, 1,
    rank + rope] in their dtype, or in e4m3. All else as of `decode_attention`. Computed in fp32; returns query's shape and dtype.
    lse [R, heads] fp32: where the log-sum-exp of each row's scores goes, -1e30 of a row that has no token."""
    out, rank, block_size = torch.empty_like(query), query.shape[2], cache.shape[1]
    stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache  # which torch indexes everywhere
    for row, length in enumerate(kv_lengths.tolist()):
        table = block_tables[row if table_rows is None else int(table_rows[row])]
        token = torch.arange(length, device=query.device)
        latent = stored[table[token // block_size].long(), token % block_size, 0].view(cache.dtype).float()
        score = torch.cat((query[row], rotated[row]), dim=-1).float() @ latent.t() * scale
        out[row] = (score.softmax(-1) @ latent[:, :rank]).to(query.dtype)
        if lse is not None:
            lse[row] = score.logsumexp(-1).clamp(min=-1e30)
    return out


def prefill_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, query_starts: Tensor,
    kv_lengths: Tensor, *, scale: float, window: int | None = None, kv_scales: tuple[float, float] | None = None,
    out: Tensor | None = None, sinks: Tensor | None = None, token_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each prefill row's n tokens, the newest in the cache: token i of n attends to the row's keys 0 .. kv_length - n + i, or to
    the last `window` of them.

    query [T, q_heads, head_dim]; query_starts [P + 1] int32: row r's tokens are query[query_starts[r]:query_starts[r + 1]], none or
    more; tokens of no row keep what `out` holds. kv_lengths [P] int32: at least the row's tokens; of a row without, anything. All
    else as of `decode_attention`. Computed in fp32; returns `out`, of query's shape and dtype; without one, a new tensor of zeros.
    """
    out = torch.zeros_like(query) if out is None else out
    starts = query_starts.tolist()
    for row, length in enumerate(kv_lengths.tolist()):
        begin, end = starts[row : row + 2]
        for token in range(begin, end):
            table = row if table_rows is None else int(table_rows[row])
            out[token] = decode_attention(
                query[token : token + 1], key_cache, value_cache, block_tables[table : table + 1], None,
                kv_lengths.new_tensor([length - end + token + 1]), scale=scale, window=window, kv_scales=kv_scales,
                sinks=sinks, token_scales=token_scales,
            )[0]  # fmt: skip
    return out


# SiLU and all-reduce


def silu_mul(gate_up: Tensor | Unscaled, *, gelu: bool = False) -> Tensor:
    """act(gate) * up for gate_up [T, 2 * I], gate in the first half -> [T, I]; in gate_up's dtype. gelu: by tanh, not SiLU."""
    if isinstance(gate_up, Unscaled):
        return silu_mul(gate_up.to_fp32(), gelu=gelu).to(gate_up.values.dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)) * up


def silu_mul_quant_fp8(gate_up: Tensor | Unscaled, scale: Tensor | None = None, *, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """quantize_fp8 of silu_mul: e4m3 [T, I], and the scale, given or one per token [T, 1]."""
    return quantize_fp8(silu_mul(gate_up, gelu=gelu), scale)


def all_reduce(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' tensors: in fp32, in rank order, rounded once to their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


# Sampling: argmax, Gumbel-max over a vocabulary that is split over ranks, and the filters


def packed_argmax_keys(logits: Tensor, begin: int, width: int) -> Tensor:
    """One key [S, 1] int64 for each row of logits [S, W], of which columns 0 .. width - 1 are tokens begin, begin + 1, ...

    The high half of a key is the highest logit, as an integer in the order of the logits (NaN is the highest), the low half
    2^32 - 1 - token: the larger of two keys is the higher logit's, or of equal ones the lower token's. Without columns the key is
    the lowest integer.
    """
    if width == 0:
        return torch.full((len(logits), 1), -(2**63), dtype=torch.int64, device=logits.device)
    values = logits[:, :width]
    column = values.argmax(-1, keepdim=True)
    value = values.gather(1, column).float()
    bits = torch.where(value == 0, 0.0, value).view(torch.int32)
    order = torch.where(value.isnan(), 0x7FFFFFFF, torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return (order.long() << 32) | (0xFFFFFFFF - begin - column)


NOT_FINITE = -2  # instead of a token of logits whose highest is NaN or infinite; its embedding is zero


def _finite(keys: Tensor) -> Tensor:
    """Whether the logits of these keys are neither NaN nor infinite."""
    return ((keys >> 32) < 0x7F800000) & ((keys >> 32) > -0x7F800001)


def decode_keys(keys: Tensor, tokens: Tensor, remember: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
    """From keys [ranks, S, parts] (see `packed_argmax_keys`) to tokens [S] int64, written there: the largest key's token of each
    row, NOT_FINITE where its logit is NaN or infinite.

    remember: (last_tokens [slots], slots [S], kv_slots [S]), all int64: the token is also written to last_tokens[slots[s]], except
    for padding, whose KV slot is negative.
    """
    tokens.copy_(torch.where(_finite(best := keys.amax((0, 2))), 0xFFFFFFFF - (best & 0xFFFFFFFF), NOT_FINITE))
    if remember is not None:
        last_tokens, slots, kv_slots = remember
        valid = kv_slots >= 0
        last_tokens[slots[valid]] = tokens[valid]


def gumbel_max(
    logits: Tensor, begin: int, width: int, max_keys: Tensor, temperature: Tensor, noise: Tensor, thresholds: Tensor | None = None
) -> Tensor:
    """As `packed_argmax_keys`, of a sample: the largest key's token has probability softmax(logits / temperature), as
    `scale_logits` and `draw` give it for the whole vocabulary, to the bit where exp and log are the same. Where the highest logit
    is not finite, the keys are those of NaN.

    max_keys [ranks, S, parts]: the keys of the logits, of all ranks. temperature [S] fp32: 0 takes the argmax. noise [2, S] int32:
    the rows' keys, as in `draw`. thresholds [S] fp32: tokens whose scaled logit is lower are dropped (see `filter_thresholds`);
    None: none is.
    """
    order, finite = ((highest := max_keys.amax((0, 2))) >> 32).to(torch.int32), _finite(highest)
    top = torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32).unsqueeze(1)
    keys = []
    step = max(1, _LOGITS_AT_ONCE // max(width, 1))
    for rows in (slice(first, first + step) for first in range(0, len(logits), step)):
        values, sampled = logits[rows, :width].float(), (temperature[rows] > 0).unsqueeze(1)
        divisor = torch.where(sampled, temperature[rows].unsqueeze(1), 1.0)
        scores = _scale_logits(values, top[rows], divisor)
        if thresholds is not None:
            scores = torch.where(scores >= thresholds[rows].unsqueeze(1), scores, _NEVER)
        scores = scores.sub_(_log_exponential(noise[:, rows], begin, begin + width))
        part = packed_argmax_keys(torch.where(sampled, scores, values), begin, width)
        keys.append(torch.where(finite[rows].unsqueeze(1) | (width == 0), part, (0x7FFFFFFF << 32) | (part & 0xFFFFFFFF)))
    return torch.cat(keys) if keys else torch.empty(0, 1, dtype=torch.int64, device=logits.device)


def filter_thresholds(logits: Tensor, temperature: Tensor, filters: Tensor) -> Tensor:
    """What top-k, top-p and min-p keep of each row of logits [S, V], as the least logit, scaled as `scale_logits` does, that is
    kept: [S] fp32, -inf where all are, and in rows of temperature 0.

    temperature: up to 100. filters [3, S] fp64: top_k, top_p and min_p of each row as in `keep_filtered`, whose threshold this is;
    off are V, 1 or more, and 0. Reads from the device which filters rows have.
    """
    thresholds, width = torch.full_like(temperature, _NEVER), logits.shape[1]
    top_k, top_p, min_p = filters
    k_on, p_on, m_on = top_k < width, top_p < 1.0, min_p > 0.0
    filtered = ((temperature > 0) & (k_on | p_on | m_on)).nonzero()[:, 0]
    for rows in filtered.split(max(1, _LOGITS_AT_ONCE // width)):
        scaled = scale_logits(logits[rows].float(), temperature[rows])
        some_k, some_p, some_m = (bool(on[rows].any()) for on in (k_on, p_on, m_on))
        most = width if (p_on & ~k_on)[rows].any() else int(top_k[rows].where(k_on[rows], 1.0).max())
        thresholds[rows] = _threshold(
            scaled, most, top_k[rows].long() if some_k else None, top_p[rows].where(p_on[rows], 2.0) if some_p else None,
            min_p[rows].float() if some_m else None,
        )[:, 0]  # fmt: skip
    return thresholds


def scale_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - their row's maximum) / temperature; [R, V] and [R], fp32. The maximum is 0, and nothing is NaN or +inf."""
    return _scale_logits(logits, logits.amax(-1, keepdim=True), temperature.unsqueeze(1))


def _scale_logits(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    shifted = logits - torch.where(top == _NEVER, 0.0, top)
    return shifted.div_(temperature).nan_to_num_(nan=0.0, neginf=_NEVER)


def keep_filtered(scaled: Tensor, most: int, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """What `filter_thresholds` keeps, by definition: scaled [R, V] (see `scale_logits`) with -inf at what the three filters drop;
    each is per row [R], or None where no row has it.

    top_k (int64, V is off): the k highest. top_p (fp64, above 1 is off): of those, the fewest whose probability reaches p.
    min_p (fp32, 0 is off): those at least min_p times as likely as the most likely. `most`: no row that has a top_p has a higher
    top_k, and none that has a top_k; V means a full sort.
    """
    return torch.where(scaled >= _threshold(scaled, most, top_k, top_p, min_p), scaled, _NEVER)


def _threshold(scaled: Tensor, most: int, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """The least value that is kept, [R, 1]."""
    threshold = torch.full_like(scaled[:, :1], _NEVER)
    if top_k is not None or top_p is not None:
        if most < scaled.shape[1]:
            highest = scaled.topk(most, dim=-1).values
        else:
            highest = _descending(scaled)
        if top_k is not None:
            kth = highest.gather(1, (top_k.clamp(max=most) - 1).unsqueeze(1))
            threshold = torch.where((top_k < scaled.shape[1]).unsqueeze(1), kth, threshold)
        if top_p is not None:
            threshold = torch.maximum(threshold, _nucleus_threshold(scaled, highest, threshold, top_p))
    if min_p is not None:
        threshold = torch.maximum(threshold, min_p.log().unsqueeze(1))
    return threshold


def _descending(x: Tensor) -> Tensor:
    """Each row of x [R, V] sorted, highest first. Numpy sorts values alone with vector instructions; torch carries the indices."""
    if x.is_cpu:
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(dim=-1, descending=True).values


def _nucleus_threshold(scaled: Tensor, highest: Tensor, threshold: Tensor, top_p: Tensor) -> Tensor:
    """The value of the last token of the nucleus, [R, 1]. In fp64: how a sum is split must not move the edge."""
    total = torch.where(scaled >= threshold, scaled.exp(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    mass = torch.where(highest >= threshold, highest, _NEVER).to(torch.float64).exp()
    before = (mass.cumsum(-1) - mass) / total
    inside = before < top_p.unsqueeze(1)
    lowest = torch.where(inside, highest, float("inf")).amin(-1, keepdim=True)
    return torch.where(top_p.unsqueeze(1) > 1.0, _NEVER, lowest)


def draw(scaled: Tensor, keys: Tensor) -> Tensor:
    """What `gumbel_max` samples, by definition: one token per row [R] int64 with probability softmax(scaled) [R, V], decided by
    keys [2, R] int32 alone.

    Gumbel-max: argmax(scaled - log(E)), E = -log(1 - u), u = hash(key, token). A token at -inf never wins while another is finite.
    """
    return (scaled - _log_exponential(keys, 0, scaled.shape[1])).argmax(-1)


def _log_exponential(keys: Tensor, begin: int, end: int) -> Tensor:
    return hashed_uniform(keys, end, begin).neg_().log1p_().neg_().log_()


def hashed_uniform(keys: Tensor, tokens: int, begin: int = 0) -> Tensor:
    """u [R, tokens - begin] fp32 in (0, 1), for tokens `begin` and on: a hash of (keys[0, r], keys[1, r], token), by 32-bit integer
    arithmetic that wraps.

    Resolution is 2^-31 near 0, where the maximum is decided. The mixing steps are Wellons' lowbias32
    (nullprogram.com/blog/2018/07/31), once over the token and once more with the keys worked in.
    """
    h = _mixed_ids(tokens, keys.device)[begin:] ^ keys[0].unsqueeze(1)
    h ^= (h >> 16) & 0xFFFF
    h *= _A
    h ^= (h >> 15) & 0x1FFFF
    h += keys[1].unsqueeze(1)
    h *= _B
    h ^= (h >> 16) & 0xFFFF
    h &= 0x7FFFFFFF
    return h.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)


_A = 0x7FEB352D
_B = 0x846CA68B - 2**32  # as a signed 32-bit number


@functools.lru_cache(maxsize=8)
def _mixed_ids(tokens: int, device: torch.device) -> Tensor:
    h = torch.arange(tokens, dtype=torch.int32, device=device) + (0x9E3779B9 - 2**32)
    h = (h ^ ((h >> 16) & 0xFFFF)) * _A
    h = (h ^ ((h >> 15) & 0x1FFFF)) * _B
    return h ^ ((h >> 16) & 0xFFFF)

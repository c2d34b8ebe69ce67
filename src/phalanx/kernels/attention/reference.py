# SPDX-License-Identifier: Apache-2.0
"""Paged attention of rows of one token, or several, in plain torch: what the kernels compute, and their tests' oracle."""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, kv_lengths: Tensor,
    *, scale: float, window: int | None = None, kv_scales: tuple[float, float] | None = None,
) -> Tensor:  # fmt: skip
    """Each row's query over the row's cached keys: all, or the last `window` of them.

    query [R, q_heads, head_dim] in bf16, fp16 or fp32; caches [blocks, block_size, kv_heads, head_dim] in its dtype, or in e4m3 to
    be multiplied by kv_scales (keys', values') when read; q_heads is a multiple of kv_heads, neighbours share a KV head.
    block_tables [N, W] int32: row r has its tokens in the blocks of table row table_rows[r] ([R] int32 or int64; None for r
    itself). kv_lengths [R] int32, at least 1. Computed in fp32; returns query's shape and dtype.
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
             else cache[block, offset]).float().repeat_interleave(group, 1)
            for cache in (key_cache, value_cache)
        )  # fmt: skip
        score = torch.einsum("hd,nhd->hn", query[row].float(), key) * (scale * key_scale)
        out[row] = (torch.einsum("hn,nhd->hd", score.softmax(-1), value) * value_scale).to(query.dtype)
    return out


def prefill_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, query_starts: Tensor,
    kv_lengths: Tensor, *, scale: float, window: int | None = None, kv_scales: tuple[float, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each row's n tokens, the newest in the cache: token i of n sees the row's keys 0 .. kv_length - n + i, or the last `window`
    of them.

    query [T, q_heads, head_dim]; query_starts [P + 1] int32: row r's tokens are query[query_starts[r]:query_starts[r + 1]], none or
    more; tokens of no row keep what `out` holds. kv_lengths [P] int32: at least the row's tokens; of a row without, anything. All
    else as of `decode_attention`. Computed in fp32; returns `out`, of query's shape and dtype, zeros at first where none is given.
    """
    out = torch.zeros_like(query) if out is None else out
    starts = query_starts.tolist()
    for row, length in enumerate(kv_lengths.tolist()):
        begin, end = starts[row : row + 2]
        for at in range(begin, end):
            table = row if table_rows is None else int(table_rows[row])
            out[at] = decode_attention(
                query[at : at + 1], key_cache, value_cache, block_tables[table : table + 1], None,
                kv_lengths.new_tensor([length - end + at + 1]), scale=scale, window=window, kv_scales=kv_scales,
            )[0]  # fmt: skip
    return out

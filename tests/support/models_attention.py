# SPDX-License-Identifier: Apache-2.0
"""Batches with a paged cache for tests of attention back ends, and attention by the formula."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor

from phalanx.kernels.reference import quantize_int8
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from tests.support.kernels_attention import in_int8 as kernels_in_int8

CPU = torch.device("cpu")


BLOCK = 4


def made_batch(
    rows: list[tuple[int, int]], window: int | None, padding: int = 0
) -> tuple[Batch, LayerCache, list[Tensor], list[Tensor]]:
    """rows: (tokens in the cache before, tokens now). Also the cache, and each row's keys and values [length, 2, 8];
    the cache has NaN where no row has stored anything, and in blocks that the window hides from the row."""
    generator = torch.Generator().manual_seed(3)
    lengths = [before + now for before, now in rows]
    needed = sum(-(-length // BLOCK) for length in lengths)
    shape = (needed + 1, BLOCK, 2, 8)
    cache = LayerCache({"key": torch.full(shape, float("nan")), "value": torch.full(shape, float("nan"))})
    free = list(range(1, needed + 1))
    random.Random(5).shuffle(free)
    tables, keys, values = [], [], []
    for before, length in zip((before for before, _ in rows), lengths, strict=True):
        key, value = torch.randn(2, length, 2, 8, generator=generator)
        table = [free.pop() for _ in range(-(-length // BLOCK))]
        for at in range(length):
            cache.key[table[at // BLOCK], at % BLOCK], cache.value[table[at // BLOCK], at % BLOCK] = key[at], value[at]
        hidden = 0 if window is None else max(0, before - window + 1) // BLOCK
        tables.append([0] * hidden + table[hidden:])
        keys.append(key)
        values.append(value)
    width = max(map(len, tables)) + 2
    starts = [0, *itertools.accumulate(now for _, now in rows)]
    tokens = torch.zeros(starts[-1] + padding, dtype=torch.int64)
    batch = Batch(
        tokens, tokens, tokens, torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32),
        torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32), tokens, starts, lengths,
    )  # fmt: skip
    batch.block_tables_cpu = batch.block_tables.numpy()
    return batch, cache, keys, values


def in_fp8(cache: LayerCache, scales: tuple[float, float]) -> LayerCache:
    """The cache in e4m3, for reading with these scales."""
    parts = zip(("key", "value"), scales, strict=True)
    return LayerCache({name: (cache[name] / scale).to(torch.float8_e4m3fn) for name, scale in parts})


def in_int8(cache: LayerCache) -> LayerCache:
    """The cache in int8."""
    return LayerCache(dict(zip(("key", "value", "token_scales"), kernels_in_int8(cache.key, cache.value), strict=True)))


def as_read_int8(values: Tensor) -> Tensor:
    """The values as read from a cache in int8."""
    stored, scale = quantize_int8(values)
    return stored * scale.float()


def as_read(values: Tensor, scale: float) -> Tensor:
    """The values as read from a cache in e4m3 with this scale."""
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def naive(query: Tensor, key: Tensor, value: Tensor, before: int, window: int | None, scale: float) -> Tensor:
    """query [now, 6, 8], key and value [length, 2, 8]: each query over the keys that it sees, one query at a time."""
    out = torch.empty_like(query)
    for at in range(query.shape[0]):
        begin = 0 if window is None else max(0, before + at + 1 - window)
        for head in range(6):
            k, v = key[begin : before + at + 1, head // 3], value[begin : before + at + 1, head // 3]
            out[at, head] = ((k @ query[at, head]) * scale).softmax(0) @ v
    return out


def latent_batch(rows: list[tuple[int, int]], *, indirect: bool) -> tuple[Batch, LayerCache]:
    """rows: (tokens before, tokens now). Blocks of 4 in a shuffled order, block 0 poisoned; one KV slot per token."""
    lengths = [before + now for before, now in rows]
    counts = [-(-length // 4) for length in lengths]
    order = (torch.randperm(sum(counts)) + 1).tolist()
    tables = torch.zeros(len(rows) + 3, max(counts) + 1, dtype=torch.int32)
    table_rows = torch.arange(len(rows) + 2, 2, -1) if indirect else torch.arange(len(rows))
    for row, count in enumerate(counts):
        tables[table_rows[row], :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    starts = [0]
    for _, now in rows:
        starts.append(starts[-1] + now)
    cache = torch.randn(sum(counts) + 1, 4, 1, 20)
    cache[0] = float("nan")
    zeros = torch.zeros(starts[-1], dtype=torch.int64)
    batch = Batch(
        zeros, zeros, zeros, torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), tables, zeros,
        starts, lengths, table_rows=table_rows if indirect else None,
    )  # fmt: skip
    return batch, LayerCache({"latent": cache})

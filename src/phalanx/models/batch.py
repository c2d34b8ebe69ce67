# SPDX-License-Identifier: Apache-2.0
"""The input of one forward: `Batch`, passed from layer to layer; there is no global context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.plan.memory import KvSpec


@dataclass(frozen=True)
class DpTokens:
    """The tokens of a step on all D dp indices, which exchange them for their experts.

    counts: of each index. rows: that each index sends, at least the largest count. padding [D * rows] int64: in a captured graph,
    where counts change from replay to replay, -1 for the rows that are no tokens, and 0 for the others; else None.
    """

    counts: Sequence[int]
    rows: int
    padding: Tensor | None = None

    @classmethod
    def of(cls, counts: Sequence[int]) -> DpTokens:
        """Of a step that no graph runs: no more rows than the largest index has tokens."""
        return cls(counts, max(counts))


@dataclass
class Batch:
    """A flattened batch of T tokens from R rows, one row per request. All tensors are on the model's device.

    token_ids [T] int64; positions [T] int64; kv_slots [T] int64: where each token's K and V go, block * block_size + offset, and -1
    for padding. query_starts [R+1] int32: row r's tokens are query_starts[r]..query_starts[r+1]. kv_lengths [R] int32: tokens of
    the row in the cache after this forward has stored its own. block_tables [R, W] int32: block ids, stale or 0 beyond those in
    use; with table_rows [R] int64, row r's table is block_tables[table_rows[r]], and block_tables has more rows than the batch.
    logit_rows [S] int64: which of the T tokens yield logits. `attention` is the back end's plan of this batch. The `*_cpu` fields
    are the same on the host, for back ends that plan there; `block_tables_cpu` is None where none does. Of a fixed batch they tell
    the size only.

    fixed: a batch that a captured graph forwards many times: every tensor keeps its address. Its tables are those of all slots, its
    table_rows the rows' slots; a row may have any length that its table has room for. Its rows 0 .. decodes-1 are decode rows, row
    r with token r; the others are prefill rows of any number of tokens, at query_starts. An absent row has slot 0, no token and a
    KV length of 0; or, where all rows are decode rows, a token and a KV length of 1. Absent tokens come last, and have position 0
    and KV slot -1. short: of a fixed batch: no row gets longer than the back end's `short_kv_limit` for so many rows. last:
    (last_tokens [slots], slots [T]), both int64: a token id of -1 stands for last_tokens[slots[t]], the token sampled last.

    dp_tokens: where several dp indices exchange tokens for their experts.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    query_starts: Tensor
    kv_lengths: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    query_starts_cpu: list[int]
    kv_lengths_cpu: list[int]
    block_tables_cpu: np.ndarray[Any, np.dtype[np.int32]] | None = None
    table_rows: Tensor | None = None
    attention: Any = None
    fixed: bool = False
    decodes: int = 0
    short: bool = False
    last: tuple[Tensor, Tensor] | None = None
    dp_tokens: DpTokens | None = None


def count_leading_decodes(query_starts: Sequence[int] | np.ndarray[Any, np.dtype[np.int32]]) -> int:
    """How many rows at the beginning of the batch have one token. query_starts [R + 1]: see `Batch`."""
    longer = np.diff(np.asarray(query_starts)) != 1
    return int(longer.argmax()) if longer.any() else len(longer)


def first_block(position: int, window: int | None, block_size: int) -> int:
    """The first block of a row that a query at `position` or later sees; table entries before it may be stale."""
    return 0 if window is None else max(0, position - window + 1) // block_size


class KvCache(Protocol):
    """One layer's cache: `key` and `value` [num_blocks, block_size, kv_heads, head_dim]; in int8 with `token_scales` [num_blocks,
    kv_heads, block_size, 2] bf16, of each key and its value. A latent cache has one head, and its `value` is the beginning of its
    `key`."""

    @property
    def key(self) -> Tensor: ...

    @property
    def value(self) -> Tensor: ...

    @property
    def token_scales(self) -> Tensor | None: ...

    @property
    def nbytes(self) -> int: ...


@dataclass
class LayerCache:
    """The plain KvCache. `key` and `value` [num_blocks, block_size, kv_heads, head_dim]. token_scales: of a cache in int8; those of
    a block and a head lie side by side, so that attention reads those of 16 tokens in 64 bytes."""

    key: Tensor
    value: Tensor
    token_scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes + (0 if self.token_scales is None else self.token_scales.nbytes)

    @classmethod
    def zeros(cls, blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """A cache that holds zeros, with scales of 1 where it is in int8."""
        shape = (blocks, block_size, heads, head_dim)
        scales = None
        if dtype == torch.int8:
            scales = torch.ones((blocks, heads, block_size, 2), dtype=torch.bfloat16, device=device)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device), scales)


@dataclass
class LatentCache:
    """The KvCache of latent attention: one tensor `key` [num_blocks, block_size, 1, rank + rope], of which the first `rank`
    elements are the latent, from which all heads' keys and values come, and the rest the rotated key that they share."""

    key: Tensor
    rank: int

    @property
    def value(self) -> Tensor:
        return self.key[..., : self.rank]

    @property
    def token_scales(self) -> None:
        """There are no latents in int8."""

    @property
    def nbytes(self) -> int:
        return self.key.nbytes


def empty_cache(spec: KvSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> LayerCache | LatentCache:
    """The cache of one layer, all zeros."""
    if spec.latent_rank is None:
        return LayerCache.zeros(blocks, block_size, spec.heads, spec.head_dim, dtype, device)
    shape = (blocks, block_size, spec.heads, spec.head_dim)
    return LatentCache(torch.zeros(shape, dtype=dtype, device=device), spec.latent_rank)

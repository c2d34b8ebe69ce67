# SPDX-License-Identifier: Apache-2.0
"""Attention over paged keys and values on GPUs: `decode_attention` of rows of one token, where `takes` says so;
`prefill_attention` of rows of several, where `takes_prefill` does."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.attention.split import SHARED, SHORT, Split, Workspace, chosen, prefill_choice, prefill_tiles
from phalanx.kernels.norms import triton_is_here

__all__ = [
    "decode_attention", "cut_rows", "prefill_attention", "prefill_tiles", "short_up_to", "takes", "takes_prefill", "Heads", "Kind",
    "Split", "Workspace", "SHORT",
]  # fmt: skip


class Heads(NamedTuple):
    """What launches differ in besides their rows. group: query heads per KV head; itemsize: bytes of a cached element."""

    kv_heads: int
    group: int
    head_dim: int
    itemsize: int

    @classmethod
    def of(cls, query: Tensor, key_cache: Tensor) -> Heads:
        """query [R, q_heads, head_dim], key_cache [blocks, block_size, kv_heads, head_dim]."""
        kv_heads = key_cache.shape[2]
        return cls(kv_heads, query.shape[1] // kv_heads, query.shape[2], key_cache.element_size())


class Kind(NamedTuple):
    """What the layers have in common for which rows are cut alike."""

    heads: Heads
    block_size: int
    window: int | None

    @classmethod
    def of(cls, query: Tensor, key_cache: Tensor, window: int | None) -> Kind:
        """query, key_cache: as of `Heads`."""
        return cls(Heads.of(query, key_cache), key_cache.shape[1], window)


def takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there is a kernel for queries of this dtype and head_dim, whatever the ratio of heads, the block size, the window,
    and with the cache in the same dtype or in e4m3."""
    known = dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim % 8 == 0 and head_dim <= 256
    return device.type == "cuda" and known and triton_is_here()


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, kv_lengths: Tensor,
    *, scale: float, workspace: Workspace, window: int | None = None, kv_scales: tuple[float, float] | None = None,
    short: bool = False, pieces: Tensor | None = None, early_lengths: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.decode_attention`; written into `out` [R, q_heads, head_dim] where one is given. All tensors contiguous but
    block_tables, whose rows are. Nothing is read by the host: the launch may be captured, and replayed with other lengths.

    workspace: of this stream, kept over calls. short: no row has more than SHORT tokens; a longer one is right all the same, and
    slow. pieces: what `cut_rows` says of these rows; None: it is asked for this call. early_lengths: pieces, or kv_lengths and
    table_rows, are read while kernels before may still run: they must be complete before the first of this chain of kernels
    begins, written by copies, or by kernels that a launch without programmatic dependence came behind.
    """
    from phalanx.kernels.attention.decode import decode_attention as kernel

    split = chosen(max(len(query), 1), *Heads.of(query, key_cache), workspace.processors, short=short, shared=workspace.shared)
    return kernel(
        query, key_cache, value_cache, block_tables, table_rows, kv_lengths, scale=scale, window=window, kv_scales=kv_scales,
        workspace=workspace, split=split, pieces=pieces, early_lengths=early_lengths, out=out,
    )  # fmt: skip


def cut_rows(
    kv_lengths: Tensor, table_rows: Tensor | None, kind: Kind, workspace: Workspace, *, short: bool = False
) -> Tensor | None:  # fmt: skip
    """How `decode_attention` shares programs out among these rows, for all layers of one kind; None where each row has one.
    Arguments as there; by a kernel, which may be captured, and replayed with other lengths."""
    split = chosen(max(len(kv_lengths), 1), *kind.heads, workspace.processors, short=short, shared=workspace.shared)
    if not split.shares or not len(kv_lengths) or not kv_lengths.is_cuda:
        return None
    from phalanx.kernels.attention.shares import cut

    return cut(kv_lengths, table_rows, split, window=kind.window, block_size=kind.block_size)


def short_up_to(rows: int, heads: Heads, processors: int, shared: int = SHARED) -> int:
    """Up to what length `short` makes launches of so many rows faster, where no row is longer; 0 where it makes no difference.
    processors, shared: see `Workspace`."""
    usual, hasty = (chosen(rows, *heads, processors, short=short, shared=shared) for short in (False, True))
    return SHORT if hasty != usual else 0


def takes_prefill(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """As `takes`, of `prefill_attention`, which in fp32 fits the shared memory of every GPU up to a head_dim of 128."""
    return takes(device, dtype, head_dim) and (dtype != torch.float32 or head_dim <= 128)


def prefill_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, query_starts: Tensor,
    kv_lengths: Tensor, *, scale: float, window: int | None = None, kv_scales: tuple[float, float] | None = None,
    tiles: int | None = None, early_lengths: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.prefill_attention`; written into `out` where one is given, else into memory that is not set: tokens of no row
    have no output. All tensors contiguous but block_tables, whose rows are. Nothing is read by the host: the launch may be
    captured, and replayed with other starts and lengths.

    tiles: exactly what `prefill_tiles` says of these rows, or more; rows from the first on have no output where it is less. None:
    as many as so many rows of so many tokens may have, at worst; a program beyond the last tile returns at once.
    early_lengths: as of `decode_attention`; query_starts are read then, too.
    """
    from phalanx.kernels.attention.prefill import prefill_attention as kernel

    choice = prefill_choice(query.shape[2], query.element_size())
    return kernel(
        query, key_cache, value_cache, block_tables, table_rows, query_starts, kv_lengths, scale=scale, window=window,
        kv_scales=kv_scales, choice=choice, tiles=tiles, early_lengths=early_lengths, out=out,
    )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged KV cache on GPUs: `decode_attention` for decode rows, where `supports` says so; `prefill_attention` for
prefill rows, where `supports_prefill` does."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.config.latent import Latent
from phalanx.kernels.attention import indexer
from phalanx.kernels.attention.heuristics import (
    LATENT_BAND_LEAST,
    LATENT_RANK,
    LATENT_ROPE,
    LATENT_TILE,
    ROW_CLASSES,
    SHORT_KV,
    DecodeTiling,
    LatentTiling,
    SplitKvWorkspace,
    is_long_prefill,
    select_decode,
    select_latent_bands,
    select_latent_decode,
    select_prefill,
    tile_tokens,
)
from phalanx.kernels.capabilities import HOPPER_SHARED_MEMORY, has_gluon, has_triton, sm_arch


class HeadLayout(NamedTuple):
    """What decode tilings depend on besides the rows. group: query heads per KV head; itemsize: bytes of a cached element;
    fp32: queries are."""

    kv_heads: int
    group: int
    head_dim: int
    itemsize: int
    fp32: bool = False

    @classmethod
    def of(cls, query: Tensor, key_cache: Tensor) -> HeadLayout:
        """query [R, q_heads, head_dim], key_cache [blocks, block_size, kv_heads, head_dim]."""
        kv_heads = key_cache.shape[2]
        group, fp32 = query.shape[1] // kv_heads, query.dtype == torch.float32
        return cls(kv_heads, group, query.shape[2], key_cache.element_size(), fp32)

    def prompt_wave(self, num_sms: int) -> tuple[int, int]:
        """How many tiles of a prompt `prefill_attention` computes at once, on so many multiprocessors, and the tokens of each."""
        return num_sms // self.kv_heads, tile_tokens(self.group)

    def tiling(self, rows: int, num_sms: int, *, short: bool, shared_memory: int) -> DecodeTiling:
        """See `select_decode`."""
        shape = self.kv_heads, self.group, self.head_dim, self.itemsize
        return select_decode(rows, *shape, num_sms, short=short, fp32=self.fp32, shared_memory=shared_memory)


class LayerSpec(NamedTuple):
    """What layers must have in common to share one plan of splits."""

    heads: HeadLayout
    block_size: int
    window: int | None

    @classmethod
    def of(cls, query: Tensor, key_cache: Tensor, window: int | None) -> LayerSpec:
        """query, key_cache: as of `HeadLayout`."""
        return cls(HeadLayout.of(query, key_cache), key_cache.shape[1], window)


def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there is a kernel for queries of this dtype and head_dim, whatever the ratio of heads, the block size, the window,
    and with the cache in the same dtype, in e4m3 or in int8."""
    known = dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim % 8 == 0 and head_dim <= 256
    return device.type == "cuda" and known and has_triton()


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, kv_lengths: Tensor,
    *, scale: float, workspace: SplitKvWorkspace, window: int | None = None, kv_scales: tuple[float, float] | None = None,
    short: bool = False, splits: Tensor | None = None, early_lengths: bool = False, out: Tensor | None = None,
    sinks: Tensor | None = None, token_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.decode_attention`; written into `out` [R, q_heads, head_dim] where one is given. All tensors contiguous but
    block_tables, whose rows are. Nothing is read by the host: the launch may be captured, and replayed with other lengths.

    workspace: of this stream, kept over calls. short: no row has more than SHORT_KV tokens; the result is right for longer rows
    too, but slow. splits: what `plan_splits` gives for these rows; None: it is computed for this call. early_lengths: splits, or
    kv_lengths and table_rows, are read while kernels before may still run: they must be complete before the first of this chain of
    kernels begins, written by copies, or by kernels that a launch without programmatic dependence follows."""
    from phalanx.kernels.attention.decode import decode_attention as kernel

    return kernel(
        query, key_cache, value_cache, block_tables, table_rows, kv_lengths, scale=scale, window=window, kv_scales=kv_scales,
        workspace=workspace, tiling=_decode_tiling(len(query), HeadLayout.of(query, key_cache), workspace, short=short),
        splits=splits, early_lengths=early_lengths, out=out, sinks=sinks, token_scales=token_scales,
    )  # fmt: skip


def plan_splits(
    kv_lengths: Tensor, table_rows: Tensor | None, spec: LayerSpec, workspace: SplitKvWorkspace, *, short: bool = False
) -> Tensor | None:  # fmt: skip
    """How `decode_attention` divides programs among these rows, for all layers of one spec; None where each row has one. Arguments
    as there. Runs a kernel, which may be captured, and replayed with other lengths."""
    tiling = _decode_tiling(len(kv_lengths), spec.heads, workspace, short=short)
    if not tiling.extra_splits or not len(kv_lengths) or not kv_lengths.is_cuda:
        return None
    from phalanx.kernels.attention.split_kv import plan

    return plan(kv_lengths, table_rows, tiling, window=spec.window, block_size=spec.block_size)


def _decode_tiling(rows: int, heads: HeadLayout, workspace: SplitKvWorkspace, *, short: bool) -> DecodeTiling:
    return heads.tiling(max(rows, 1), workspace.num_sms, short=short, shared_memory=workspace.shared_memory)


def short_kv_limit(rows: int, heads: HeadLayout, num_sms: int, shared_memory: int = HOPPER_SHARED_MEMORY) -> int:
    """The KV length up to which `short` makes launches of so many rows faster, where no row is longer; 0 where it makes no
    difference. num_sms, shared_memory: see `SplitKvWorkspace`."""
    usual, fast = (heads.tiling(rows, num_sms, short=short, shared_memory=shared_memory) for short in (False, True))
    return SHORT_KV if fast != usual else 0


class LatentSpec(NamedTuple):
    """What layers with latent attention must have in common to share one plan of splits. heads: of the queries; width: elements of
    a cached token; itemsize: bytes of one."""

    heads: int
    width: int
    itemsize: int
    block_size: int

    @classmethod
    def of(cls, heads: int, cache: Tensor) -> LatentSpec:
        """cache [blocks, block_size, 1, width]."""
        return cls(heads, cache.shape[3], cache.element_size(), cache.shape[1])


def supports_latent(device: torch.device, dtype: torch.dtype, latent: Latent) -> bool:
    """Whether `latent_decode_attention` runs for queries of this dtype, over a cache in the same dtype or in e4m3."""
    fits = latent.kv_rank <= (512 if dtype != torch.float32 else 256) and latent.rope <= 64
    known = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return device.type == "cuda" and known and fits and latent.cached % 16 == 0 and has_triton()


def supports_warp_specialized_latent(device: torch.device, rows: int, spec: LatentSpec) -> bool:
    """Whether `latent_decode_attention`, which supports these layers, runs the warp-specialized kernel for so many rows: on Hopper,
    for many heads, over a cache in 16 bit of the widest latents that are supported, whose blocks TMA copies whole."""
    fits = spec.width == LATENT_RANK + LATENT_ROPE and spec.itemsize == 2 and spec.heads >= LATENT_BAND_LEAST
    copied = spec.block_size in (16, 32) or spec.block_size % LATENT_TILE == 0
    return fits and copied and rows <= ROW_CLASSES[-1] and sm_arch(device) == 90 and has_gluon()


def plan_latent_splits(
    kv_lengths: Tensor, table_rows: Tensor | None, spec: LatentSpec, workspace: SplitKvWorkspace
) -> Tensor | None:  # fmt: skip
    """As `plan_splits`, of `latent_decode_attention`."""
    tiling = _latent_tiling(kv_lengths.device, len(kv_lengths), spec, workspace)
    if not tiling.extra_splits or not len(kv_lengths) or not kv_lengths.is_cuda:
        return None
    from phalanx.kernels.attention.split_kv import plan

    return plan(kv_lengths, table_rows, tiling.split, window=None, block_size=spec.block_size)


def latent_decode_attention(
    query: Tensor, rotated: Tensor, cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, kv_lengths: Tensor, *,
    scale: float, workspace: SplitKvWorkspace, splits: Tensor | None = None, early_lengths: bool = False, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.latent_decode_attention`. The cache is contiguous, and the last dims of query and rotated. workspace, splits,
    early_lengths: as of `decode_attention`. Nothing is read by the host: the launch may be captured, and replayed with other
    lengths."""
    rows, spec = len(query), LatentSpec.of(query.shape[1], cache)
    arguments = query, rotated, cache, block_tables, table_rows, kv_lengths
    options: dict[str, Any] = {
        "scale": scale, "workspace": workspace, "splits": splits, "early_lengths": early_lengths,
        "tiling": _latent_tiling(query.device, rows, spec, workspace), "lse": lse,
    }  # fmt: skip
    if supports_warp_specialized_latent(query.device, rows, spec):
        from phalanx.kernels.attention.latent_decode_hopper import latent_decode_attention as warp_specialized

        return warp_specialized(*arguments, **options)
    from phalanx.kernels.attention.latent_decode import latent_decode_attention as kernel

    return kernel(*arguments, **options)


def index_rope_store(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, bias: Tensor, eps: float, cache: Tensor,
    scales: Tensor | None, slots: Tensor, *, interleaved: bool,
) -> None:  # fmt: skip
    """See `indexer.index_rope_store`."""
    arguments = query, key, cos, sin, weight, bias, eps, cache, scales, slots
    if query.is_cuda and has_triton():
        from phalanx.kernels.attention.index_rope_store import index_rope_store as kernel

        kernel(*arguments, interleaved=interleaved)
        return
    indexer.index_rope_store(*arguments, interleaved=interleaved)


def best_slots(
    query: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None, block_tables: Tensor, table_rows: Tensor, lengths: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """Writes into out [R, count] int32 the slots of the `count` best keys of each row, in the order of their tokens; of a row with
    fewer keys all of them, and the rest of its places stay as they are. On the host nothing is read: the launches may be captured,
    and replayed with other lengths.

    query [R, heads, dim], whose last dims are contiguous; weights [R, heads] fp32; keys [blocks, block_size, 1, dim] in query's
    dtype, or in e4m3 with scales [blocks, block_size, 1, 1] fp32; block_tables [N, W] int32, of which row r has table_rows[r];
    lengths [R] int32, which fit a table."""
    from phalanx.kernels.attention.index_choice import best_slots as kernels

    kernels(query, weights, keys, scales, block_tables, table_rows, lengths, out)


def merge_by_lse(received: Tensor, width: int) -> Tensor:
    """received [ranks, T, heads, width + n]: of the same heads, each rank's outputs [T, heads, width] over its part of the tokens,
    and behind each the log-sum-exp of the scores: an fp32 number, in n elements of the dtype. Returns the outputs over all tokens
    [T, heads, width]: summed in fp32, in rank order, and rounded once."""
    if received.is_cuda and has_triton() and width % 2 == 0:
        from phalanx.kernels.attention.lse_merge import merge_by_lse as kernel

        return kernel(received, width)
    weights = received[..., width:].contiguous().view(torch.float32).softmax(0)
    merged = received[0, ..., :width].float() * weights[0]
    for part, weight in zip(received[1:], weights[1:], strict=True):
        merged += part[..., :width].float() * weight
    return merged.to(received.dtype)


def _latent_tiling(device: torch.device, rows: int, spec: LatentSpec, workspace: SplitKvWorkspace) -> LatentTiling:
    rows, num_sms = max(rows, 1), workspace.num_sms
    if supports_warp_specialized_latent(device, rows, spec):
        return select_latent_bands(rows, spec.heads, num_sms)
    return select_latent_decode(rows, spec.heads, spec.width, spec.itemsize, num_sms, shared_memory=workspace.shared_memory)


def supports_prefill(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """As `supports`, of `prefill_attention`, which in fp32 fits the shared memory of every GPU up to a head_dim of 128."""
    return supports(device, dtype, head_dim) and (dtype != torch.float32 or head_dim <= 128)


def supports_warp_specialized_prefill(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """As `supports_prefill`, of a kernel that is as fast as FlashAttention-3 for long rows, without a window or sinks: on Hopper.
    The cache may be in the same dtype or in e4m3. block_size: tokens of its blocks, which TMA copies whole."""
    known = dtype in (torch.bfloat16, torch.float16) and head_dim in (64, 128)
    return known and block_size in (16, 32, 64, 128, 256) and sm_arch(device) == 90 and has_gluon()


def prefill_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, query_starts: Tensor,
    kv_lengths: Tensor, *, scale: float, window: int | None = None, kv_scales: tuple[float, float] | None = None,
    tiles: int | None = None, mean_length: int | None = None, early_lengths: bool = False, out: Tensor | None = None,
    sinks: Tensor | None = None, token_scales: Tensor | None = None, least_rows: int = 1, batch_invariant: bool = False,
    workspace: SplitKvWorkspace | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.prefill_attention`; written into `out` where one is given, else into memory that is not set: tokens of no row
    have no output. All tensors contiguous but block_tables, whose rows are. Nothing is read by the host: the launch may be
    captured, and replayed with other starts and lengths.

    tiles: exactly what `count_prefill_tiles` gives for these rows, or more; with fewer, the rows behind the last tile have no
    output. None: as many as so many rows of so many tokens may have, at worst; a program beyond the last tile returns at once.
    mean_length: the mean of kv_lengths, by which the faster of two kernels is chosen; None: unknown, as of a captured launch.
    early_lengths: as of `decode_attention`; query_starts are read then, too. least_rows: launches of up to so many rows are of one
    variant of the kernel. batch_invariant: a token's output does not depend on the other tokens of its row, or on other rows.
    workspace: of this stream, kept over calls: with one, programs may share the keys of a tile where tiles are few."""
    arguments = query, key_cache, value_cache, block_tables, table_rows, query_starts, kv_lengths
    options: dict[str, Any] = {
        "scale": scale, "kv_scales": kv_scales, "tiles": tiles, "early_lengths": early_lengths, "out": out, "workspace": workspace,
    }  # fmt: skip
    long = is_long_prefill(len(query), len(kv_lengths), mean_length)
    if long and not batch_invariant and window is None and sinks is None and _is_warp_specialized(query, key_cache):
        from phalanx.kernels.attention.prefill_hopper import prefill_attention as warp_specialized

        return warp_specialized(*arguments, **options)
    from phalanx.kernels.attention.prefill import prefill_attention as kernel

    tiling = select_prefill(query.shape[2], query.element_size())
    return kernel(
        *arguments, **options, window=window, tiling=tiling, sinks=sinks, token_scales=token_scales, least_rows=least_rows,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def _is_warp_specialized(query: Tensor, key_cache: Tensor) -> bool:
    fits = key_cache.dtype in (query.dtype, torch.float8_e4m3fn)
    return fits and supports_warp_specialized_prefill(query.device, query.dtype, query.shape[2], key_cache.shape[1])

# SPDX-License-Identifier: Apache-2.0
"""Paged attention with torch's scaled_dot_product_attention: on CPU, and on GPU where FlashInfer is missing.

Rows of like size are gathered from the cache into one padded batch, so that many decode rows cost one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.models.batch import Batch, KvCache, first_block

MASK_LIMITS = {"cpu": 1 << 24, "cuda": 1 << 22}
"""Elements of one mask, by device: a long prompt is attended in pieces, so that memory does not grow with its square. On GPU a
masked call may hold the scores of all heads, in fp32, beside the mask."""

_FEW_BLOCKS = 8  # Rows with up to this many blocks are padded to one another: fewer calls are worth more than the padding.


@dataclass(frozen=True)
class Piece:
    """`count` neighbouring queries of one row: tokens first_token.. of the batch, at positions first_position.. of the row, which
    see blocks first_block .. first_block + blocks of its block table."""

    row: int
    first_token: int
    first_position: int
    count: int
    first_block: int
    blocks: int


def pieces(starts: Sequence[int], lengths: Sequence[int], window: int | None, block_size: int, limit: int) -> list[Piece]:
    """Cut a batch's rows (Batch.query_starts_cpu, kv_lengths_cpu) so that a piece's queries times keys stays within `limit`.

    Only blocks that some query of the piece can see are named: entries behind the window may be stale.
    """
    found = []
    for row, length in enumerate(lengths):
        first_token, end = starts[row], starts[row + 1]
        most = max(1, limit // max(length, 1))
        while first_token < end:
            count = min(most, end - first_token)
            position = length - (end - first_token)
            begin = first_block(position, window, block_size)
            blocks = (position + count - 1) // block_size + 1 - begin
            found.append(Piece(row, first_token, position, count, begin, blocks))
            first_token += count
    return found


def bundles(cut: Sequence[Piece], block_size: int, limit: int) -> list[list[Piece]]:
    """Pieces whose padded sizes are alike, within a factor of two, together; each bundle's mask within `limit`."""
    alike: dict[tuple[int, int], list[Piece]] = {}
    for piece in cut:
        key = ((piece.count - 1).bit_length(), (max(piece.blocks, _FEW_BLOCKS) - 1).bit_length())
        alike.setdefault(key, []).append(piece)
    found = []
    for (queries, blocks), members in alike.items():
        most = max(1, limit // ((1 << queries) * (1 << blocks) * block_size))
        found += [members[at : at + most] for at in range(0, len(members), most)]
    return found


class Grown:
    """A buffer that grows and stays: on CPU, memory fresh from the system costs more than what is copied into it."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def take(self, rows: int, like: Tensor) -> Tensor:
        """[rows, like.shape[1]] in like's dtype, on its device; holds what the last taker left."""
        count = rows * like.shape[1]
        if self._held is None or self._held.numel() < count or self._held.dtype != like.dtype:
            with torch.inference_mode(False):  # so that it may be written in and outside of inference mode
                self._held = torch.empty(count, dtype=like.dtype, device=like.device)
        return self._held[:count].view(rows, -1)


class Scratch:
    """Where keys and values are gathered to, one layer after the other."""

    def __init__(self) -> None:
        self.key, self.value = Grown(), Grown()


class Bundle:
    """R pieces padded to Q queries and L keys: one call.

    tokens [R * Q] int64: query tokens, a piece's last repeated as padding. blocks [R * L / block_size] int64. mask [R, 1, Q, L].
    """

    def __init__(self, members: Sequence[Piece], batch: Batch, window: int | None, block_size: int) -> None:
        device = batch.block_tables.device
        facts = [(p.row, p.first_token, p.first_position, p.count, p.first_block, p.blocks) for p in members]
        table = torch.tensor(facts, dtype=torch.int64)
        if device.type == "cuda":
            table = table.pin_memory()
        row, token, position, count, first, blocks = table.to(device, non_blocking=True).unsqueeze(-1).unbind(1)
        self.rows, self.queries = len(members), max(p.count for p in members)
        wide = max(p.blocks for p in members)
        query = torch.minimum(torch.arange(self.queries, device=device), count - 1)
        self.tokens = (token + query).view(-1)
        # A padding column repeats the row's last block: it is sure to be the row's own, and its keys lie behind the queries.
        column = first + torch.minimum(torch.arange(wide, device=device), blocks - 1)
        held = row if batch.table_rows is None else batch.table_rows[row]
        self.blocks = batch.block_tables[held, column].long().view(-1)
        key = first * block_size + torch.arange(wide * block_size, device=device)
        query_at, key_at = (position + query).unsqueeze(-1), key.unsqueeze(-2)
        seen = key_at <= query_at
        if window is not None:
            seen &= key_at > query_at - window
        self.mask = seen.unsqueeze(1)

    def attend(self, query: Tensor, cache: KvCache, scale: float, scratch: Scratch) -> Tensor:
        """query [T, heads, head_dim] -> [R * Q, heads, head_dim]. A quantized cache is widened once gathered."""
        heads, head_dim = query.shape[1:]
        q = query[self.tokens].view(self.rows, self.queries, heads, head_dim).transpose(1, 2)
        k, v = self._gather(cache.key, scratch.key), self._gather(cache.value, scratch.value)
        if k.dtype != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, scale=scale, enable_gqa=heads != k.shape[1]
        )  # fmt: skip
        return out.transpose(1, 2).reshape(self.rows * self.queries, heads, head_dim)

    def _gather(self, cache: Tensor, grown: Grown) -> Tensor:
        """[num_blocks, block_size, kv_heads, head_dim] -> [R, kv_heads, L, head_dim]."""
        blocks = cache.view(cache.shape[0], -1)
        into = grown.take(self.blocks.shape[0], blocks)
        gathered = torch.index_select(blocks, 0, self.blocks, out=into)
        return gathered.view(self.rows, -1, *cache.shape[2:]).transpose(1, 2)


class SdpaPlan:
    """The bundles of a batch for each window that its layers ask for, made on first use; and how their outputs return to the
    order of the tokens."""

    def __init__(self, batch: Batch, scratch: Scratch) -> None:
        self._batch, self._scratch = batch, scratch
        self._made: dict[int | None, tuple[list[Bundle], Tensor]] = {}

    def forward(
        self, query: Tensor, cache: KvCache, *, window: int | None, scale: float,
        kv_scales: tuple[float, float] | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As AttentionPlan."""
        key_scale, value_scale = kv_scales or (1.0, 1.0)
        if window not in self._made:
            self._made[window] = self._make(window, cache.key.shape[1])
        made, order = self._made[window]
        outs = [bundle.attend(query, cache, scale * key_scale, self._scratch) for bundle in made]
        found = (outs[0] if len(outs) == 1 else torch.cat(outs)).index_select(0, order)
        if value_scale != 1.0:
            found = found * value_scale
        return found if out is None else out.copy_(found)

    def _make(self, window: int | None, block_size: int) -> tuple[list[Bundle], Tensor]:
        batch, limit = self._batch, MASK_LIMITS[self._batch.block_tables.device.type]
        cut = pieces(batch.query_starts_cpu, batch.kv_lengths_cpu, window, block_size, limit)
        together = bundles(cut, block_size, limit)
        made, order, at = [], [0] * batch.token_ids.shape[0], 0
        for members in together:
            bundle = Bundle(members, batch, window, block_size)
            for index, piece in enumerate(members):
                begin = at + index * bundle.queries
                order[piece.first_token : piece.first_token + piece.count] = range(begin, begin + piece.count)
            at += bundle.rows * bundle.queries
            made.append(bundle)
        host = torch.tensor(order, dtype=torch.int64)
        device = batch.block_tables.device
        return made, host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class SdpaBackend:
    """torch's scaled_dot_product_attention over gathered blocks."""

    name = "sdpa"
    captures = captures_prompts = False  # the shapes of its calls follow the lengths

    def __init__(self) -> None:
        self._scratch = Scratch()

    def plan(self, batch: Batch) -> SdpaPlan:
        return SdpaPlan(batch, self._scratch)

    def short_up_to(self, rows: int) -> int:
        return 0

# SPDX-License-Identifier: Apache-2.0
"""Paged attention with torch's scaled_dot_product_attention: on CPU, and on GPU where FlashInfer is missing.

Rows of similar size are gathered from the cache into one padded batch, so that many decode rows cost one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.layout.attention_calls import size_class
from phalanx.models.batch import Batch, first_block
from phalanx.models.cache import LayerCache

MASK_LIMITS = {"cpu": 1 << 24, "cuda": 1 << 22}
"""Elements of one mask, by device: a long prompt is attended in chunks of queries, so that memory does not grow with its square. On
GPU a masked call may hold the scores of all heads, in fp32, beside the mask."""


@dataclass(frozen=True)
class QueryChunk:
    """`count` neighbouring queries of one row: tokens first_token.. of the batch, at positions first_position.. of the row, which
    see blocks first_block .. first_block + blocks of its block table."""

    row: int
    first_token: int
    first_position: int
    count: int
    first_block: int
    blocks: int


def query_chunks(
    starts: Sequence[int], lengths: Sequence[int], window: int | None, block_size: int, limit: int, chunk: int | None = None
) -> list[QueryChunk]:
    """Split a batch's rows (Batch.query_starts_cpu, kv_lengths_cpu) so that queries times keys of a chunk stay within `limit`.

    A chunk has only the blocks that some of its queries can see: table entries behind the window may be stale. chunk: see
    `AttentionPlan`; the queries of one are in one run.
    """
    chunks = []
    for row, length in enumerate(lengths):
        first_token, end = starts[row], starts[row + 1]
        most = max(1, limit // max(length, 1))
        while first_token < end:
            count = min(most, end - first_token)
            position = length - (end - first_token)
            begin = first_block(position, window, block_size)
            if chunk is not None:
                count = min(count, chunk - position % chunk)
                begin = position // chunk * chunk // block_size
            blocks = (position + count - 1) // block_size + 1 - begin
            chunks.append(QueryChunk(row, first_token, position, count, begin, blocks))
            first_token += count
    return chunks


def bundles(chunks: Sequence[QueryChunk], block_size: int, limit: int) -> list[list[QueryChunk]]:
    """Chunks of similar padded sizes (within a factor of two) together; each bundle's mask within `limit`."""
    by_size: dict[tuple[int, int], list[QueryChunk]] = {}
    for chunk in chunks:
        by_size.setdefault(size_class(chunk.count, chunk.blocks), []).append(chunk)
    bundled = []
    for (queries, blocks), members in by_size.items():
        most = max(1, limit // ((1 << queries) * (1 << blocks) * block_size))
        bundled += [members[at : at + most] for at in range(0, len(members), most)]
    return bundled


class GrowingBuffer:
    """A buffer that grows and stays: on CPU, memory fresh from the system costs more than what is copied into it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, rows: int, like: Tensor) -> Tensor:
        """[rows, like.shape[1]] in like's dtype, on its device; its values are undefined."""
        count = rows * like.shape[1]
        if self._buffer is None or self._buffer.numel() < count or self._buffer.dtype != like.dtype:
            with torch.inference_mode(False):  # so that it may be written in and outside inference mode
                self._buffer = torch.empty(count, dtype=like.dtype, device=like.device)
        return self._buffer[:count].view(rows, -1)


class Scratch:
    """The buffers into which keys and values are gathered, one layer after the other."""

    def __init__(self) -> None:
        self.key, self.value = GrowingBuffer(), GrowingBuffer()


class Bundle:
    """R chunks padded to Q queries and L keys: one call.

    tokens [R * Q] int64: query tokens, a chunk's last repeated as padding. slots [R * L] int64: of the keys, block * block_size +
    offset, a chunk's last repeated as padding: what is behind it may be NaN of another request, which no mask removes. mask
    [R, 1, Q, L].
    """

    def __init__(
        self, members: Sequence[QueryChunk], batch: Batch, window: int | None, block_size: int, tables: Tensor,
        chunk: int | None = None,
    ) -> None:  # fmt: skip
        device = tables.device
        table = torch.tensor([(c.row, c.first_token, c.first_position, c.count, c.first_block) for c in members], dtype=torch.int64)
        if device.type == "cuda":
            table = table.pin_memory()
        row, token, position, count, first = table.to(device, non_blocking=True).unsqueeze(-1).unbind(1)
        self.rows, self.queries = len(members), max(c.count for c in members)
        keys = torch.arange(max(c.first_position + c.count - c.first_block * block_size for c in members), device=device)
        query = torch.minimum(torch.arange(self.queries, device=device), count - 1)
        self.tokens = (token + query).view(-1)
        table_row = row if batch.table_rows is None else batch.table_rows[row]
        begin = first * block_size
        own = torch.minimum(keys, position + count - 1 - begin)
        blocks = tables[table_row, first + own // block_size].long()
        self.slots = (blocks * block_size + own % block_size).view(-1)
        key = begin + keys
        query_at, key_at = (position + query).unsqueeze(-1), key.unsqueeze(-2)
        mask = key_at <= query_at
        if window is not None:
            mask &= key_at > query_at - window
        if chunk is not None:
            mask &= key_at // chunk == query_at // chunk
        self.mask = mask.unsqueeze(1)

    def attend(
        self, query: Tensor, cache: LayerCache, scale: float, scratch: Scratch, sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """query [T, heads, head_dim] -> [R * Q, heads, head_dim]. A quantized cache is converted after the gather."""
        heads, head_dim = query.shape[1:]
        q = query.index_select(0, self.tokens).view(self.rows, self.queries, heads, head_dim).transpose(1, 2)
        k, v = self.gather(cache.key, scratch.key), self.gather(cache.value, scratch.value)
        if cache.token_scales is not None:
            scales = self.gather_scales(cache.token_scales)
            k, v = k * scales[..., :1], v * scales[..., 1:]
        if k.dtype != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        mask = self.mask
        if sinks is not None:
            q, k, v, mask = _with_sinks(q, k, v, mask, sinks / scale)
        if cap is not None:
            out = _capped_attention(q, k, v, mask, scale, cap)[..., :head_dim]
        elif self.queries == 1:  # the query heads of a key head are as its queries: nothing is repeated for them
            q, mask = q.reshape(self.rows, k.shape[1], -1, q.shape[-1]), mask.expand(-1, -1, heads // k.shape[1], -1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)  # on a GPU not contiguous
            out = out.reshape(self.rows, heads, 1, -1)[..., :head_dim]
        else:
            gqa = heads != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)[..., :head_dim]
        return out.transpose(1, 2).reshape(self.rows * self.queries, heads, head_dim)

    def gather(self, cache: Tensor, buffer: GrowingBuffer) -> Tensor:
        """[num_blocks, block_size, kv_heads, head_dim] -> [R, kv_heads, L, head_dim]."""
        stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache  # which torch gathers on every device
        slots = stored.view(cache.shape[0] * cache.shape[1], -1)
        gathered = torch.index_select(slots, 0, self.slots, out=buffer.take(self.slots.shape[0], slots)).view(cache.dtype)
        return gathered.view(self.rows, -1, *cache.shape[2:]).transpose(1, 2)

    def gather_scales(self, token_scales: Tensor) -> Tensor:
        """[num_blocks, kv_heads, block_size, 2] bf16 -> [R, kv_heads, L, 2] fp32."""
        block_size = token_scales.shape[2]
        gathered = token_scales[self.slots // block_size, :, self.slots % block_size]
        return gathered.view(self.rows, -1, *gathered.shape[1:]).transpose(1, 2).float()


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """Attention with a soft cap of its scores, which torch's does not have. Dims as of `_with_sinks`."""
    grouped = q.view(q.shape[0], k.shape[1], -1, *q.shape[2:])
    scores = torch.einsum("rkgqd,rkld->rkgql", grouped, k).float() * scale
    weights = ((scores / cap).tanh() * cap).masked_fill(~mask.unsqueeze(1), float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("rkgql,rkld->rkgqd", weights, v).flatten(1, 2)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One more key, which all queries see, and one more dim: the key is 1 there and 0 elsewhere, and a head's query is its sink
    there. The key's value is 0. q [R, heads, Q, D], k and v [R, kv_heads, L, D], mask [R, 1, Q, L]; sinks [heads]."""
    extra = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:-1], 1)
    k, v = F.pad(k, (0, 1, 0, 1)), F.pad(v, (0, 1, 0, 1))
    k[:, :, -1, -1] = 1.0
    return torch.cat((q, extra), dim=-1), k, v, F.pad(mask, (0, 1), value=True)


def bundled(
    batch: Batch, window: int | None, block_size: int, group: int, chunk: int | None = None
) -> tuple[list[Bundle], Tensor]:  # fmt: skip
    """The bundles of a batch for the layers of a group; and for each of its tokens the row of the bundles' outputs, one behind the
    other, that is its own."""
    tables = batch.of_group(group).block_tables
    device = tables.device
    limit = MASK_LIMITS[device.type]
    chunks = query_chunks(batch.query_starts_cpu, batch.kv_lengths_cpu, window, block_size, limit, chunk)
    all_bundles, order, at = [], [0] * batch.token_ids.shape[0], 0
    for members in bundles(chunks, block_size, limit):
        bundle = Bundle(members, batch, window, block_size, tables, chunk)
        for index, member in enumerate(members):
            begin = at + index * bundle.queries
            order[member.first_token : member.first_token + member.count] = range(begin, begin + member.count)
        at += bundle.rows * bundle.queries
        all_bundles.append(bundle)
    host = torch.tensor(order, dtype=torch.int64)
    return all_bundles, host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class BundledPlan:
    """The bundles of a batch for each group and window of its layers, made on first use; and the order in which their outputs are
    the tokens'."""

    def __init__(self, batch: Batch, scratch: Scratch) -> None:
        self._batch, self._scratch = batch, scratch
        self._bundles: dict[tuple[int, int | None, int | None], tuple[list[Bundle], Tensor]] = {}

    def attended(
        self, group: int, window: int | None, block_size: int, attend: Callable[[Bundle], Tensor], chunk: int | None = None
    ) -> Tensor:  # fmt: skip
        """attend: a bundle -> the outputs of its rows [R * Q, heads, dim]. Returns those of the tokens [T, heads, dim]."""
        key = group, window, chunk
        if key not in self._bundles:
            self._bundles[key] = bundled(self._batch, window, block_size, group, chunk)
        bundles, order = self._bundles[key]
        outs = [attend(bundle) for bundle in bundles]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).index_select(0, order)


class SdpaPlan(BundledPlan):
    """As AttentionPlan."""

    def forward(
        self, query: Tensor, cache: LayerCache, *, window: int | None, scale: float,
        kv_scales: tuple[float, float] | None = None, out: Tensor | None = None, sinks: Tensor | None = None,
        cap: float | None = None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        """As AttentionPlan."""
        key_scale, value_scale = kv_scales or (1.0, 1.0)
        output = self.attended(
            cache.group, window, cache.key.shape[1],
            lambda bundle: bundle.attend(query, cache, scale * key_scale, self._scratch, sinks, cap), chunk,
        )  # fmt: skip
        if value_scale != 1.0:
            output = output * value_scale
        return output if out is None else out.copy_(output)


class SdpaBackend:
    """torch's scaled_dot_product_attention over gathered blocks."""

    name = "sdpa"
    graphs = None  # the shapes of its calls depend on the lengths

    def __init__(self) -> None:
        self._scratch = Scratch()

    def plan(self, batch: Batch) -> SdpaPlan:
        return SdpaPlan(batch, self._scratch)

# SPDX-License-Identifier: Apache-2.0
"""Latent attention (arXiv 2405.04434, section 2.1) with torch's scaled_dot_product_attention over the paged latents.

Decode rows are absorbed: a head's up-projection of keys is multiplied to its query, and that of values to its output, so that all
heads attend to the latents themselves. For rows of many queries it is cheaper to expand the latents into keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.attention.heuristics import LOWEST_SCORE
from phalanx.kernels.attention.indexer import IndexQuery
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention.context_parallel import ContextParallel
from phalanx.models.layers.attention.sdpa import Bundle, BundledPlan, Scratch

EXPANDED_BYTES = 256 << 20
"""Of a bundle's expanded keys and values, and of its scores where a call may hold them. They are made for a few heads at a time, so
that memory does not grow with a context times all heads; those of one head may take more."""


def absorbed_query(query: Tensor, up: Tensor, nope: int) -> Tensor:
    """The parts of queries [T, heads, nope + rope] without positions times up [heads, nope + v, rank] -> [T, heads, rank]."""
    return torch.bmm(query[..., :nope].transpose(0, 1), up[:, :nope]).transpose(0, 1)


def absorbed_output(mixed: Tensor, up: Tensor, nope: int, out: Tensor | None = None) -> Tensor:
    """Mixed latents [T, heads, rank] -> mixed values [T, heads, v], in `out` where one is given."""
    into = None if out is None else out.transpose(0, 1)  # whose rows are apart, as a GEMM may leave them
    return torch.bmm(mixed.transpose(0, 1), up[:, nope:].transpose(1, 2), out=into).transpose(0, 1)


def attend_absorbed(bundle: Bundle, query: Tensor, cache: LayerCache, up: Tensor, scale: float, scratch: Scratch) -> Tensor:
    """A bundle whose rows have one query each: query [T, heads, nope + rope] -> [R, heads, v]."""
    rank, cached = up.shape[2], cache["latent"].shape[3]
    nope = query.shape[2] - (cached - rank)
    own = query.index_select(0, bundle.tokens)
    latents = bundle.gather(cache["latent"], scratch.key).to(query.dtype)
    # Heads are queries of one head, whose keys and values are the latents.
    queries = torch.cat((absorbed_query(own, up, nope), own[..., nope:]), dim=-1).unsqueeze(1)
    mixed = F.scaled_dot_product_attention(queries, latents, latents[..., :rank], attn_mask=bundle.mask, scale=scale)
    return absorbed_output(mixed.squeeze(1), up, nope)


def attend_divided(bundle: Bundle, query: Tensor, cache: LayerCache, up: Tensor, scale: float, context: ContextParallel) -> Tensor:
    """As `attend_absorbed`, where this rank has a part of the tokens: it attends to them for the heads of all ranks."""
    rank, stored = up.shape[2], slots_of(cache["latent"])
    nope = query.shape[2] - (stored.shape[1] - rank)
    own = query.index_select(0, bundle.tokens)
    queries = context.all_heads(torch.cat((absorbed_query(own, up, nope), own[..., nope:]), dim=-1))
    hidden = ~context.own(bundle.mask[:, 0, 0])
    slots = context.own(bundle.slots.view(bundle.rows, -1)) // context.size
    latents = stored.index_select(0, slots.reshape(-1)).view(cache["latent"].dtype).to(query.dtype).view(*slots.shape, -1)
    latents = latents.masked_fill(hidden.unsqueeze(-1), 0)  # what another request left there may be NaN
    scores = (torch.bmm(queries, latents.transpose(1, 2)).float() * scale).masked_fill(hidden.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1).clamp(min=LOWEST_SCORE)
    weights = torch.exp(scores - lse.unsqueeze(-1)).to(query.dtype)
    return absorbed_output(context.merge(torch.bmm(weights, latents[..., :rank]), lse), up, nope)


def slots_of(cache: Tensor) -> Tensor:
    """[blocks, block_size, 1, width] -> [slots, width], as bytes where it is in e4m3: torch gathers these on every device."""
    stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    return stored.view(-1, cache.shape[3])


def attend_expanded(
    bundle: Bundle, query: Tensor, cache: LayerCache, up: Tensor, scale: float, scratch: Scratch, context: ContextParallel | None
) -> Tensor:  # fmt: skip
    """query [T, heads, nope + rope] -> [R * Q, heads, v]."""
    heads, rows, rank = query.shape[1], up.shape[1], up.shape[2]
    nope = query.shape[2] - (cache["latent"].shape[3] - rank)
    queries = query[bundle.tokens].view(bundle.rows, bundle.queries, heads, -1).transpose(1, 2)
    if context is None:
        latents = bundle.gather(cache["latent"], scratch.key).to(query.dtype)
    else:
        gathered = context.gather(slots_of(cache["latent"]), bundle.slots.view(bundle.rows, -1))
        latents = gathered.view(cache["latent"].dtype).to(query.dtype).unsqueeze(1)
    keys = latents.shape[2]
    scores = 4 * bundle.queries if query.is_cuda else 0  # of a key, which a masked call may hold in fp32
    one_head = bundle.rows * keys * ((query.shape[2] + rows - nope) * query.element_size() + scores)
    step = max(1, EXPANDED_BYTES // one_head)
    outs = []
    for first in range(0, heads, step):
        some = slice(first, min(first + step, heads))
        weight = up[some].flatten(0, 1)
        expanded = F.linear(latents[:, 0, :, :rank], weight).view(bundle.rows, keys, -1, rows).transpose(1, 2)
        rotated = latents[..., rank:].expand(-1, expanded.shape[1], -1, -1)
        key = torch.cat((expanded[..., :nope], rotated), dim=-1)
        outs.append(F.scaled_dot_product_attention(queries[:, some], key, expanded[..., nope:], attn_mask=bundle.mask, scale=scale))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    return out.transpose(1, 2).reshape(bundle.rows * bundle.queries, heads, -1)


class LatentPlan(BundledPlan):
    """As LatentAttentionPlan. context: where the cache's tokens are divided over ranks."""

    def __init__(self, batch: Batch, scratch: Scratch, context: ContextParallel | None = None) -> None:
        super().__init__(batch, scratch)
        self._context = context
        self.kv_slots = batch.kv_slots if context is None else context.kv_slots(batch.kv_slots)

    def forward(
        self, query: Tensor, cache: LayerCache, *, up: Tensor, scale: float, index: IndexQuery | None = None
    ) -> Tensor:  # fmt: skip
        """As LatentAttentionPlan, of all keys."""
        assert index is None, "see `sparse_latent`"
        context, block_size = self._context, cache["latent"].shape[1]

        def attend(bundle: Bundle) -> Tensor:
            if bundle.queries > 1:
                return attend_expanded(bundle, query, cache, up, scale, self._scratch, context)
            if context is None:
                return attend_absorbed(bundle, query, cache, up, scale, self._scratch)
            return attend_divided(bundle, query, cache, up, scale, context)

        return self.attended(cache.group, None, block_size if context is None else block_size * context.size, attend)


class SdpaLatentBackend:
    """torch's scaled_dot_product_attention over gathered latents."""

    name = "latent sdpa"
    graphs = None  # the shapes of its calls depend on the lengths

    def __init__(self, context: ContextParallel | None = None) -> None:
        self._scratch, self._context = Scratch(), context

    def plan(self, batch: Batch) -> LatentPlan:
        return LatentPlan(batch, self._scratch, self._context)

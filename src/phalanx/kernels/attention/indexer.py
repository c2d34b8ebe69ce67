# SPDX-License-Identifier: Apache-2.0
"""What chooses the keys of sparse attention (DeepSeek-V3.2, arXiv 2512.02556), in plain torch: keys in a cache, their scores, and
the best of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.reference import quantize_fp8, rope, write_slots

SCORES_BYTES = 256 << 20
"""Of scores by head, fp32, at a time: a few heads' at least one."""


class IndexQuery(NamedTuple):
    """What a batch asks with. query [T, heads, head_dim]; weights [T, heads] fp32: of each head's score, its scale included."""

    query: Tensor
    weights: Tensor


def store_index_keys(key: Tensor, cache: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    """key [T, 1, head_dim]; cache [blocks, block_size, 1, head_dim] in key's dtype, or in e4m3, with scales [blocks, block_size, 1,
    1] fp32, by which a token's values are multiplied when read. slots: as of `reference.write_kv`."""
    if scales is None:
        write_slots(key, cache, slots)
        return
    values, scale = quantize_fp8(key.squeeze(1))
    write_slots(values.unsqueeze(1).view(torch.uint8), cache.view(torch.uint8), slots)  # which torch writes on every device
    write_slots(scale.unsqueeze(1), scales, slots)


def index_rope_store(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, bias: Tensor, eps: float, cache: Tensor,
    scales: Tensor | None, slots: Tensor, *, interleaved: bool,
) -> None:  # fmt: skip
    """Between an indexer's projections and its scores: norm, rotate and store each token's key, and rotate its queries in place.

    query [T, heads, head_dim]; key [T, head_dim]; cos, sin [T, rope / 2] fp32: the first `rope` elements are rotated; weight, bias
    [head_dim] and eps of the keys' layer norm; cache, scales, slots: as of `store_index_keys`. interleaved: as of
    `reference.latent_rope_store`."""
    width = 2 * cos.shape[1]

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.cat((x[..., :width:2], x[..., 1:width:2]), dim=-1) if interleaved else x[..., :width]
        return torch.cat((rope(pairs, cos, sin), x[..., width:]), dim=-1)

    query.copy_(rotated(query))
    normed = torch.nn.functional.layer_norm(key, key.shape[-1:], weight, bias, eps)
    store_index_keys(rotated(normed.unsqueeze(1)), cache, scales, slots)


def read_index_keys(cache: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
    """cache, scales: as of `store_index_keys`; slots [N] -> [N, head_dim] fp32."""
    stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache  # which torch gathers on every device
    keys = stored.view(-1, cache.shape[3]).index_select(0, slots).view(cache.dtype).float()
    return keys if scales is None else keys.mul_(scales.view(-1, 1).index_select(0, slots))


def index_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """query [R, Q, heads, head_dim], weights [R, Q, heads] fp32, keys [R, L, head_dim] fp32 -> [R, Q, L] fp32: the sum over heads
    of weight * relu(query . key)."""
    rows, queries, heads, _ = query.shape
    total = keys.new_zeros(rows, queries, keys.shape[1])
    step = max(1, SCORES_BYTES // max(4 * total.numel(), 1))
    for first in range(0, heads, step):
        some = slice(first, first + step)
        scores = torch.einsum("rqhd,rld->rqhl", query[:, :, some].float(), keys).relu_()
        total += torch.einsum("rqhl,rqh->rql", scores, weights[:, :, some])
    return total


def best_keys(scores: Tensor, count: int) -> Tensor:
    """scores [..., L] fp32 -> the `count` positions with the highest, in ascending order, [..., count] int64. Of equal scores those
    of earlier tokens are taken: the choice does not depend on how prompts are divided into steps."""
    bits = (scores + 0.0).view(torch.int32)  # without a negative zero
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    last = scores.shape[-1] - 1
    ordered += torch.arange(last, -1, -1, device=scores.device)
    return last - (ordered.topk(count, dim=-1, sorted=False).values & 0xFFFFFFFF).sort(dim=-1, descending=True).values

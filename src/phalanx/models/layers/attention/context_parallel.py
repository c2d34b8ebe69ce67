# SPDX-License-Identifier: Apache-2.0
"""Decode context parallel: the tokens of a cache of latents, divided over ranks of the tensor-parallel group.

Of a request's tokens, position p is on rank p mod size of the group. A block has a multiple of `size` tokens, so that a slot
(block * block_size + offset) says the same: it is on rank slot mod size, in that rank's slot slot // size. Block ids, block tables
and slots of a `Batch` are those of whole blocks, the same on every rank.

    decodes   queries of all heads of the group -> attention of each rank over its tokens -> outputs, merged by log-sum-exp
    prompts   latents of all tokens on each rank, for as long as a layer takes -> attention of its own heads, as without
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.kernels.attention import dispatch as kernels

GATHERED_BYTES = 32 << 20
"""Of latents that one message gathers, beside what they are copied into: rows go in several messages, and a longer row in one."""


class ContextParallel:
    """The ranks over which tokens are divided. `all_heads`, `merge`, `gather` and `joined` are collective."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.size, self.rank = group.size, group.rank

    def kv_slots(self, slots: Tensor) -> Tensor:
        """slots [T], as of `Batch` -> where this rank has these tokens in its cache, -1 where it does not."""
        return torch.where((slots >= 0) & (slots % self.size == self.rank), slots // self.size, -1)

    def kv_lengths(self, lengths: Tensor) -> Tensor:
        """lengths [R], of rows -> how many of their first tokens are on this rank."""
        return (lengths + (self.size - 1 - self.rank)) // self.size

    def all_heads(self, query: Tensor) -> Tensor:
        """query [T, heads, width] of this rank's heads -> [T, size * heads, width], of all ranks."""
        return self._group.all_gather(query, dim=1)

    def merge(self, out: Tensor, lse: Tensor) -> Tensor:
        """Outputs [T, size * heads, width] of all heads over this rank's tokens, with the log-sum-exp of their scores
        [T, size * heads] fp32 -> those of this rank's heads over all tokens [T, heads, width]. They are summed in rank order, in
        fp32."""
        tokens, heads, width = out.shape
        own = heads // self.size
        parts = out.view(tokens, self.size, own, width)
        logs = lse.view(tokens, self.size, own, 1).view(out.dtype)  # so that both go in one message
        sent = torch.cat((parts, logs), dim=-1).transpose(0, 1)
        return kernels.merge_by_lse(self._group.all_to_all(sent), width)

    def own(self, values: Tensor) -> Tensor:
        """values [R, L], of the tokens at positions 0 .. L-1 -> those of the positions that this rank has, and perhaps a 0 or False
        behind them: as many on every rank."""
        return F.pad(values, (0, -values.shape[1] % self.size)).view(len(values), -1, self.size)[..., self.rank]

    def gather(self, stored: Tensor, slots: Tensor) -> Tensor:
        """Cached tokens of rows [R, L, width]. stored [slots of this rank, width]. slots [R, L]: as of `Batch`, of the tokens at
        positions 0 .. L-1 of each row. Where a row has no such token, any token's slot: the result is that token, or 0."""
        rows, length = slots.shape
        own = self.own(slots)
        local = stored.index_select(0, (own // self.size).view(-1)).view(rows, -1, stored.shape[1])
        return self.joined(local.masked_fill_((own % self.size != self.rank).unsqueeze(-1), 0))[:, :length]

    def joined(self, local: Tensor) -> Tensor:
        """local [N, L, width]: this rank's part of N runs of L * size tokens -> [N, L * size, width], all of their tokens."""
        count, length, width = local.shape
        out = local.new_empty(count, length, self.size, width)
        step = max(GATHERED_BYTES // max(out[:1].nbytes, 1), 1)
        for first in range(0, count, step):
            parts = self._group.all_gather(local[first : first + step].unsqueeze(0), dim=0)
            out[first : first + step] = parts.permute(1, 2, 0, 3)
        return out.view(count, length * self.size, width)

# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup (n-gram speculation): the last tokens of a request are looked for earlier in it, and what followed them is
proposed. In plain torch; `lookup_kernels` has the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.speculation.drafts import NO_DRAFT


def append_tokens(history: Tensor, slots: Tensor, lengths: Tensor, sampled: Tensor) -> None:
    """Write the tokens of rows [S] behind those that their slots have.

    history [slots, L] int32: the tokens of each slot. lengths [S] int64: the position of each row's last token; sampled [S, k + 2]:
    its new tokens, then -1, as `accept_drafts` has them. What lies beyond L is dropped.
    """
    if history.is_cuda and has_triton():
        from phalanx.kernels.speculation import lookup_kernels

        lookup_kernels.append_tokens(history, slots, lengths, sampled)
        return
    tokens = sampled[:, :-1]
    counts = (tokens >= 0).sum(1, keepdim=True)
    at = lengths.unsqueeze(1) + 1 - counts + torch.arange(tokens.shape[1], device=tokens.device)
    keep = (tokens >= 0) & (at < history.shape[1])
    rows = slots.unsqueeze(1).expand_as(at)
    history[rows[keep], at[keep]] = tokens[keep].to(history.dtype)


def look_up(history: Tensor, slots: Tensor, lengths: Tensor, least: int, most: int, count: int) -> Tensor:
    """Drafts [S, count] int64 of what follows the tokens of these slots, NO_DRAFT in each place of a row without a match.

    A match is an earlier place whose last tokens equal the row's last ones: `most` of them or as many as possible, but no fewer
    than `least`; of those with equally many the last one. Its following tokens are the drafts. Where they reach the row's end they
    go on with the drafts themselves, so a text that repeats goes on repeating.
    """
    if history.is_cuda and has_triton():
        from phalanx.kernels.speculation import lookup_kernels

        return lookup_kernels.look_up(history, slots, lengths, least, most, count)
    ends = lengths.clamp(max=history.shape[1] - 1).unsqueeze(1)
    tokens = history[slots, : int(ends.max()) + 1]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    equal = torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device)
    run = place < ends
    for back in range(most):
        last = tokens.gather(1, (ends - back).clamp(min=0))
        run = run & (place >= back) & (ends >= back) & (tokens.roll(back, 1) == last)
        equal += run
    keys = torch.where(equal >= least, (equal << 32) + place, -1)
    best = keys.amax(1, keepdim=True)
    match = best & 0xFFFFFFFF
    period = (ends - match).clamp(min=1)
    following = match + 1 + torch.arange(count, device=tokens.device) % period
    drafts = tokens.gather(1, following.clamp(max=tokens.shape[1] - 1)).long()
    return torch.where(best >= 0, drafts, NO_DRAFT)

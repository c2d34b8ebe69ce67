# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup (n-gram speculation): the last tokens of a request are looked for earlier in it, and in the output that was
predicted for it; what followed them is proposed. In plain torch; `lookup_kernels` has the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.speculation.drafts import NO_DRAFT

PLACE = 2**31 - 1
"""The bits of a match's key that are its column. Above them is one for a match in a prediction, then how many tokens are equal."""


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


def look_up(
    history: Tensor, slots: Tensor, lengths: Tensor, begins: Tensor, text: int, *, least: int, most: int, count: int
) -> Tensor:
    """Drafts [S, count] int64 of what follows the tokens of these slots, NO_DRAFT where there is none.

    history [slots, text + L] int32: the tokens of a slot are in the columns from `text` on; its prediction, if it has one, in those
    from begins [slots] int64 up to `text`. lengths [S] int64: the position of each row's last token.

    A match is an earlier place whose last tokens equal the row's last ones: `most` of them or as many as possible, but no fewer
    than `least`; all of them of the text, or all of the prediction. Of those with equally many it is the last one in the
    prediction, else the last one in the text. Its following tokens are the drafts. At the end of the prediction they end. Where
    they reach the row's end they go on with the drafts themselves, so a text that repeats goes on repeating.
    """
    if history.is_cuda and has_triton():
        from phalanx.kernels.speculation import lookup_kernels

        return lookup_kernels.look_up(history, slots, lengths, begins, text, least, most, count)
    ends = (lengths + text).clamp(max=history.shape[1] - 1).unsqueeze(1)
    tokens = history[slots, : int(ends.max()) + 1]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    predicted = place < text
    first = torch.where(predicted, begins[slots].unsqueeze(1), text)
    equal = torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device)
    run = place < ends
    for back in range(most):
        last = tokens.gather(1, (ends - back).clamp(min=0))
        run = run & (place - back >= first) & (ends - back >= text) & (tokens.roll(back, 1) == last)
        equal += run
    keys = torch.where(equal >= least, (equal << 32) + (predicted.long() << 31) + place, -1)
    best = keys.amax(1, keepdim=True)
    match = best & PLACE
    period = torch.where(match < text, count, (ends - match).clamp(min=1))
    following = match + 1 + torch.arange(count, device=tokens.device) % period
    drafts = tokens.gather(1, following.clamp(max=tokens.shape[1] - 1)).long()
    return torch.where((best >= 0) & ((match >= text) | (following < text)), drafts, NO_DRAFT)

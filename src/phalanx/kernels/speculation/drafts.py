# SPDX-License-Identifier: Apache-2.0
"""The ops of rows that verify drafts, with their definitions in plain torch: on the device, so that a step can follow before the
host knows how many drafts were accepted.

The state of the slots is one tensor [2 + K, slots] int64, so that one copy or message has all of it: `LAST`, the last token;
`LENGTH`, its position, at which the next row starts; from `DRAFTS` on K drafts of what follows, NO_DRAFT where there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.capabilities import has_triton

LAST, LENGTH, DRAFTS = 0, 1, 2
"""Rows of the state of the slots."""
NO_DRAFT = -1
IN_SLOT = -2
"""In the place of an id, or of a start, that the slot has."""


def expand_drafts(
    state: Tensor, tables: Tensor, block_size: int, slots: Tensor, starts: Tensor, capacities: Tensor, ids: Tensor, *,
    token_ids: Tensor, positions: Tensor, kv_slots: Tensor, kv_lengths: Tensor, drafts: Tensor,
) -> None:  # fmt: skip
    """Write the forward's input of R rows that verify k drafts each, from what the host knows of them and their slots' state.

    tables [slots, W] int32: the block tables. slots [R]; starts [R]: the position of the last token, or IN_SLOT, which is replaced;
    capacities [R]: positions that have blocks; ids [R, k + 1]: the last token and the drafts, or IN_SLOT. All int64.

    Of the outputs, the first R * (k + 1) elements are written: token_ids, positions, kv_slots (-1: nothing is stored) int64 and
    kv_lengths int32; drafts [R, k] int64 are those that are verified: what has no block, or no draft, is NO_DRAFT.
    """
    if _kernel_takes(state):
        from phalanx.kernels.speculation import draft_kernels

        draft_kernels.expand_drafts(
            state, tables, block_size, slots, starts, capacities, ids, token_ids=token_ids, positions=positions, kv_slots=kv_slots,
            kv_lengths=kv_lengths, drafts=drafts,
        )  # fmt: skip
        return
    width = ids.shape[1]
    count = ids.numel()
    starts.copy_(torch.where(starts == IN_SLOT, state[LENGTH, slots], starts))
    own = torch.cat([state[LAST : LAST + 1, slots], state[DRAFTS : DRAFTS + width - 1, slots]]).T
    at = starts.unsqueeze(1) + torch.arange(width, device=starts.device)
    ids = torch.where(ids == IN_SLOT, own, ids)
    stored = (at < capacities.unsqueeze(1)) & (ids >= 0)
    drafts.copy_(torch.where(stored, ids, NO_DRAFT)[:, 1:])
    inside = torch.minimum(at, capacities.unsqueeze(1) - 1).clamp(min=0)
    blocks = tables[slots.unsqueeze(1), inside // block_size].long()
    token_ids[:count] = ids.clamp(min=0).flatten()
    positions[:count] = inside.flatten()
    kv_slots[:count] = torch.where(stored, blocks * block_size + inside % block_size, -1).flatten()
    kv_lengths[:count] = (inside + 1).flatten().to(kv_lengths.dtype)


def accept_drafts(
    state: Tensor, slots: Tensor, starts: Tensor, tokens: Tensor, drafts: Tensor, out: Tensor, rates: Tensor | None = None
) -> None:
    """Accept the drafts that equal what was sampled in their place, up to the first that does not, and go on from there.

    slots, starts [S] int64: the rows that sample, of which the first R verify drafts [R, k].
    tokens [N] int64: what was sampled: k + 1 tokens of each of these, then one of each other row.
    out [S, k + 2] int64: the tokens of each row's result, then -1; in the last column, how many drafts it had.
    The state's LAST and LENGTH follow; its drafts are used up.

    rates [k] fp32: not the tokens but a hash decides, which accepts a draft with the rate of its place (and the token is the
    draft), for measurements.
    """
    if _kernel_takes(state):
        from phalanx.kernels.speculation import draft_kernels

        draft_kernels.accept_drafts(state, slots, starts, tokens, drafts, out, rates)
        return
    rows, count = drafts.shape
    verified = rows * (count + 1)
    grid = tokens[:verified].view(rows, count + 1)
    matches = drafts == grid[:, :count]
    if rates is not None:
        places = starts[:rows].unsqueeze(1) + torch.arange(count, device=starts.device)
        matches = (drafts >= 0) & (_uniform(slots[:rows].unsqueeze(1), places) < rates[:count])
        grid = torch.cat([torch.where(matches, drafts, grid[:, :count]), grid[:, count:]], 1)
    accepted = torch.zeros_like(slots)
    accepted[:rows] = matches.long().cumprod(1).sum(1)
    out.fill_(-1)
    out[:rows, : count + 1] = grid
    out[rows:, 0] = tokens[verified:]
    last = out.gather(1, accepted.unsqueeze(1)).squeeze(1)
    places = torch.arange(count + 1, device=out.device)
    out[:, : count + 1].masked_fill_(places > accepted.unsqueeze(1), -1)
    out[:, -1] = 0
    out[:rows, -1] = (drafts >= 0).sum(1)
    state[DRAFTS:, slots] = NO_DRAFT
    state[LAST, slots] = last
    state[LENGTH, slots] = starts + 1 + accepted


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """keys [2, N] int32 of seeds [N] int64 (the bits of unsigned ones) and positions [N] int64: two rounds of splitmix64 (Steele et
    al. 2014). They seed the noise of `sampling.gumbel_max`."""
    if _kernel_takes(seeds):
        from phalanx.kernels.speculation import draft_kernels

        return draft_kernels.noise_keys(seeds, positions)
    mixed = _splitmix(_splitmix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return torch.stack([mixed & 0xFFFFFFFF, _shift(mixed, 32)]).to(torch.int32)


def _kernel_takes(x: Tensor) -> bool:
    return x.is_cuda and has_triton()


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits of the unsigned number with these bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _uniform(slots: Tensor, positions: Tensor) -> Tensor:
    """A number from 0 to 1 of each, fp32."""
    return _shift(_splitmix(slots * _GOLDEN + positions), 40).float() * 2.0**-24

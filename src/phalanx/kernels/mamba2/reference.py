# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 in plain torch: the oracle of the kernels' tests, and what runs on CPU.

Of one head, with a state S [state_dim, head_dim], for each token of a request:

    x, B, C = silu(causal convolution of each channel + bias);  d = softplus(dt + dt_bias)
    S = exp(-exp(A_log) d) S + B (d x)^T;  y = S^T C + D x
    out = y silu(z)                                        a norm over the heads of a group follows (`layers.mamba2`)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.gated_delta import CHUNK
from phalanx.config.mamba import Mamba2
from phalanx.kernels.gated_delta.reference import StateRows, causal_conv, conv_behind_state, count_taken, runs_of, runs_of_slots


class MambaWeights(NamedTuple):
    """conv [channels, 1, taps] and conv_bias [channels] in the model's dtype; a_log, d, dt_bias [heads] fp32."""

    conv: Tensor
    conv_bias: Tensor
    a_log: Tensor
    d: Tensor
    dt_bias: Tensor


class MambaStates(NamedTuple):
    """Of slots, in fp32: conv [slots, conv_rows, heads * head_dim], of x; group_conv [slots, conv_rows, 2 * groups * state_dim], of
    B and C; state [slots, heads, state_dim, head_dim]."""

    conv: Tensor
    group_conv: Tensor
    state: Tensor


def mamba2(
    mixed: Tensor, sizes: Mamba2, weights: MambaWeights, states: MambaStates, rows: StateRows, pending: Tensor | None = None
) -> Tensor:  # fmt: skip
    """mixed [T, inner + channels + heads]: gates z, then x, B and C of all heads and groups, then time steps. The states are
    brought up to date. Returns the gated outputs [T, inner] fp32. pending [slots, heads, kept + 1], fp32: see `with_drafts`."""
    z, inputs, groups, steps = split(mixed, sizes)
    if pending is not None:
        return with_drafts(inputs, groups, steps, sizes, weights, states, rows, pending).flatten(1) * F.silu(z.float())
    inner = sizes.inner
    x = causal_conv(inputs, weights.conv[:inner], states.conv, rows, weights.conv_bias[:inner])
    both = causal_conv(groups, weights.conv[inner:], states.group_conv, rows, weights.conv_bias[inner:])
    x, (c, b, scaled, decay) = rule_inputs(x, both, steps.float(), sizes, weights)
    out = torch.empty_like(x)
    for begin, end, index, fresh in runs_of(rows):
        state = states.state[rows.slots[index]]
        state[fresh] = 0.0
        value, key, query, g = (each[begin:end] for each in (scaled, b, c, decay))
        if index.stop - index.start == end - begin:
            out[begin:end], state = one_token(query, key, value, g, state)
        else:
            out[begin:end], state[0] = many_tokens(query, key, value, g, state[0])
        states.state[rows.slots[index]] = state
    return (out + weights.d[:, None] * x).flatten(1) * F.silu(z.float())


RuleInputs = tuple[Tensor, Tensor, Tensor, Tensor]


def rule_inputs(
    x: Tensor, groups: Tensor, steps: Tensor, sizes: Mamba2, weights: MambaWeights
) -> tuple[Tensor, RuleInputs]:  # fmt: skip
    """x [T, inner] and groups [T, 2 * groups * state_dim], convolved, steps [T, heads] fp32 -> (x [T, H, P] fp32, (query and key
    [T, H, N], value [T, H, P], decay [T, H]))."""
    x, ratio = x.float().view(len(x), sizes.heads, sizes.head_dim), sizes.heads // sizes.groups
    b, c = (each.repeat_interleave(ratio, dim=1) for each in groups.float().view(len(x), 2, sizes.groups, -1).unbind(1))
    step = F.softplus(steps + weights.dt_bias)
    return x, (c, b, x * step.unsqueeze(-1), -weights.a_log.exp() * step)


def with_drafts(
    inputs: Tensor, groups: Tensor, steps: Tensor, sizes: Mamba2, weights: MambaWeights, states: MambaStates, rows: StateRows,
    pending: Tensor,
) -> Tensor:  # fmt: skip
    """The outputs [T, heads, head_dim] before the gates, where decode rows may be drafts, which the next step rejects: as
    `gated_delta.reference.with_drafts`. Behind a slot's state are kept the inputs of both convolutions, and in pending the time
    steps, then the position up to which the state is."""
    inner, out = sizes.inner, torch.zeros(len(inputs), sizes.heads, sizes.head_dim, device=inputs.device)
    for begin, count, slot, start, decodes in runs_of_slots(rows):
        end, taken = begin + count, count_taken(start, pending[slot, 0, -1], sizes.kept)
        convolved = [
            conv_behind_state(
                each[begin:end], weights.conv[part], tails[slot], start, taken, decodes=decodes, bias=weights.conv_bias[part]
            )
            for each, part, tails in (
                (inputs, slice(inner), states.conv), (groups, slice(inner, None), states.group_conv),
            )
        ]  # fmt: skip
        kept, new = pending[slot, :, :-1], steps[begin:end].float()
        x, each = rule_inputs(convolved[0], convolved[1], torch.cat([kept[:, :taken].T, new]), sizes, weights)
        state = states.state[slot].unsqueeze(0) if start else torch.zeros_like(states.state[:1])
        for token in range(taken):
            _, state = one_token(*_tokens(each, token, token + 1), state)
        if decodes:
            states.state[slot] = state[0]
            for token in range(taken, taken + count):
                out[begin + token - taken], state = one_token(*_tokens(each, token, token + 1), state)
            kept[:, :count] = new.T
        else:
            out[begin:end], states.state[slot] = many_tokens(*_tokens(each, taken, taken + count), state[0])
        pending[slot, :, -1] = start if decodes else start + count
        out[begin:end] += weights.d[:, None] * x[taken:]
    return out


def _tokens(each: RuleInputs, begin: int, end: int) -> RuleInputs:
    query, key, value, decay = each
    return query[begin:end], key[begin:end], value[begin:end], decay[begin:end]


def split(mixed: Tensor, sizes: Mamba2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mixed -> (gates z and inputs x [T, inner], B and C [T, 2 * groups * state_dim], time steps [T, heads])."""
    z, x, groups, steps = torch.split(mixed, [sizes.inner, sizes.inner, 2 * sizes.sections[1], sizes.heads], dim=1)
    return z, x, groups, steps


def one_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows with one token each: query, key [R, H, N], value [R, H, P], decay [R, H], state [R, H, N, P] -> (outputs [R, H, P],
    states behind the token)."""
    state = state * decay.exp()[..., None, None] + key.unsqueeze(-1) * value.unsqueeze(-2)
    return torch.einsum("rhnp,rhn->rhp", state, query), state


def many_tokens(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of one row: query, key [T, H, N], value [T, H, P], decay [T, H], state [H, N, P] -> (outputs [T, H, P], state behind the last
    token). With G the sums of decays in a chunk:

        y = exp(G) C S + (C_i . B_j exp(G_i - G_j) for j <= i) (d x);  S = exp(G_last) S + (exp(G_last - G) B)^T (d x)
    """
    outputs = []
    for begin in range(0, len(query), chunk):
        q, k, v, g = (each[begin : begin + chunk].transpose(0, 1).contiguous() for each in (query, key, value, decay))
        total = g.cumsum(1)
        between = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
        outputs.append((q * total.exp().unsqueeze(-1)) @ state + (q @ k.transpose(1, 2) * between) @ v)
        rest = (total[:, -1:] - total).exp().unsqueeze(-1)
        state = state * total[:, -1].exp()[:, None, None] + (k * rest).transpose(1, 2) @ v
    return torch.cat(outputs, dim=1).transpose(0, 1), state

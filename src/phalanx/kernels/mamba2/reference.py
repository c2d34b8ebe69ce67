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
from phalanx.kernels.gated_delta.reference import StateRows, causal_conv, runs_of


class MambaWeights(NamedTuple):
    """conv [channels, 1, taps] and conv_bias [channels] in the model's dtype; a_log, d, dt_bias [heads] fp32."""

    conv: Tensor
    conv_bias: Tensor
    a_log: Tensor
    d: Tensor
    dt_bias: Tensor


class MambaStates(NamedTuple):
    """Of slots, in fp32: conv [slots, taps - 1, heads * head_dim], of x; group_conv [slots, taps - 1, 2 * groups * state_dim], of B
    and C; state [slots, heads, state_dim, head_dim]."""

    conv: Tensor
    group_conv: Tensor
    state: Tensor


def mamba2(mixed: Tensor, sizes: Mamba2, weights: MambaWeights, states: MambaStates, rows: StateRows) -> Tensor:
    """mixed [T, inner + channels + heads]: gates z, then x, B and C of all heads and groups, then time steps. The states are
    brought up to date. Returns the gated outputs [T, inner] fp32."""
    z, inputs, groups, steps = split(mixed, sizes)
    inner, tokens, ratio = sizes.inner, len(mixed), sizes.heads // sizes.groups
    x = causal_conv(inputs, weights.conv[:inner], states.conv, rows, weights.conv_bias[:inner])
    both = causal_conv(groups, weights.conv[inner:], states.group_conv, rows, weights.conv_bias[inner:])
    x = x.float().view(tokens, sizes.heads, sizes.head_dim)
    b, c = (each.repeat_interleave(ratio, dim=1) for each in both.float().view(tokens, 2, sizes.groups, -1).unbind(1))
    step = F.softplus(steps.float() + weights.dt_bias)
    decay, out = -weights.a_log.exp() * step, torch.empty_like(x)
    scaled = x * step.unsqueeze(-1)
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

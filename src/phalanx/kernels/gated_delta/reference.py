# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain torch: the oracle of the kernels' tests, and what runs on CPU.

Of one value head, with a state S [key_dim, value_dim], for each token of a request:

    q, k, v = silu(causal convolution of each channel); q, k divided by their lengths, q also by sqrt(key_dim)
    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q        beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias)
    out = round(o / rms(o)) weight silu(z)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.gated_delta import CHUNK as CHUNK
from phalanx.config.gated_delta import GatedDelta

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class DeltaWeights(NamedTuple):
    """conv [channels, 1, taps] and norm [value_dim] in the model's dtype; a_log, dt_bias [value_heads] fp32. eps: of the norm."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class StateRows(NamedTuple):
    """The rows of a batch, as `Batch` has them: slots [R] int64, where their states are; starts [R + 1] and lengths [R] int32;
    kv_slots [T] int64, -1 for padding, which changes no state. A row whose length is its number of tokens begins with zeros.

    decodes: rows with one token, or none, which come first. chunks: of the rows behind them, at least as many as there are.
    starts_cpu, lengths_cpu: for the reference, which takes no padding.
    """

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    kv_slots: Tensor
    decodes: int
    chunks: int
    starts_cpu: list[int]
    lengths_cpu: list[int]


def max_chunk_rows(rows: int) -> int:
    """A power of two that is at least `rows`, of which kernels have few variants."""
    return 1 << (max(rows, 16) - 1).bit_length()


def gated_delta(
    mixed: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights, conv: Tensor, state: Tensor, rows: StateRows,
    pending: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """mixed [T, channels + values]: queries, keys, values and gates z of all heads; ba [T, 2 * value_heads]: b, then a; both of one
    dtype. conv [slots, conv_rows, channels] and state [slots, value_heads, key_dim, value_dim], fp32, are brought up to date.
    Returns the gated outputs [T, value_heads * value_dim]. pending [slots, value_heads, 2 * kept + 1], fp32: see `with_drafts`."""
    qkv, z = torch.split(mixed, [sum(heads.sections), heads.sections[2]], dim=1)
    if pending is not None:
        out = with_drafts(qkv, ba, heads, weights, conv, state, rows, pending)
    else:
        query, key, value, decay, beta = rule_inputs(causal_conv(qkv, weights.conv, conv, rows), ba.float(), heads, weights)
        out = torch.empty_like(value)
        for begin, end, index, fresh in runs_of(rows):
            states = state[rows.slots[index]]
            states[fresh] = 0.0
            q, k, v, g, b = (each[begin:end] for each in (query, key, value, decay, beta))
            if index.stop - index.start == end - begin:
                out[begin:end], states = one_token(q, k, v, g, b, states)
            else:
                out[begin:end], states[0] = many_tokens(q, k, v, g, b, states[0])
            state[rows.slots[index]] = states
    gates = F.silu(z.float()).view(len(mixed), heads.value_heads, -1)
    normed = (out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + weights.eps)).to(mixed.dtype)
    return ((weights.norm * normed).float() * gates).to(mixed.dtype).flatten(1)


RuleInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _tokens(each: RuleInputs, begin: int, end: int) -> RuleInputs:
    query, key, value, decay, beta = each
    return query[begin:end], key[begin:end], value[begin:end], decay[begin:end], beta[begin:end]


def rule_inputs(convolved: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights) -> RuleInputs:
    """convolved [T, channels], ba [T, 2 * value_heads] fp32 -> query, key, value [T, H, ...], decay and beta [T, H]."""
    tokens = len(convolved)
    query, key, value = torch.split(convolved.float(), list(heads.sections), dim=1)
    query, key = (normed_heads(each.view(tokens, heads.key_heads, -1), heads.ratio) for each in (query, key))
    b, a = torch.split(ba, heads.value_heads, dim=1)
    decay = -weights.a_log.exp() * F.softplus(a + weights.dt_bias)
    return query * heads.key_dim**-0.5, key, value.view(tokens, heads.value_heads, -1), decay, b.sigmoid()


def with_drafts(
    qkv: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights, conv: Tensor, state: Tensor, rows: StateRows, pending: Tensor
) -> Tensor:  # fmt: skip
    """The outputs [T, value_heads, value_dim] before the norm, where decode rows may be drafts, which the next step rejects.

    The decode rows of one slot stand one behind the other, at neighbouring positions. Their tokens do not change the slot's state:
    their inputs are kept behind it, those of the convolution in conv, b and a in pending, which has the position up to which the
    state is, too. The next row of the slot takes in as many of them as it begins behind that position: those were accepted. So a
    state is read once and written once in a step, as without drafts. A prefill row's tokens are final."""
    out = torch.zeros(len(qkv), heads.value_heads, heads.value_dim, device=qkv.device)
    for begin, count, slot, start, decodes in runs_of_slots(rows):
        taken = count_taken(start, pending[slot, 0, -1], heads.kept)
        convolved = conv_behind_state(qkv[begin : begin + count], weights.conv, conv[slot], start, taken, decodes=decodes)
        kept = pending[slot, :, :-1].view(heads.value_heads, 2, -1)
        earlier = kept[:, :, :taken].permute(2, 1, 0).flatten(1)
        new = ba[begin : begin + count].float()
        each = rule_inputs(convolved, torch.cat([earlier, new]), heads, weights)
        states = state[slot].unsqueeze(0) if start else torch.zeros_like(state[:1])
        for token in range(taken):
            _, states = one_token(*_tokens(each, token, token + 1), states)
        if decodes:
            state[slot] = states[0]
            for token in range(taken, taken + count):
                out[begin + token - taken], states = one_token(*_tokens(each, token, token + 1), states)
            kept[:, :, :count] = new.view(count, 2, -1).permute(2, 1, 0)
        else:
            out[begin : begin + count], state[slot] = many_tokens(*_tokens(each, taken, taken + count), states[0])
        pending[slot, :, -1] = start if decodes else start + count
    return out


def count_taken(start: int, position: Tensor, kept: int) -> int:
    """How many of the tokens that are kept behind a state were accepted. start: of the row; position: of the state."""
    return min(max(start - int(position), 0), kept) if start else 0  # steps that measure memory begin anywhere


def conv_behind_state(
    x: Tensor, weight: Tensor, tails: Tensor, start: int, taken: int, *, decodes: bool, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """As `causal_conv`, of x [n, channels] of a slot behind `taken` tokens that it has kept: of both. tails [conv_rows, channels]:
    of the slot; decodes: the new tokens are kept there."""
    taps = weight.shape[2]
    before = tails[: taps - 1 + taken] if start else tails.new_zeros(taps - 1, tails.shape[1])
    inputs = torch.cat([before, x.float()])
    added = None if bias is None else bias.float()
    sums = F.conv1d(inputs.T.unsqueeze(0), weight.float(), added, groups=inputs.shape[1])[0].T
    if decodes:
        tails[: taps - 1 + len(x)] = inputs[taken:]
    else:
        tails[: taps - 1] = inputs[len(inputs) - taps + 1 :]
    tails[-1] = start if decodes else start + len(x)
    return F.silu(sums).to(x.dtype)


def runs_of_slots(rows: StateRows) -> Iterator[tuple[int, int, int, int, bool]]:
    """(first token, tokens, slot, position of the first, whether they are decode rows): the decode rows of each slot, as far as
    they have blocks, and each other row."""
    slots, starts, lengths, row = rows.slots.tolist(), rows.starts_cpu, rows.lengths_cpu, 0
    stored = (rows.kv_slots >= 0).tolist()
    while row < len(slots):
        decodes, begin, end = row < rows.decodes, starts[row], row + 1
        count = starts[end] - begin
        if decodes:
            while end < rows.decodes and slots[end] == slots[row]:
                end += 1
            count = sum(stored[begin : begin + end - row])
        if count:
            yield begin, count, slots[row], lengths[row] - (starts[row + 1] - begin), decodes
        row = end


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, C] * sigmoid(gate), for a gate [T, C] or [T, 1]: in fp32, rounded to x's dtype."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


def runs_of(rows: StateRows) -> list[tuple[int, int, slice, Tensor]]:
    """(first token, behind the last, the rows, which of them begin): the decode rows together, and each other row."""
    starts, runs = rows.starts_cpu, []
    fresh = torch.tensor([end - begin == n for begin, end, n in zip(starts[:-1], starts[1:], rows.lengths_cpu, strict=True)])
    if rows.decodes:
        runs.append((0, starts[rows.decodes], slice(0, rows.decodes), fresh[: rows.decodes]))
    for row in range(rows.decodes, len(rows.lengths_cpu)):
        runs.append((starts[row], starts[row + 1], slice(row, row + 1), fresh[row : row + 1]))
    return runs


def causal_conv(x: Tensor, weight: Tensor, tails: Tensor, rows: StateRows, bias: Tensor | None = None) -> Tensor:
    """silu of x [T, channels] convolved over each row's tokens, plus bias [channels], in x's dtype; in fp32 but for that. tails
    [slots, taps - 1, channels]: the inputs before a row's first token; those before its next one are left there."""
    taps, out = weight.shape[2], torch.empty_like(x, memory_format=torch.contiguous_format)
    for begin, end, index, fresh in runs_of(rows):
        before = tails[rows.slots[index]]
        before[fresh] = 0.0
        count = (end - begin) // (index.stop - index.start)
        inputs = torch.cat((before, x[begin:end].float().reshape(-1, count, x.shape[1])), dim=1)
        added = None if bias is None else bias.float()
        sums = F.conv1d(inputs.transpose(1, 2), weight.float(), added, groups=x.shape[1]).transpose(1, 2)
        out[begin:end] = F.silu(sums).flatten(0, 1).to(x.dtype)
        tails[rows.slots[index]] = inputs[:, inputs.shape[1] - taps + 1 :]
    return out


def normed_heads(x: Tensor, ratio: int) -> Tensor:
    """x [T, key_heads, key_dim] divided by its lengths, each head `ratio` times: [T, value_heads, key_dim]."""
    return (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)).repeat_interleave(ratio, dim=1)


def one_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows with one token each: query, key [R, H, K], value [R, H, V], decay, beta [R, H], state [R, H, K, V] -> (outputs
    [R, H, V], states behind the token)."""
    state = state * decay.exp()[..., None, None]
    delta = beta.unsqueeze(-1) * (value - torch.einsum("rhkv,rhk->rhv", state, key))
    state = state + key.unsqueeze(-1) * delta.unsqueeze(-2)
    return torch.einsum("rhkv,rhk->rhv", state, query), state


def many_tokens(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of one row: query, key [T, H, K], value [T, H, V], decay, beta [T, H], state [H, K, V] -> (outputs [T, H, V], state behind
    the last token). With G the sums of decays in a chunk, and A_ij = beta_i exp(G_i - G_j) k_i . k_j for tokens j < i of it:

        u, w = (1 + A)^-1 (beta v, beta exp(G) k)                  the WY form of arXiv 2406.06484
        v' = u - w S;  o = exp(G) q S + (q_i . k_j exp(G_i - G_j) for j <= i) v';  S = exp(G_last) S + (exp(G_last - G) k)^T v'
    """
    outputs = []
    for begin in range(0, len(query), chunk):
        q, k, v, g, b = (each[begin : begin + chunk].transpose(0, 1).contiguous() for each in (query, key, value, decay, beta))
        total = g.cumsum(1)
        between = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
        scaled = k * b.unsqueeze(-1)
        system = (scaled @ k.transpose(1, 2) * between).tril(-1)
        sides = torch.cat((v * b.unsqueeze(-1), scaled * total.exp().unsqueeze(-1)), dim=-1)
        u, w = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], -1)
        new = u - w @ state
        outputs.append((q * total.exp().unsqueeze(-1)) @ state + (q @ k.transpose(1, 2) * between) @ new)
        rest = (total[:, -1:] - total).exp().unsqueeze(-1)
        state = state * total[:, -1].exp()[:, None, None] + (k * rest).transpose(1, 2) @ new
    return torch.cat(outputs, dim=1).transpose(0, 1), state

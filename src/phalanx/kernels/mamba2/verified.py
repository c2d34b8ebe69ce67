# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Mamba-2 of decode rows whose tokens may be drafts: see `reference.with_drafts`, which these kernels compute, as those of
`gated_delta.verified` do: the first row of each slot computes all rows of the slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.config.mamba import Mamba2
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gated_delta.causal_conv import conv_prefill
from phalanx.kernels.gated_delta.chunks import row_at, sigmoid, softplus
from phalanx.kernels.gated_delta.reference import StateRows
from phalanx.kernels.gated_delta.verified import conv_verify, first_of_slot, is_next
from phalanx.kernels.mamba2.reference import MambaStates, MambaWeights
from phalanx.kernels.mamba2.scan import scan


@triton.jit
def mamba_token(
    matrix, x, groups, step, rate, head, key, value, is_key, is_value,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """x, groups: a token's convolved channels. Returns the state behind it, C, and x of the head."""
    own = groups + head // (HEADS // GROUPS) * STATE + key
    b = tl.load(own, is_key, 0.0).to(tl.float32)
    c = tl.load(own + GROUPS * STATE, is_key, 0.0).to(tl.float32)
    v = tl.load(x + head * VALUES + value, is_value, 0.0).to(tl.float32)
    return matrix * tl.exp(rate * step) + b * (step * v), c, v


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def _mamba_verify(
    x, groups, accepted, accepted_groups, z, steps, a_log, skip, dt_bias, state, pending, out, slots, starts, lengths, kv_slots,
    rows, z_pitch, step_pitch,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr, WIDE_STATE: tl.constexpr,
    WIDE_VALUES: tl.constexpr, KEPT: tl.constexpr, NEW: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """pending [slots, HEADS, KEPT + 1]: the time steps of the tokens that a slot has kept, then the position of its state."""
    row, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, WIDE_STATE)[:, None], tl.arange(0, WIDE_VALUES)[None, :]
    is_key, is_value = key < STATE, value < VALUES
    token, count, slot, start = row_at(slots, starts, lengths, row, SM)
    if first_of_slot(slots, kv_slots, row, token, count, NEW):
        kept = pending + (slot * HEADS + head) * (KEPT + 1)
        at = tl.load(kept + KEPT, start > 0, 0.0).to(tl.int64)
        taken = tl.where(start > 0, tl.minimum(tl.maximum(start - at, 0), KEPT), 0)  # steps that measure memory begin anywhere
        place = (slot * HEADS + head) * (STATE * VALUES) + key * VALUES + value
        matrix = tl.load(state + place, is_key & is_value & (start > 0), 0.0)
        rate, bias, through = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(skip + head)
        for j in range(0, taken):
            own = (row * KEPT + j).to(tl.int64)
            step = softplus(tl.load(kept + j) + bias)
            matrix, _, _ = mamba_token(
                matrix, accepted + own * (HEADS * VALUES), accepted_groups + own * (2 * GROUPS * STATE), step, rate, head, key,
                value, is_key, is_value, HEADS, GROUPS, STATE, VALUES,
            )  # fmt: skip
        tl.store(state + place, matrix, is_key & is_value & ((taken > 0) | (start == 0)))
        tl.debug_barrier()  # a warp may store what another one still loads
        if NEW:
            for i in range(0, KEPT):
                if is_next(slots, starts, kv_slots, row, token, i, rows):
                    now = token + i
                    raw = tl.load(steps + now * step_pitch + head).to(tl.float32)
                    tl.store(kept + i, raw)
                    matrix, c, v = mamba_token(
                        matrix, x + now * (HEADS * VALUES), groups + now * (2 * GROUPS * STATE), softplus(raw + bias), rate, head,
                        key, value, is_key, is_value, HEADS, GROUPS, STATE, VALUES,
                    )  # fmt: skip
                    gate = tl.load(z + now * z_pitch + head * VALUES + value, is_value, 0.0).to(tl.float32)
                    y = tl.sum(matrix * c, 0, keep_dims=True) + through * v
                    tl.store(out + (now * HEADS + head) * VALUES + value, y * gate * sigmoid(gate), is_value)
            tl.store(kept + KEPT, start.to(tl.float32))
        else:
            tl.store(kept + KEPT, (start + count).to(tl.float32))


def with_drafts(
    inputs: Tensor, groups: Tensor, z: Tensor, steps: Tensor, sizes: Mamba2, weights: MambaWeights, states: MambaStates,
    rows: StateRows, pending: Tensor,
) -> Tensor:  # fmt: skip
    """The gated outputs of `reference.with_drafts`. Before a prefill row is computed, its state is brought to where it begins."""
    inner, out = sizes.inner, torch.empty((len(inputs), sizes.inner), dtype=torch.float32, device=inputs.device)
    x, both = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (inputs, groups))
    convolutions = (inputs, slice(inner), states.conv, x), (groups, slice(inner, None), states.group_conv, both)
    for part, new in ((slice(0, rows.decodes), True), (slice(rows.decodes, None), False)):
        if not (rows.decodes if new else rows.chunks):
            continue
        accepted = [
            conv_verify(
                each, weights.conv[channels], tails, convolved, rows, part, sizes.kept, new=new, bias=weights.conv_bias[channels]
            )
            for each, channels, tails, convolved in convolutions
        ]
        _launch(x, both, accepted, z, steps, sizes, weights, states.state, pending, rows, out, part, new=new)
    if rows.chunks:
        for each, channels, tails, convolved in convolutions:
            conv_prefill(each, weights.conv[channels], tails, convolved, rows, weights.conv_bias[channels])
    return scan(x, both, z, steps, sizes, weights, states.state, rows, verified=out)


def _launch(
    x: Tensor, groups: Tensor, accepted: list[Tensor], z: Tensor, steps: Tensor, sizes: Mamba2, weights: MambaWeights,
    state: Tensor, pending: Tensor, rows: StateRows, out: Tensor, part: slice, *, new: bool,
) -> None:  # fmt: skip
    slots, sm = rows.slots[part], sm_arch(x.device)
    _mamba_verify[(len(slots), sizes.heads)](
        x, groups, *accepted, z, steps, weights.a_log, weights.d, weights.dt_bias, state, pending, out, slots,
        rows.starts[part.start :], rows.lengths[part], rows.kv_slots, len(slots), z.stride(0), steps.stride(0),
        HEADS=sizes.heads, GROUPS=sizes.groups, STATE=sizes.state_dim, VALUES=sizes.head_dim,
        WIDE_STATE=triton.next_power_of_2(max(sizes.state_dim, 16)), WIDE_VALUES=triton.next_power_of_2(max(sizes.head_dim, 16)),
        KEPT=sizes.kept, NEW=new, SM=sm, num_warps=4, launch_pdl=sm >= 90,
    )  # fmt: skip

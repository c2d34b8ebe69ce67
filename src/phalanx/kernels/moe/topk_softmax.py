# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The router behind its GEMM, whose parts it adds up: softmax over all experts or a sigmoid of each, and the largest k of them, of
all or of the best groups. A program has one token. The plain code: `reference.topk_softmax` and `grouped_topk`.

Where the token is alone, its experts need no sorting: the program also writes the lists that `grouped_gemm` reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.config.experts import Scoring
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.kernels.moe.sort_by_expert import TILE_FIELDS, Tiles, empty_tiles
from phalanx.kernels.moe.tensors import RouterLogits, Routing, TrafficPattern
from phalanx.kernels.vectors import nearest


@triton.jit
def _in_best_groups(score, inside, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr, SUM_OF_TWO: tl.constexpr):
    """Which lanes are in the TOP_GROUPS best of GROUPS runs of SIZE lanes: by their best score, or by the sum of their best two. Of
    equal groups the first."""
    RUNS: tl.constexpr = score.shape[0] // SIZE
    member = tl.reshape(tl.where(inside, score, float("-inf")), [RUNS, SIZE])
    best = tl.max(member, 1)
    if SUM_OF_TWO:
        lane = tl.arange(0, SIZE)[None, :]
        place = tl.min(tl.where(member == best[:, None], lane, SIZE), 1)
        best += tl.max(tl.where(lane == place[:, None], float("-inf"), member), 1)
    group = tl.arange(0, RUNS)
    left = group < GROUPS
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(tl.where(left, best, float("-inf")), 0)
        number = tl.min(tl.where(left & (best == top), group, GROUPS - 1), 0)
        left = left & (group != number)
    passed = ((group < GROUPS) & (left == 0)).to(tl.int32)
    return inside & (tl.reshape(tl.broadcast_to(passed[:, None], [RUNS, SIZE]), [RUNS * SIZE]) > 0)


@triton.jit
def _drawn(x, log_weights, token, expert, inside, hidden, EXPERTS: tl.constexpr):
    """Scores [EXPERTS] by which the highest ones are a draw from log_weights; the seed is the token's values."""
    lane = tl.arange(0, 16)
    bits = (tl.load(x + token.to(tl.int64) * hidden + lane, lane < hidden, 0.0).to(tl.float32) * 4096.0).to(tl.int32) & 0x7FFF
    seed = tl.sum(bits * (lane * 131 + 7), 0)
    uniform = tl.clamp(tl.rand(seed, expert + token * EXPERTS), 1e-6, 1.0 - 1e-6)
    return tl.load(log_weights + expert, inside, float("-inf")) - tl.log(-tl.log(uniform))


@triton.jit
def _logits(logits, logit_bias, token, tokens, expert, inside, experts, PARTS: tl.constexpr, KIND: tl.constexpr, SM: tl.constexpr):
    """Of one token: of logits [tokens, experts], or of [PARTS, tokens, experts] in fp32 that are added up; see `RouterLogits`.
    KIND: what they are rounded to, "fp32" (they are not), "bf16" or "fp16"."""
    place = logits + token.to(tl.int64) * experts + expert
    total = tl.load(place, inside, 0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        place += tokens.to(tl.int64) * experts
        total += tl.load(place, inside, 0.0)
    if logit_bias is not None:
        total += tl.load(logit_bias + expert, inside, 0.0).to(tl.float32)
    if KIND != "fp32":
        DTYPE: tl.constexpr = tl.bfloat16 if KIND == "bf16" else tl.float16
        total = nearest(total, tl.zeros_like(total).to(DTYPE), SM).to(tl.float32)
    return tl.where(inside, total, float("-inf"))


@triton.jit
def _largest(score, share, expert, inside, experts, TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    """(0 .. SLOTS - 1, the experts with the TOP_K largest scores, their shares); of equal scores the first. Scores are compared as
    integers of the same order, and shares are taken by their bits: a GPU reduces integers of a warp in one instruction."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # 0 of either sign are equal
    key = tl.where(inside, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -(1 << 31))
    share_bits = share.to(tl.int32, bitcast=True)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    weight = tl.zeros([SLOTS], tl.int32)
    for j in tl.static_range(TOP_K):
        number = tl.min(tl.where(key == tl.max(key, 0), expert, experts - 1), 0)
        chosen = tl.where(slot == j, number, chosen)
        weight = tl.where(slot == j, tl.max(tl.where(expert == number, share_bits, 0), 0), weight)
        key = tl.where(expert == number, -(1 << 31), key)
    return slot, chosen, weight.to(tl.float32, bitcast=True)


@triton.jit
def _placed(chosen, physical, kv_slot, COPIES: tl.constexpr):
    """Experts -> physical experts, see `reference.physical_ids`; -1 for a token that is padding. kv_slot: the token's, or its
    number."""
    if physical is not None:
        row = physical + chosen * (COPIES + 1)
        if COPIES == 1:
            chosen = tl.load(row + 1)
        else:
            chosen = tl.load(row + 1 + tl.maximum(kv_slot, 0) % tl.load(row))
    return tl.where(kv_slot < 0, -1, chosen)


@triton.jit
def _store_tiles(pairs, tiles, counts, load, chosen, slot, real, first, local_experts, FIELDS: tl.constexpr):
    """Of a token that is alone: each pair of it with an expert of this rank is a tile. Its pairs are not sorted: all of them may be
    some expert's of this rank."""
    local = chosen - first
    is_local = real & (local >= 0) & (local < local_experts)
    place = tiles + (tl.cumsum(is_local.to(tl.int32), 0) - 1) * FIELDS
    tl.store(pairs + slot, slot, real)
    tl.store(place, local, is_local)
    tl.store(place + 1, slot, is_local)
    tl.store(place + 2, 1, is_local)
    tl.store(counts, tl.sum(is_local.to(tl.int32), 0))
    tl.store(counts + 1, tl.sum(real.to(tl.int32), 0))
    if load is not None:
        tl.atomic_add(load + local, tl.full(local.shape, 1, tl.int64), is_local, sem="relaxed")  # nothing waits for it


# A layer's counters and a step's KV slots are parts of larger tensors: they lie on any 8 bytes.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["kv_slots", "load"])
def _topk_softmax(
    logits, logit_bias, bias, x, log_weights, kv_slots, physical, weights, ids, pairs, tiles, counts, load, tokens, experts,
    hidden, first, local_experts, scale, floor, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, DRAWN: tl.constexpr,
    SIGMOID: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_LANES: tl.constexpr,
    ALONE: tl.constexpr, COPIES: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, FIELDS: tl.constexpr,
    PARTS: tl.constexpr, KIND: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """logits, PARTS, KIND: see `_logits`. DRAWN: experts are drawn by log_weights [experts], and the token's values in x are the
    seed; logits are read all the same, for a benchmark. COPIES: an expert has at most so many, see `reference.physical_ids`."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    kv_slot = token
    if kv_slots is not None:
        kv_slot = tl.load(kv_slots + token)  # before the choice, so that it need not be waited for
    expert = tl.arange(0, EXPERTS)
    inside = expert < experts
    PADDED: tl.constexpr = GROUPS > 1 and GROUP_SIZE < GROUP_LANES
    if PADDED:  # a group has GROUP_LANES lanes, of which the first have its experts
        inside = (expert % GROUP_LANES < GROUP_SIZE) & (expert // GROUP_LANES < GROUPS)
        expert = tl.where(inside, expert // GROUP_LANES * GROUP_SIZE + expert % GROUP_LANES, experts)
    if DRAWN:
        score = _drawn(x, log_weights, token, expert, inside, hidden, EXPERTS)
        share = tl.zeros([EXPERTS], tl.float32) + 1.0 / TOP_K
        if logits is not None:
            logit = _logits(logits, logit_bias, token, tokens, expert, inside, experts, PARTS, KIND, SM)
            share += tl.minimum(tl.abs(tl.where(inside, logit, 0.0)), 0.0)
    else:
        score = _logits(logits, logit_bias, token, tokens, expert, inside, experts, PARTS, KIND, SM)
        if SIGMOID:
            share = 1.0 / (1.0 + tl.exp(-score))
            if bias is not None or GROUPS > 1:  # else the order of logits counts, as scores may round to 1
                score = share
        else:
            share = tl.exp(score - tl.max(score, 0))
            share = share / tl.sum(share, 0)
            if bias is not None:  # it corrects shares
                score = share
        if bias is not None:
            score += tl.load(bias + expert, inside, 0.0)
        if GROUPS > 1:
            inside = _in_best_groups(score, inside, GROUPS, TOP_GROUPS, GROUP_LANES, SIGMOID)
    slot, chosen, weight = _largest(score, share, expert, inside, experts, TOP_K, SLOTS)
    real = slot < TOP_K
    if RENORMALIZE:
        total = tl.sum(tl.where(real, weight, 0.0), 0) + (1e-20 if SIGMOID else 0.0)
        weight = weight / tl.maximum(total, floor)  # 0 where there is none
    weight *= scale  # 1 where there is none
    chosen = _placed(chosen, physical, kv_slot, COPIES)
    place = token.to(tl.int64) * TOP_K + slot
    tl.store(weights + place, weight, real)
    tl.store(ids + place, chosen, real)
    if ALONE:
        _store_tiles(pairs, tiles, counts, load, chosen, slot, real, first, local_experts, FIELDS)


def topk_softmax(
    logits: Tensor | RouterLogits | None, x: Tensor, top_k: int, *, experts: int, renormalize: bool, first: int, local_experts: int,
    pattern: TrafficPattern | None = None, load: Tensor | None = None, kv_slots: Tensor | None = None,
    physical: Tensor | None = None, scoring: Scoring | None = None, bias: Tensor | None = None,
) -> tuple[Routing, Tiles | None]:  # fmt: skip
    """logits [T, E], or None with a pattern. For one token also the tiles of experts first .. first + local_experts.
    load [local_experts] int64: for one token, the chosen ones are counted in it. kv_slots [T] int64: a token with a negative one is
    padding, and gets no expert. physical [E, 1 + copies] int32: see `reference.physical_ids`. scoring, bias [E] fp32: how logits
    choose, if not by their softmax."""
    tokens, device, rule = x.shape[0], x.device, scoring or Scoring()
    if logits is not None and not isinstance(logits, RouterLogits):
        logits = RouterLogits(logits.contiguous().unsqueeze(0), None, torch.float32)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    tiles = empty_tiles(top_k, top_k, device)._replace(in_order=True) if tokens == 1 else None
    if tokens:
        sm = sm_arch(device)
        group_lanes = triton.next_power_of_2(experts // rule.groups)
        lanes = triton.next_power_of_2(rule.groups) * group_lanes if rule.groups > 1 else max(16, triton.next_power_of_2(experts))
        parts, logit_bias, dtype = (None, None, torch.float32) if logits is None else logits
        _topk_softmax[(tokens,)](
            parts, logit_bias, bias, x, None if pattern is None else pattern.log_weights, kv_slots, physical, weights, ids,
            *(tiles or (None, None, None))[:3], load, tokens, experts, x.shape[1], first, local_experts,
            rule.scale if pattern is None else 1.0, rule.floor, TOP_K=top_k, RENORMALIZE=renormalize, DRAWN=pattern is not None,
            SIGMOID=rule.function == "sigmoid", GROUPS=rule.groups, TOP_GROUPS=rule.top_groups, GROUP_SIZE=experts // rule.groups,
            GROUP_LANES=group_lanes, ALONE=tokens == 1, COPIES=0 if physical is None else physical.shape[1] - 1, EXPERTS=lanes,
            SLOTS=max(2, triton.next_power_of_2(top_k)), FIELDS=TILE_FIELDS, PARTS=1 if parts is None else len(parts),
            KIND=DTYPE_NAMES[dtype], SM=sm, num_warps=1, launch_pdl=sm >= 90,
        )  # fmt: skip
    return Routing(weights, ids), tiles

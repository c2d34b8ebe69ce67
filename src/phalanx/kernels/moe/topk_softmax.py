# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The router behind its GEMM: softmax over all experts or a sigmoid of each, and the largest k of them, of all or of the best
groups. A program has one token. The plain code: `reference.topk_softmax` and `grouped_topk`.

Where the token is alone, its experts need no sorting: the program also writes the lists that `grouped_gemm` reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.config.experts import Scoring
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.moe.sort_by_expert import TILE_FIELDS, Tiles, empty_tiles
from phalanx.kernels.moe.tensors import Routing, TrafficPattern


@triton.jit
def _in_best_groups(score, expert, inside, size, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUM_OF_TWO: tl.constexpr):
    """Which experts are in the TOP_GROUPS best runs of `size` experts: by their best score, or by the sum of their best two. Of
    equal groups the first."""
    LANES: tl.constexpr = 16 if GROUPS < 16 else GROUPS
    group = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        member = tl.where(inside & (expert // size == g), score, float("-inf"))
        top = tl.max(member, 0)
        if SUM_OF_TWO:
            place = tl.min(tl.where(member == top, expert, 2147483647), 0)
            top += tl.max(tl.where(expert == place, float("-inf"), member), 0)
        best = tl.where(group == g, top, best)
    chosen = inside & (expert < 0)
    left = group < GROUPS
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(tl.where(left, best, float("-inf")), 0)
        number = tl.min(tl.where(left & (best == top), group, LANES - 1), 0)
        chosen = chosen | (inside & (expert // size == number))
        left = left & (group != number)
    return chosen


@triton.jit
def _drawn(x, log_weights, token, expert, inside, hidden, EXPERTS: tl.constexpr):
    """Scores [EXPERTS] by which the highest ones are a draw from log_weights; the seed is the token's values."""
    lane = tl.arange(0, 16)
    bits = (tl.load(x + token.to(tl.int64) * hidden + lane, lane < hidden, 0.0).to(tl.float32) * 4096.0).to(tl.int32) & 0x7FFF
    seed = tl.sum(bits * (lane * 131 + 7), 0)
    uniform = tl.clamp(tl.rand(seed, expert + token * EXPERTS), 1e-6, 1.0 - 1e-6)
    return tl.load(log_weights + expert, inside, float("-inf")) - tl.log(-tl.log(uniform))


@triton.jit
def _store_tiles(
    pairs, tiles, num_tiles, load, chosen, slot, real, first, local_experts, TOP_K: tl.constexpr, FIELDS: tl.constexpr
):  # fmt: skip
    """Of a token that is alone: each pair of it with an expert is a tile."""
    local = chosen - first
    is_local = (local >= 0) & (local < local_experts)
    tl.store(pairs + slot, slot, real)
    tl.store(tiles + slot * FIELDS, tl.where(is_local, local, 0), real)
    tl.store(tiles + slot * FIELDS + 1, slot, real)
    tl.store(tiles + slot * FIELDS + 2, is_local.to(tl.int32), real)
    tl.store(num_tiles, TOP_K)
    if load is not None:
        tl.store(load + local, tl.load(load + local, real & is_local, 0) + 1, real & is_local)


# A layer's counters and a step's KV slots are parts of larger tensors: they lie on any 8 bytes.
@triton.jit(do_not_specialize_on_alignment=["kv_slots", "load"])
def _topk_softmax(
    logits, bias, x, log_weights, kv_slots, physical, weights, ids, pairs, tiles, num_tiles, load, experts, hidden, first,
    local_experts, group_size, scale, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, DRAWN: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, ALONE: tl.constexpr, COPIES: tl.constexpr,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, FIELDS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """logits [T, experts]. DRAWN: experts are drawn by log_weights [experts], and the token's values in x are the seed. COPIES: an
    expert has at most so many, see `reference.physical_ids`."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    inside = expert < experts
    if DRAWN:
        score = _drawn(x, log_weights, token, expert, inside, hidden, EXPERTS)
        share = tl.zeros([EXPERTS], tl.float32) + 1.0 / TOP_K
    else:
        score = tl.load(logits + token.to(tl.int64) * experts + expert, inside, float("-inf")).to(tl.float32)
        if SIGMOID:
            share = 1.0 / (1.0 + tl.exp(-score))
            score = share
        else:
            share = tl.exp(score - tl.max(score, 0))
            share = share / tl.sum(share, 0)
        if bias is not None:
            score += tl.load(bias + expert, inside, 0.0)
        if GROUPS > 1:
            inside = _in_best_groups(score, expert, inside, group_size, GROUPS, TOP_GROUPS, SIGMOID)
    score = tl.where(inside, score, float("-inf"))
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    weight = tl.zeros([SLOTS], tl.float32)
    for j in tl.static_range(TOP_K):
        top = tl.max(score, 0)
        number = tl.min(tl.where((score == top) & inside, expert, experts - 1), 0)
        chosen = tl.where(slot == j, number, chosen)
        weight = tl.where(slot == j, tl.sum(tl.where(expert == number, share, 0.0), 0), weight)
        inside = inside & (expert != number)
        score = tl.where(inside, score, float("-inf"))
    real = slot < TOP_K
    if RENORMALIZE:
        weight = weight / (tl.sum(tl.where(real, weight, 0.0), 0) + (1e-20 if SIGMOID else 0.0))
    weight *= scale  # 1 where there is none
    if physical is not None:
        row = physical + chosen * (COPIES + 1)
        if COPIES == 1:
            chosen = tl.load(row + 1)
        else:
            copy_key = token
            if kv_slots is not None:
                copy_key = tl.maximum(tl.load(kv_slots + token), 0)
            chosen = tl.load(row + 1 + copy_key % tl.load(row))
    if kv_slots is not None:
        chosen = tl.where(tl.load(kv_slots + token) < 0, -1, chosen)
    place = token.to(tl.int64) * TOP_K + slot
    tl.store(weights + place, weight, real)
    tl.store(ids + place, chosen, real)
    if ALONE:
        _store_tiles(pairs, tiles, num_tiles, load, chosen, slot, real, first, local_experts, TOP_K, FIELDS)


def topk_softmax(
    logits: Tensor | None, x: Tensor, top_k: int, *, experts: int, renormalize: bool, first: int, local_experts: int,
    pattern: TrafficPattern | None = None, load: Tensor | None = None, kv_slots: Tensor | None = None,
    physical: Tensor | None = None, scoring: Scoring | None = None, bias: Tensor | None = None,
) -> tuple[Routing, Tiles | None]:  # fmt: skip
    """logits [T, E] contiguous, or None with a pattern. For one token also the tiles of experts first .. first + local_experts.
    load [local_experts] int64: for one token, the chosen ones are counted in it. kv_slots [T] int64: a token with a negative one is
    padding, and gets no expert. physical [E, 1 + copies] int32: see `reference.physical_ids`. scoring, bias [E] fp32: how logits
    choose, if not by their softmax."""
    tokens, device, rule = x.shape[0], x.device, scoring or Scoring()
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    tiles = empty_tiles(top_k, top_k, device) if tokens == 1 else None
    if tokens:
        sm = sm_arch(device)
        _topk_softmax[(tokens,)](
            logits, bias, x, None if pattern is None else pattern.log_weights, kv_slots, physical, weights, ids,
            *(tiles or (None, None, None))[:3], load, experts, x.shape[1], first, local_experts, experts // rule.groups,
            rule.scale if pattern is None else 1.0, TOP_K=top_k, RENORMALIZE=renormalize, DRAWN=pattern is not None,
            SIGMOID=rule.function == "sigmoid", GROUPS=rule.groups, TOP_GROUPS=rule.top_groups, ALONE=tokens == 1,
            COPIES=0 if physical is None else physical.shape[1] - 1, EXPERTS=max(16, triton.next_power_of_2(experts)),
            SLOTS=max(2, triton.next_power_of_2(top_k)), FIELDS=TILE_FIELDS, SM=sm, num_warps=1, launch_pdl=sm >= 90,
        )  # fmt: skip
    return Routing(weights, ids), tiles

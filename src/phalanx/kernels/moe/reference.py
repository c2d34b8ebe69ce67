# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts layer in plain torch: the oracle of the kernels' tests, and the code that runs on CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.experts import ClampedSwiGlu, Scoring
from phalanx.kernels import reference
from phalanx.kernels.gemm import int4_packing
from phalanx.kernels.gemm.int4_packing import Int4Weight
from phalanx.kernels.int8_mm import int8_mm, quantize_int8
from phalanx.kernels.moe import nvfp4_packing, packing
from phalanx.kernels.moe.nvfp4_packing import E2M1, Nvfp4Weight
from phalanx.kernels.moe.tensors import ExpertTensors, Routing, TrafficPattern

BLOCK_K = 128
MXFP4_BLOCK = 32


def topk_softmax(logits: Tensor, top_k: int, renormalize: bool) -> Routing:
    """The `top_k` largest of each row of logits [T, E], by their softmax over all E in fp32; of equal ones the first. renormalize:
    the chosen weights are divided by their sum."""
    scores = torch.softmax(logits.float(), dim=-1)
    ids = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(weights, ids.to(torch.int32))


def grouped_topk(logits: Tensor, bias: Tensor | None, scoring: Scoring, top_k: int, renormalize: bool) -> Routing:
    """The `top_k` experts of each row of logits [T, E] as `Scoring` says, in fp32; of equal ones the first. bias [E] fp32."""
    scores = logits.float().softmax(-1) if scoring.function == "softmax" else logits.float().sigmoid()
    # Without a bias the order of logits is that of their scores, which may round to 1.
    choice = logits.float() if bias is None and scoring.groups == 1 else scores if bias is None else scores + bias
    if scoring.groups > 1:
        by_group = choice.view(len(choice), scoring.groups, -1)
        best = by_group.amax(-1) if scoring.function == "softmax" else by_group.topk(2, dim=-1).values.sum(-1)
        passed = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, scoring.top_groups :]
        choice = by_group.scatter(1, passed.unsqueeze(-1).expand(-1, -1, by_group.shape[2]), float("-inf")).flatten(1)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20).clamp_min(scoring.floor)
    return Routing(weights * scoring.scale, ids.to(torch.int32))


def drawn_topk(x: Tensor, pattern: TrafficPattern, top_k: int) -> Routing:
    """`top_k` distinct experts for each token, drawn by the pattern's shares (Gumbel top-k, arXiv 1903.06059), with equal
    weights. The draw depends on the token's values."""
    uniform = torch.rand(x.shape[0], len(pattern.log_weights), device=x.device).clamp(1e-6, 1 - 1e-6)
    ids = (pattern.log_weights - torch.log(-torch.log(uniform))).topk(top_k, dim=-1).indices
    return Routing(torch.full(ids.shape, 1.0 / top_k, device=x.device), ids.to(torch.int32))


def physical_ids(ids: Tensor, physical: Tensor | None, kv_slots: Tensor | None) -> Tensor:
    """ids [T, k] int32 of a layer's experts -> of its physical experts, which are copies of experts, numbered through the ranks.

    physical [E, 1 + copies] int32: how many copies an expert has, then where they are; None: expert e is physical expert e. A token
    goes to the copy of its KV slot modulo their number: so those of one request alternate between copies, whatever is beside them
    in the batch; without slots, of its number. kv_slots [T] int64: tokens with a negative one are padding, and get -1."""
    if physical is not None:
        rows = physical[ids.long()]
        copy_key = torch.arange(len(ids), device=ids.device) if kv_slots is None else kv_slots.clamp(min=0)
        copy = copy_key.unsqueeze(1) % rows[..., 0]
        ids = rows.gather(2, copy.unsqueeze(2).long() + 1).squeeze(2)
    return ids if kv_slots is None else ids.masked_fill((kv_slots < 0).unsqueeze(1), -1)


def fused_experts(x: Tensor, experts: ExpertTensors, routing: Routing) -> Tensor:
    """x [T, H] -> [T, H]: for each token the weighted sum of its experts' outputs, in fp32 in the order of `routing`, rounded once.
    Experts of other ranks add nothing."""
    total = torch.zeros((x.shape[0], routing.top_k, experts.hidden), dtype=torch.float32, device=x.device)
    for expert in range(experts.count):
        token, slot = torch.where(routing.ids == experts.first + expert)
        if len(token):
            total[token, slot] = _expert(x[token], experts, expert).float()
    return (total * routing.weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _expert(x: Tensor, experts: ExpertTensors, expert: int) -> Tensor:
    """One expert's block, of tokens x [M, H]."""
    if experts.packed is not None:
        first = _packed_linear(x, experts.packed[0], expert)
        return _packed_linear(
            silu_mul(first, gelu=experts.gelu) if experts.gated else relu_squared(first), experts.packed[1], expert
        )
    size = experts.inner * (2 if experts.gated else 1)
    rows = slice(expert * size, (expert + 1) * size)
    gate_up = _linear(x, experts.gate_up[rows], _rows(experts.gate_up_scale, rows), experts.input_scale, experts, 0)
    if experts.gate_up_bias is not None:
        gate_up = gate_up + experts.gate_up_bias[rows]
    rows = slice(expert * experts.hidden, (expert + 1) * experts.hidden)
    if not experts.gated:
        inner = relu_squared(gate_up)
    else:
        inner = silu_mul(gate_up, gelu=experts.gelu) if experts.swiglu is None else clamped_swiglu(gate_up, experts.swiglu)
    out = _linear(inner, experts.down[rows], _rows(experts.down_scale, rows), experts.inner_scale, experts, experts.begin)
    return out if experts.down_bias is None else out + experts.down_bias[rows]


def _packed_linear(x: Tensor, weight: Int4Weight | Nvfp4Weight, expert: int) -> Tensor:
    """x [M, inputs] times the weight of one of the experts."""
    words, scales = weight.words[expert], weight.scales[expert]
    if isinstance(weight, Nvfp4Weight):
        one = weight._replace(words=words, scales=scales, row_scale=weight.row_scale[expert])
        values = nvfp4_packing.dequantized(one, torch.float32)
    else:
        values = int4_packing.dequantized(weight._replace(words=words, scales=scales), x.dtype).float()
    return F.linear(x.float(), values).to(x.dtype)


def count_load(load: Tensor, routing: Routing, first: int) -> None:
    """Add to load [E] int64 how many tokens reach each of experts first .. first + E."""
    local = routing.ids.flatten().long() - first
    load += torch.bincount(local[(local >= 0) & (local < len(load))], minlength=len(load))


def silu_mul(gate_up: Tensor, *, gelu: bool = False) -> Tensor:
    """gate_up [M, 2 * I] -> silu(gate) * up [M, I], or gelu(gate) * up by tanh, in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return ((F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up).to(gate_up.dtype)


def relu_squared(up: Tensor) -> Tensor:
    """up [M, I] -> relu(up)^2, in fp32, rounded once."""
    return F.relu(up.float()).square().to(up.dtype)


def clamped_swiglu(gate_up: Tensor, swiglu: ClampedSwiGlu) -> Tensor:
    """gate_up [M, 2 * I] -> [M, I], see `ClampedSwiGlu`; in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
    return ((up + 1.0) * gate * torch.sigmoid(swiglu.alpha * gate)).to(gate_up.dtype)


def dequantize_mxfp4(blocks: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks [rows, columns / 2] uint8, scale [rows, columns / 32] uint8 (see `ExpertTensors`) -> [rows, columns] in dtype:
    exactly, within the range of bf16 and fp32."""
    values, each = torch.tensor(E2M1, device=blocks.device), packing.codes(packing.untiled(blocks))
    power = (packing.untiled(scale, packing.SCALES_IN_WORD).int() - 127).repeat_interleave(MXFP4_BLOCK, dim=1)[:, : each.shape[1]]
    return torch.ldexp(values[each].double(), power).to(dtype)


def _rows(scale: Tensor | None, rows: slice) -> Tensor | None:
    return None if scale is None else scale[rows]


def _linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, input_scale: Tensor | None, experts: ExpertTensors, begin: int
) -> Tensor:  # fmt: skip
    if scale is None:
        return F.linear(x, weight)
    if experts.int8:
        values, x_scale = quantize_int8(x, input_scale)
        return (int8_mm(values, weight).float() * (x_scale * scale)).to(x.dtype)
    if experts.mxfp4:
        return F.linear(x, dequantize_mxfp4(weight, scale, x.dtype))
    block = BLOCK_K if experts.by_block else 0
    if not experts.fp8_gemm:
        return F.linear(x, reference.dequantize(weight, scale, x.dtype, block=block, begin=begin))
    if block:
        values, x_scale = reference.per_token_group_quant_fp8(x, block, begin)
        return reference.block_scaled_mm(values, x_scale, weight, scale, x.dtype, size=block, begin=begin)
    values, x_scale = reference.quantize_fp8(x, input_scale)
    return reference.scaled_mm(values, x_scale if input_scale is None else input_scale, weight, scale, x.dtype)

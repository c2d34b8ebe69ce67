# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer: routing, and the experts' GEMMs. Triton's kernels on GPUs, and `reference` elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx import kernels
from phalanx.kernels.capabilities import gpu, has_triton
from phalanx.kernels.gemm.block_gemm import per_token_group_quant_fp8
from phalanx.kernels.int8_mm import quantize_int8
from phalanx.kernels.moe import biased_heuristics, heuristics, reference
from phalanx.kernels.moe.heuristics import TileSize
from phalanx.kernels.moe.tensors import ExpertChoice, ExpertTensors, RouterLogits, Routing
from phalanx.kernels.scaled_tensors import Quantized


def router_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, in_fp32: bool = False, batch_invariant: bool = False
) -> Tensor | RouterLogits:  # fmt: skip
    """x [T, H] times weight [E, H] transposed, plus bias [E] -> logits [T, E], summed in fp32 and rounded to x's dtype, or not
    rounded with in_fp32. On a GPU, for few tokens, the last sums are left to the kernel that reads the logits. batch_invariant: as
    of `ExpertTensors`, on a GPU."""
    if batch_invariant:
        from phalanx.kernels.batch_invariant import batch_invariant_gemm

        return batch_invariant_gemm(x.to(weight.dtype), weight, bias, dtype=torch.float32 if in_fp32 else x.dtype)
    if x.is_cuda and has_triton() and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16):
        tiling = heuristics.select_router(x.shape[0], weight.shape[0])
        if tiling is not None and x.shape[0]:
            from phalanx.kernels.moe.router_gemm import router_gemm

            return RouterLogits(router_gemm(x.contiguous(), weight, tiling), bias, torch.float32 if in_fp32 else x.dtype)
    if in_fp32:
        assert bias is None
        return kernels.linear_fp32(x, weight)
    return kernels.linear(x, weight, bias)


def routed_experts(
    x: Tensor, logits: Tensor | RouterLogits | None, experts: ExpertTensors, choice: ExpertChoice, *, load: Tensor | None = None,
    out: Tensor | None = None, quantized: Quantized | None = None, kv_slots: Tensor | None = None, physical: Tensor | None = None,
    plus: Tensor | None = None, expert_scale: Tensor | None = None,
) -> tuple[Tensor, Routing]:  # fmt: skip
    """x [T, H] in 16 or 32 bit, logits [T, experts of the layer] by `router_logits` -> ([T, H], the routing): each token's experts,
    as far as they are in `experts`, weighted by the choice and added up in fp32.

    quantized: x in e4m3, for experts with a scale per row, where the op before has quantized it.
    load [experts of this rank] int64: tokens are counted in it. out: where the sum goes. plus [T, H]: what is added to it.
    kv_slots [T] int64: a token with a negative one is padding: it reaches no expert. physical [experts, 1 + copies] int32: where
    experts are, see `reference.physical_ids`; the numbers in `experts` and in the routing are then of physical experts. None: where
    their numbers say. expert_scale [physical experts] fp32: what multiplies the weights of each, or None. The host reads no value,
    and the same input gives the same bits."""
    if not (x.is_cuda and has_triton()):
        routing = _routing(x, logits, choice, physical, kv_slots)
        if load is not None:
            reference.count_load(load, routing, experts.first)
        total = reference.fused_experts(x, experts, routing if expert_scale is None else scaled(routing, expert_scale))
        total = total if plus is None else total + plus
        return (total if out is None else out.copy_(total)), routing
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert
    from phalanx.kernels.moe.topk_softmax import topk_softmax

    x = x.contiguous()
    routing, tiles = topk_softmax(
        logits, x, first=experts.first, local_experts=experts.count, load=load if len(x) == 1 else None, kv_slots=kv_slots,
        physical=physical, **choice._asdict(),
    )  # fmt: skip
    if expert_scale is not None:
        routing = scaled(routing, expert_scale)
    size = _tile_size(experts, x, choice.top_k, choice.experts)
    if tiles is None and len(x):
        tiles = sort_by_expert(routing.ids, first=experts.first, experts=experts.count, **size._asdict(), load=load)
    out = x.new_empty(x.shape) if out is None else out
    if tiles is None:
        return out, routing
    return run(x, experts, routing, tiles, size, choice.experts, out, quantized, plus), routing


def scaled(routing: Routing, scale: Tensor) -> Routing:
    """The routing with its weights multiplied by those of its experts, scale [experts] fp32."""
    return routing._replace(weights=routing.weights * scale[routing.ids.clamp(min=0).long()])


def route(
    x: Tensor, logits: Tensor | RouterLogits | None, experts: ExpertTensors, choice: ExpertChoice, kv_slots: Tensor | None = None
) -> Routing:  # fmt: skip
    """The routing of `routed_experts` alone."""
    if not (x.is_cuda and has_triton()):
        return _routing(x, logits, choice, None, kv_slots)
    from phalanx.kernels.moe.topk_softmax import topk_softmax

    return topk_softmax(
        logits, x.contiguous(), first=experts.first, local_experts=experts.count, kv_slots=kv_slots, **choice._asdict()
    )[0]  # fmt: skip


def _routing(
    x: Tensor, logits: Tensor | RouterLogits | None, choice: ExpertChoice, physical: Tensor | None, kv_slots: Tensor | None
) -> Routing:  # fmt: skip
    """By `reference`."""
    if choice.pattern is not None:
        weights, ids = reference.drawn_topk(x, choice.pattern, choice.top_k)
    else:
        assert isinstance(logits, Tensor)
        if choice.scoring is None:
            weights, ids = reference.topk_softmax(logits, choice.top_k, choice.renormalize)
        else:
            weights, ids = reference.grouped_topk(logits, choice.bias, choice.scoring, choice.top_k, choice.renormalize)
    return Routing(weights, reference.physical_ids(ids, physical, kv_slots))


def quantized_input(x: Tensor, experts: ExpertTensors) -> Tensor | Quantized:
    """x [T, H] as the experts' first GEMM reads it: in e4m3 where that one takes e4m3; else as it is, as on a CPU. `experts_of`
    gives the same bits for either."""
    if not (x.is_cuda and has_triton() and experts.fp8_gemm):
        return x
    values, scale = _quantized(x.contiguous(), experts, experts.input_scale, 0)
    assert scale is not None
    return Quantized(values, scale)


def experts_of(
    x: Tensor | Quantized, experts: ExpertTensors, routing: Routing, *, num_experts: int, dtype: torch.dtype | None = None,
    load: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [T, H] and its routing -> the sum of `routed_experts` [T, H]. x may be the output of `quantized_input`; the sum is then in
    `dtype`."""
    quantized = x if isinstance(x, Quantized) else None
    if isinstance(x, Quantized):
        x = torch.empty(x.values.shape, dtype=dtype, device=x.values.device)  # gives size and dtype, and is not read
    if not (x.is_cuda and has_triton()):
        assert quantized is None
        if load is not None:
            reference.count_load(load, routing, experts.first)
        return reference.fused_experts(x, experts, routing)
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert

    if not len(x):
        return x.new_empty(x.shape)
    size = _tile_size(experts, x, routing.top_k, num_experts)
    tiles = sort_by_expert(routing.ids, first=experts.first, experts=experts.count, **size._asdict(), load=load)
    return run(x.contiguous(), experts, routing, tiles, size, num_experts, x.new_empty(x.shape), quantized)


def launched(x: Tensor, experts: ExpertTensors, routing: Routing, num_experts: int | None = None) -> Tensor:
    """`reference.fused_experts` by the kernels, on a GPU or in Triton's interpreter. num_experts: of the layer."""
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert

    total = num_experts or experts.count
    size = _tile_size(experts, x, routing.top_k, total)
    tiles = sort_by_expert(routing.ids, first=experts.first, experts=experts.count, **size._asdict())
    return run(x, experts, routing, tiles, size, total, x.new_empty(x.shape))


def run(
    x: Tensor, experts: ExpertTensors, routing: Routing, tiles: tuple[object, ...], size: TileSize, num_experts: int, out: Tensor,
    quantized: Quantized | None = None, plus: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from phalanx.kernels.moe.combine import combine
    from phalanx.kernels.moe.grouped_gemm import grouped_gemm
    from phalanx.kernels.moe.sort_by_expert import Tiles

    assert isinstance(tiles, Tiles)
    all_local = experts.count >= num_experts
    if experts.in_4_bits or experts.gate_up_bias is not None:
        from phalanx.kernels.moe.biased_gemm import biased_experts

        sums = biased_experts(x, experts, tiles, size.pairs, routing.top_k, num_experts)
        return combine(sums, routing, first=experts.first, experts=experts.count, out=out, plus=plus, all_local=all_local)
    first, second = heuristics.expert_tilings(
        len(x), routing.top_k, experts.count, num_experts, experts.hidden, experts.inner, experts.gate_up.element_size(),
        gpu(x.device).num_sms, sm=gpu(x.device).sm, by_block=experts.by_block,
    )  # fmt: skip
    if experts.batch_invariant:
        first = second = heuristics.batch_invariant_tiling(experts.gate_up.element_size(), gpu(x.device).sm)
    common = {"top_k": routing.top_k, "experts": experts.count, "dtype": x.dtype}
    values, scale = quantized or _quantized(x, experts, experts.input_scale, 0)
    inner = grouped_gemm(
        values, scale, experts.gate_up, experts.gate_up_scale, tiles, first,
        activation=experts.activation, **common,  # type: ignore[arg-type]
    )  # fmt: skip
    # Rows of pairs with other ranks' experts are behind those of this one's, and nothing has written them.
    counts = None if all_local else tiles.counts
    values, scale = _quantized(inner, experts, experts.inner_scale, experts.begin, counts)
    sums = grouped_gemm(
        values, scale, experts.down, experts.down_scale, tiles, second, begin=experts.begin, **common,  # type: ignore[arg-type]
    )  # fmt: skip
    return combine(sums, routing, first=experts.first, experts=experts.count, out=out, plus=plus, all_local=all_local)


def _tile_size(experts: ExpertTensors, x: Tensor, top_k: int, num_experts: int) -> TileSize:
    if experts.in_4_bits or experts.gate_up_bias is not None:
        return TileSize(biased_heuristics.tile_pairs(len(x), top_k, num_experts, in_4_bits=experts.in_4_bits))
    if experts.batch_invariant:
        return heuristics.BATCH_INVARIANT
    return heuristics.tile_size(len(x), top_k, num_experts, gpu(x.device).sm)


def _quantized(
    x: Tensor, experts: ExpertTensors, static: Tensor | None, begin: int, counts: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """x as the next GEMM takes it, and its scales; of the first counts[1] rows alone, or of all."""
    if experts.int8:
        return quantize_int8(x, static)
    if not experts.fp8_gemm:
        return x, None
    if experts.by_block:
        return per_token_group_quant_fp8(x, begin, counts)
    values, scale = kernels.quantize_fp8(x, static, counts)
    return values, scale if static is None else static

# SPDX-License-Identifier: Apache-2.0
"""The kernels of a mixture-of-experts layer: in Triton's interpreter against the reference, and compiled without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from phalanx.config.experts import Scoring
from phalanx.kernels import reference as ops
from phalanx.kernels.int8_mm import quantize_int8
from phalanx.kernels.moe import dispatch, heuristics, reference
from phalanx.kernels.moe.heuristics import ExpertTiling, TileSize
from phalanx.kernels.moe.tensors import ExpertChoice, ExpertTensors, RouterLogits, Routing, TrafficPattern
from tests.support.kernels_compiled import compiled_as, spilled
from tests.support.kernels_interpreted import FILLED, filled_memory, interpret
from tests.support.kernels_routing import routings

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

KINDS = ("plain", "row", "static", "block", "widened row", "widened block", "int8", "int8 static")
"""Of weights: not quantized; e4m3 with scales per row and per token, with static scales of the inputs, with scales per block; e4m3
that is widened because the device has no FP8 GEMM; and int8, with scales of the inputs per token, and static ones."""


def quantized(weight: Tensor, by_block: bool, begin: int) -> tuple[Tensor, Tensor]:
    if by_block:
        return ops.per_token_group_quant_fp8(weight, 128, begin)
    values, scale = ops.quantize_fp8(weight)
    return values, scale.squeeze(-1)


def experts_of(
    kind: str, *, count: int = 4, first: int = 0, hidden: int = 144, inner: int = 80, begin: int = 0, device: str = "cpu",
    dtype: torch.dtype = torch.float32, gated: bool = True,
) -> ExpertTensors:  # fmt: skip
    gate_up = torch.randn(count * (2 if gated else 1) * inner, hidden, device=device) / hidden**0.5
    down = torch.randn(count * hidden, inner, device=device) / inner**0.5
    if kind == "plain":
        return ExpertTensors(count, first, gate_up.to(dtype), down.to(dtype), gated=gated)
    if "int8" in kind:
        pairs = (quantize_int8(weight) for weight in (gate_up, down))
        (gate_up, gate_up_scale), (down, down_scale) = ((values, scale.squeeze(-1)) for values, scale in pairs)
        static = torch.tensor(0.03, device=device) if "static" in kind else None
        return ExpertTensors(count, first, gate_up, down, gate_up_scale, down_scale, static, static, gated=gated)
    by_block = "block" in kind
    gate_up, gate_up_scale = quantized(gate_up, by_block, 0)
    down, down_scale = quantized(down, by_block, begin)
    static = torch.tensor(0.02, device=device) if kind == "static" else None
    return ExpertTensors(
        count, first, gate_up, down, gate_up_scale, down_scale, static, static, begin if by_block else 0, "widened" not in kind,
        gated=gated,
    )  # fmt: skip


def check_experts() -> None:
    torch.manual_seed(0)
    for number, (kind, tokens) in enumerate(itertools.product(KINDS, (3, 40))):
        experts = experts_of(kind, begin=48 if "block" in kind else 0)
        for routing in routings(tokens, experts.count, 2) if number == 0 else [routings(tokens, experts.count, 2)[number % 4]]:
            x = torch.randn(tokens, experts.hidden)
            wanted, output = reference.fused_experts(x, experts, routing), dispatch.launched(x, experts, routing)
            torch.testing.assert_close(output, wanted, rtol=2e-2 if experts.fp8_gemm or experts.int8 else 1e-4, atol=2e-3)


def check_experts_without_a_gate() -> None:
    torch.manual_seed(0)
    for number, kind in enumerate(KINDS):
        experts = experts_of(kind, begin=48 if "block" in kind else 0, gated=False)
        routing, x = routings(20, experts.count, 2)[number % 4], torch.randn(20, experts.hidden)
        wanted, output = reference.fused_experts(x, experts, routing), dispatch.launched(x, experts, routing)
        torch.testing.assert_close(output, wanted, rtol=2e-2 if experts.fp8_gemm or experts.int8 else 1e-4, atol=4e-3)


def check_experts_with_gelu() -> None:
    torch.manual_seed(0)
    experts = replace(experts_of("plain"), gelu=True)
    routing, x = routings(20, experts.count, 2)[0], 3.0 * torch.randn(20, experts.hidden)
    wanted, output = reference.fused_experts(x, experts, routing), dispatch.launched(x, experts, routing)
    assert (wanted - reference.fused_experts(x, replace(experts, gelu=False), routing)).abs().max() > 0.1
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


def check_other_ranks_add_the_rest() -> None:
    torch.manual_seed(1)
    experts = experts_of("plain", count=6)
    parts = [
        ExpertTensors(2, first, experts.gate_up[first * 160 : (first + 2) * 160], experts.down[first * 144 : (first + 2) * 144])
        for first in (0, 2, 4)
    ]
    for routing in routings(9, 6, 3)[:2]:
        x = torch.randn(9, experts.hidden)
        output = sum(dispatch.launched(x, part, routing, num_experts=6) for part in parts)
        torch.testing.assert_close(output, reference.fused_experts(x, experts, routing), rtol=1e-4, atol=1e-4)


def check_pairs_of_other_ranks_are_behind() -> None:
    """Those of this rank come first in sorted order; how many they are is told, so that nothing reads what stands behind them."""
    from phalanx.kernels.gemm.per_token_group_quant import per_token_group_quant_fp8
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert

    torch.manual_seed(8)
    for routing in routings(30, 6, 3):
        for first, count in ((0, 6), (0, 2), (2, 3), (5, 1)):
            tiles = sort_by_expert(routing.ids, first=first, experts=count, pairs=16)
            local = [
                pair
                for expert in range(first, first + count)
                for pair, chosen in enumerate(routing.ids.flatten().tolist())
                if chosen == expert
            ]
            assert int(tiles.counts[1]) == len(local)
            assert tiles.pairs[: len(local)].tolist() == local
    x = torch.randn(90, 256)
    with filled_memory():
        values, scales = per_token_group_quant_fp8(x, counts=tiles.counts)
    wanted, wanted_scales = ops.per_token_group_quant_fp8(x[: len(local)], 128)
    assert torch.equal(values[: len(local)].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales[: len(local)], wanted_scales)
    assert (values[len(local) :].float() == FILLED).all()
    assert (scales[len(local) :] == FILLED).all()


def check_pairs_are_sorted_alike() -> None:
    """The same lists from all kernels: of thousands of pairs, and of a few that are cut as many would be, or compared."""
    from phalanx.kernels.moe import sort_by_expert as module

    torch.manual_seed(9)
    few, compared = {"ONE_KERNEL_PAIRS": 16, "MAX_CHUNK": 32, "MAX_SEGMENTS": 4}, {"MANY_EXPERTS": 0, "CHUNK": 32}
    as_ever = {name: getattr(module, name) for name in few}
    for tokens, limits in ((3000, as_ever), (100, few), (9, few), (100, compared), (9, compared)):
        ids = torch.randint(-1, 6, (tokens, 3), dtype=torch.int32)
        for first, count in ((0, 6), (2, 3)):
            loads = [torch.arange(count), torch.arange(count)]
            cut: dict[str, Any] = {"first": first, "experts": count, "pairs": 16, "extra": 8}
            with mock.patch.object(module, "ONE_KERNEL_PAIRS", 1 << 30):
                wanted = module.sort_by_expert(ids, **cut, load=loads[0])
            with mock.patch.multiple(module, **limits):
                sorted_pairs = module.sort_by_expert(ids, **cut, load=loads[1])
            tiles, pairs = wanted.counts.tolist()
            assert sorted_pairs.counts.tolist() == [tiles, pairs]
            assert torch.equal(sorted_pairs.pairs[:pairs], wanted.pairs[:pairs])
            assert torch.equal(sorted_pairs.tiles[:tiles, :3], wanted.tiles[:tiles, :3])
            assert torch.equal(loads[0], loads[1])


def check_split_columns() -> None:
    """Split-K, tiles of 128 rows and tokens, and rows that do not fill a tile."""
    from phalanx.kernels.moe.combine import combine
    from phalanx.kernels.moe.grouped_gemm import grouped_gemm
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert

    torch.manual_seed(2)
    experts = experts_of("plain", hidden=208, inner=400)
    tilings = ExpertTiling(32, 16, 4, 2, 4, parts=3), ExpertTiling(128, 128, 8, 2, 1)
    for routing, tiling in zip(routings(70, 4, 2)[1:3], tilings, strict=True):
        x = torch.randn(70, 208)
        tiles = sort_by_expert(routing.ids, first=0, experts=4, pairs=tiling.tokens)
        common: dict[str, Any] = {"top_k": 2, "experts": 4, "dtype": torch.float32}
        inner = grouped_gemm(x, None, experts.gate_up, None, tiles, tiling._replace(parts=1), activation="silu", **common)
        sums = grouped_gemm(inner, None, experts.down, None, tiles, tiling, **common)
        assert sums.shape[0] == (2 if tiling.parts == 3 else 1)
        output = combine(sums, routing, first=0, experts=4, out=torch.empty_like(x))
        torch.testing.assert_close(output, reference.fused_experts(x, experts, routing), rtol=1e-4, atol=1e-4)


def check_tiles_with_more_than_they_hold() -> None:
    """Pairs of an expert that are no multiple of a tile: the last tile has up to `extra` more, and the sums are the same."""
    from phalanx.kernels.moe.combine import combine
    from phalanx.kernels.moe.grouped_gemm import grouped_gemm
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert

    torch.manual_seed(7)
    sizes = (0, 1, 16, 17, 24, 25, 40, 41, 57)
    flat = torch.cat([torch.full((size,), expert, dtype=torch.int32) for expert, size in enumerate(sizes)])
    ids = flat[torch.randperm(len(flat))][:, None].contiguous()
    routing = Routing(torch.rand(len(ids), 1), ids)
    for kind, rows, (tokens, extra) in (("plain", 32, (16, 8)), ("row", 32, (16, 16)), ("block", 16, (16, 8))):
        tiles = sort_by_expert(ids, first=0, experts=len(sizes), pairs=tokens, extra=extra)
        cut = [tile[:3] for tile in tiles.tiles[: int(tiles.counts[0])].tolist()]
        assert cut == [
            [expert, sum(sizes[:expert]) + at, tokens if size - at > tokens + extra else size - at]
            for expert, size in enumerate(sizes)
            for at in range(0, max(size - extra, min(size, 1)), tokens)
        ]
        experts, x = experts_of(kind, count=len(sizes)), torch.randn(len(ids), 144)
        tiling = ExpertTiling(rows, tokens, 4, 2, 2, extra=extra)
        common: dict[str, Any] = {"top_k": 1, "experts": len(sizes), "dtype": torch.float32}
        values, scale = dispatch._quantized(x, experts, None, 0)
        inner = grouped_gemm(values, scale, experts.gate_up, experts.gate_up_scale, tiles, tiling, activation="silu", **common)
        values, scale = dispatch._quantized(inner, experts, None, 0)
        sums = grouped_gemm(values, scale, experts.down, experts.down_scale, tiles, tiling, **common)
        output = combine(sums, routing, first=0, experts=len(sizes), out=torch.empty_like(x))
        wanted = reference.fused_experts(x, experts, routing)
        torch.testing.assert_close(output, wanted, rtol=2e-2 if experts.fp8_gemm or experts.int8 else 1e-4, atol=2e-3)


def check_topk() -> None:
    from phalanx.kernels.moe.topk_softmax import topk_softmax

    torch.manual_seed(3)
    for experts, top_k, renormalize in ((8, 2, True), (60, 6, False), (128, 8, True), (5, 1, False)):
        for tokens in (1, 3):
            logits = torch.randn(tokens, experts)
            logits[:, 3] = logits[:, 1]  # the first of equal ones
            routing, tiles = topk_softmax(
                logits, torch.zeros(tokens, 16), top_k, experts=experts, renormalize=renormalize, first=0, local_experts=experts
            )
            wanted = reference.topk_softmax(logits, top_k, renormalize)
            assert torch.equal(routing.ids, wanted.ids)
            torch.testing.assert_close(routing.weights, wanted.weights)
            assert (tiles is not None) == (tokens == 1)
    assert tiles is None


def check_topk_in_groups() -> None:
    """Softmax and sigmoid, with a bias and without, of all experts and of the best groups, of any size."""
    from phalanx.kernels.moe.topk_softmax import topk_softmax

    torch.manual_seed(3)
    for experts, top_k, bias, scoring in (
        (160, 6, False, Scoring("softmax", 8, 3, 16.0)), (64, 6, False, Scoring("softmax")),
        (256, 8, True, Scoring("sigmoid", 8, 4, 2.5)), (24, 3, True, Scoring("sigmoid", 4, 1, 2.5)),
        (12, 4, True, Scoring("sigmoid")), (64, 6, True, Scoring("softmax")), (20, 4, True, Scoring("softmax", floor=0.3)),
    ):  # fmt: skip
        for tokens, renormalize in itertools.product((1, 3), (False, True)):
            logits = torch.randn(tokens, experts)
            logits[:, 3] = logits[:, 1]
            values = torch.randn(experts) - 1.0 if bias else None
            routing, tiles = topk_softmax(
                logits, torch.zeros(tokens, 16), top_k, experts=experts, renormalize=renormalize, first=0, local_experts=experts,
                scoring=scoring, bias=values,
            )  # fmt: skip
            wanted = reference.grouped_topk(logits, values, scoring, top_k, renormalize)
            assert torch.equal(routing.ids, wanted.ids)
            torch.testing.assert_close(routing.weights, wanted.weights)
            assert (tiles is not None) == (tokens == 1)


def check_one_token_needs_no_sort() -> None:
    """On the ranks of experts that are split by number, of which some have none of the token's: no tile is of another's pair."""
    from phalanx.kernels.moe.topk_softmax import topk_softmax

    torch.manual_seed(4)
    layer = experts_of("plain", count=8)
    logits, x = torch.randn(1, 8), torch.randn(1, 144)
    logits[0, [2, 5, 7]] += 9.0
    total, sizes = torch.zeros_like(x), []
    for first, count in ((0, 2), (2, 4), (6, 2)):
        part = ExpertTensors(
            count, first, layer.gate_up[first * 160 : (first + count) * 160], layer.down[first * 144 : (first + count) * 144]
        )
        routing, tiles = topk_softmax(logits, x, 3, experts=8, renormalize=True, first=first, local_experts=count)
        assert tiles is not None
        local = [(int(expert) - first, slot) for slot, expert in enumerate(routing.ids[0]) if first <= expert < first + count]
        sizes.append(int(tiles.counts[0]))
        assert int(tiles.counts[1]) == 3  # they are not sorted: the only local one may be the last
        assert tiles.tiles[: sizes[-1], :3].tolist() == [[expert, slot, 1] for expert, slot in local]
        output = dispatch.run(x, part, routing, tiles, TileSize(16), 8, torch.empty_like(x))
        torch.testing.assert_close(output, reference.fused_experts(x, part, routing), rtol=1e-4, atol=1e-4)
        total += output
    assert sizes == [0, 2, 1]
    torch.testing.assert_close(total, reference.fused_experts(x, layer, routing), rtol=1e-4, atol=1e-4)


def check_padding_and_copies() -> None:
    """Padding reaches no expert, and the tokens of an expert with copies take turns, in the sorted and in the alone form."""
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert
    from phalanx.kernels.moe.topk_softmax import topk_softmax

    torch.manual_seed(6)
    physical = torch.tensor([[1, 4, -1], [2, 0, 5], [1, 2, -1], [1, 1, -1], [2, 3, 6]], dtype=torch.int32)
    for places in (None, physical, physical[[0, 2, 3, 0, 2]][:, :2].contiguous()):
        for tokens in (1, 2, 7):
            logits, kv_slots = torch.randn(tokens, 5), torch.arange(tokens) % 3 - int(tokens > 1)
            options: dict[str, Any] = {"experts": 5, "renormalize": True, "first": 0, "local_experts": 4, "kv_slots": kv_slots}
            load = torch.zeros(4, dtype=torch.int64)
            routing, tiles = topk_softmax(
                logits, torch.zeros(tokens, 16), 2, physical=places, load=load if tokens == 1 else None, **options
            )
            wanted = reference.physical_ids(reference.topk_softmax(logits, 2, True).ids, places, kv_slots)
            assert torch.equal(routing.ids, wanted)
            assert (routing.ids[kv_slots < 0] == -1).all()
            if tiles is None:
                sort_by_expert(routing.ids, first=0, experts=4, pairs=16, load=load)
            expected = torch.zeros(4, dtype=torch.int64)
            reference.count_load(expected, routing, 0)
            assert torch.equal(load, expected)
    assert reference.physical_ids(torch.ones(4, 1, dtype=torch.int32), physical, None).flatten().tolist() == [0, 5, 0, 5]


def check_drawn() -> None:
    from phalanx.kernels.moe.topk_softmax import topk_softmax

    torch.manual_seed(5)
    x = torch.randn(100, 32)
    for exponent in (0.0, 1.2):
        pattern = TrafficPattern.power_law(16, exponent, 0, torch.device("cpu"))
        routing, _ = topk_softmax(None, x, 2, experts=16, renormalize=False, first=0, local_experts=16, pattern=pattern)
        assert (routing.ids[:, 0] != routing.ids[:, 1]).all()
        load = torch.bincount(routing.ids.flatten().long(), minlength=16).float()
        expected = torch.softmax(pattern.log_weights, 0) * 200
        if exponent:
            assert load.argmax() == expected.argmax()
            assert load.max() > 2.5 * load.mean()
        else:
            assert load.max() < 1.7 * load.mean()


CHECKS = [
    check_experts, check_experts_without_a_gate, check_experts_with_gelu, check_other_ranks_add_the_rest,
    check_pairs_of_other_ranks_are_behind, check_pairs_are_sorted_alike, check_split_columns,
    check_tiles_with_more_than_they_hold, check_topk, check_topk_in_groups, check_one_token_needs_no_sort,
    check_padding_and_copies, check_drawn,
]  # fmt: skip


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


def compiled_kernel(tiling: ExpertTiling, arch: int, kind: str, *, first: str, full: bool = True) -> Any:
    from phalanx.kernels.moe.grouped_gemm import FEW
    from phalanx.kernels.moe.grouped_gemm import _grouped_gemm as kernel

    by_block, widen = "block" in kind, "widened" in kind
    x_scale = "none" if kind == "plain" or widen else "block" if by_block else "token"
    constants: dict[str, Any] = {
        "TOP_K": 2, "FIRST": first, "BY_BLOCK": by_block, "X_SCALE": x_scale, "WIDEN": widen, "SKIP": 0, "FULL": full,
        "PARTS": tiling.parts > 1, "ROWS": tiling.rows,
        "TOKENS": tiling.tokens, "EXTRA": tiling.extra, "FEW": FEW if tiling.tokens > 2 * FEW else 0, "BESIDE": tiling.beside,
        "IN_ORDER": tiling.parts > 1, "FIELDS": 4, "SM": arch,
    }  # fmt: skip
    out = "fp32" if tiling.parts > 1 else "bf16"
    pointers = {"x": "fp8e4nv", "x_scale": "fp32", "weight": "fp8e4nv", "scale": "fp32", "out": out}
    if x_scale == "none":
        pointers |= {"x": "bf16", "weight": "u8" if widen else "bf16"}
        constants["x_scale"] = None
    if kind == "plain":
        constants["scale"] = None
    if kind == "int8":
        pointers |= {"x": "i8", "weight": "i8"}
    pointers |= dict.fromkeys(("pairs", "tiles", "num_tiles"), "i32")
    kinds = {name: "*" + kind for name, kind in pointers.items()}
    integers = ("x_token_stride", "x_block_stride", "count", "tiles_most", "outputs", "inputs", "blocks", "part_blocks")
    kinds |= dict.fromkeys(integers, "i32")
    aligned = [name for name in (*pointers, "outputs", "inputs") if name not in constants]
    return compiled_as(kernel, kinds, constants, arch, aligned=aligned, num_warps=tiling.warps, num_stages=tiling.stages)


def test_warmup_has_every_variant() -> None:
    """Steps of the warm-up's counts launch all that any count launches."""

    def variants(tokens: int, experts: int, top_k: int, outputs: int, ranks: int) -> tuple[object, ...]:
        first, second = heuristics.expert_tilings(tokens, top_k, experts // ranks, experts, 4096, outputs, 1, 132)
        return first, second._replace(parts=min(2, second.parts))

    for experts, top_k, outputs, ranks in (
        (8, 2, 14336, 1), (8, 2, 14336, 4), (8, 2, 14336, 8), (128, 8, 768, 1), (128, 8, 96, 1), (128, 8, 1536, 4),
        (60, 6, 1408, 1), (60, 6, 1408, 10),
    ):  # fmt: skip
        launched = [variants(tokens, experts, top_k, outputs, ranks) for tokens in heuristics.warmup_token_counts(8192)]
        of_any = [variants(tokens, experts, top_k, outputs, ranks) for tokens in range(1, 8193)]
        for part in range(2):
            assert {each[part] for each in of_any} == {each[part] for each in launched}


SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@pytest.mark.parametrize(
    ("arch", "kind", "tokens", "experts"),
    [
        (90, "row", 1, 8), (90, "row", 128, 8), (90, "row", 256, 2), (90, "row", 4096, 8), (90, "block", 256, 8),
        (90, "block", 4096, 8), (90, "plain", 4096, 8), (90, "widened row", 16, 8), (80, "plain", 1, 8),
        (80, "widened block", 64, 8), (100, "row", 1, 8), (100, "row", 4096, 8), (80, "int8", 64, 8), (90, "int8", 1, 8),
        (90, "int8", 4096, 8),
    ],
)  # fmt: skip
def test_compiles(arch: int, kind: str, tokens: int, experts: int) -> None:
    """experts: of the 8 of a layer that a rank has."""
    itemsize = 2 if kind == "plain" else 1
    first, second = heuristics.expert_tilings(tokens, 2, experts, 8, 4096, 14336, itemsize, 132, sm=arch, by_block="block" in kind)
    assert second.parts == (1 if experts == 8 and tokens > 1 else 2)
    for tiling, place in ((first, "silu"), (second, ""), *([(first, "squared"), (first, "gelu")] if kind == "plain" else [])):
        kernel = compiled_kernel(tiling, arch, kind, first=place)
        assert kernel.metadata.shared <= SHARED_MEMORY[arch]
        assert spilled(kernel) == 0
        assert {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch] in kernel.asm["ptx"]
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (arch >= 90)


@pytest.mark.parametrize(
    ("arch", "alone", "experts", "top_k"),
    [(90, False, 8, 2), (90, True, 8, 2), (90, False, 128, 8), (90, True, 128, 8), (80, False, 128, 8), (100, True, 8, 2)],
)
def test_choice_and_sort_compile(arch: int, alone: bool, experts: int, top_k: int) -> None:
    """As they are launched: the choice of one token, which makes the tiles itself, and of many, in one warp; the sort, of many
    pairs by two kernels; and the sum."""
    from phalanx.kernels.moe.combine import _combine
    from phalanx.kernels.moe.sort_by_expert import TILE_FIELDS, _count_segments, _sort_by_expert, _sort_by_pairs, _sort_segments
    from phalanx.kernels.moe.topk_softmax import _topk_softmax

    lists = {"pairs": "*i32", "tiles": "*i32", "counts": "*i32", "load": "*i64"}
    pointers = {
        "logits": "*fp32", "x": "*bf16", "weights": "*fp32", "ids": "*i32", "kv_slots": "*i64", "scale": "fp32", "floor": "fp32",
        **lists,
    }  # fmt: skip
    constants: dict[str, Any] = {
        **dict.fromkeys(("logit_bias", "bias", "log_weights", "physical")), "TOP_K": top_k, "RENORMALIZE": True, "DRAWN": False,
        "SIGMOID": False, "GROUPS": 1, "TOP_GROUPS": 1, "GROUP_SIZE": experts, "GROUP_LANES": experts, "ALONE": alone, "COPIES": 0,
        "EXPERTS": max(16, experts), "SLOTS": top_k, "FIELDS": TILE_FIELDS, "PARTS": 2, "KIND": "fp32", "SM": arch,
    } | ({} if alone else dict.fromkeys(lists))  # fmt: skip
    kinds = pointers | dict.fromkeys(("tokens", "experts", "hidden", "first", "local_experts"), "i32")
    assert spilled(compiled_as(_topk_softmax, kinds, constants, arch, num_warps=1)) == 0
    if not alone:
        counted = {"BINS": max(16, 2 * experts), "CHUNK": 4096, "SM": arch}
        cut = {"TOKENS": 64, "EXTRA": 16, "FIELDS": TILE_FIELDS}
        kinds = {**lists, "ids": "*i32", "table": "*i32", **dict.fromkeys(("count", "segments", "first", "experts"), "i32")}
        for kernel, constants in (
            (_sort_by_expert, counted | cut), (_count_segments, counted | {"CHUNKS": 1}),
            (_sort_by_pairs, cut | {"HIGH": 32, "LOW": 16, "CHUNK": 256, "OWN": 16, "SM": arch}),
            (_sort_segments, counted | cut | {"SEGMENTS": 16, "CHUNKS": 1}),
        ):  # fmt: skip
            assert spilled(compiled_as(kernel, kinds, constants, arch, num_warps=8)) <= 8  # on Blackwell, a call of its own
        for many in (False, True):
            kinds = {"values": "*fp32" if many else "*bf16", "weights": "*fp32", "ids": "*i32", "out": "*bf16"}
            kinds |= dict.fromkeys(("tokens", "first", "experts", "width"), "i32")
            constants = {"plus": None, "ALL_LOCAL": not many, "TOP_K": top_k, "PARTS": 4 if many else 1, "SM": arch}
            constants["BLOCK"] = 512 if many else 1024
            aligned = [name for name, kind in kinds.items() if kind.startswith("*")] + ["width"]
            assert spilled(compiled_as(_combine, kinds, constants, arch, aligned=aligned)) == 0


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", ["plain", "row", "block"])
@pytest.mark.parametrize("tokens", [1, 40, 300, 700, 6000])
def test_ranks_with_some_of_the_experts_on_gpu(kind: str, tokens: int) -> None:
    """Their outputs add up to that of all experts; at 300 and 700 tokens two of eight experts leave programs idle."""
    torch.manual_seed(9)
    hidden, inner = 1024, 2048
    layer = experts_of(kind, count=8, hidden=hidden, inner=inner, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(tokens, 8, device="cuda")

    def part(first: int, count: int) -> ExpertTensors:
        rows = slice(first * 2 * inner, (first + count) * 2 * inner), slice(first * hidden, (first + count) * hidden)
        scales = (
            None if scale is None else scale[each]
            for scale, each in zip((layer.gate_up_scale, layer.down_scale), rows, strict=True)
        )  # fmt: skip
        return ExpertTensors(count, first, layer.gate_up[rows[0]], layer.down[rows[1]], *scales, fp8_gemm=layer.fp8_gemm)

    total = torch.zeros(tokens, hidden, device="cuda")
    for first, count in ((0, 2), (2, 4), (6, 2)):
        output, routing = dispatch.routed_experts(x, logits, part(first, count), ExpertChoice(2, 8, True))
        total += output.float()
    wanted = reference.fused_experts(x, layer, routing).float()
    assert (total - wanted).norm() < (3e-2 if kind != "plain" else 1e-2) * wanted.norm()


@pytest.mark.gpu1
@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(2, 8, 4096), (64, 128, 2048), (100, 128, 4096), (128, 256, 7168)])
def test_the_router_on_gpu(tokens: int, experts: int, hidden: int) -> None:
    x, weight = (torch.randn(size, hidden, device="cuda", dtype=torch.bfloat16) for size in (tokens, experts))
    logits = dispatch.router_logits(x, weight, in_fp32=True)
    assert isinstance(logits, RouterLogits)
    wanted = x.double() @ weight.double().t()
    assert (logits.parts.double().sum(0) - wanted).norm() < 1e-5 * wanted.norm()

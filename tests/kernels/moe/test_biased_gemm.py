# SPDX-License-Identifier: Apache-2.0
"""Experts with biases, in 16 bit and in MXFP4: in Triton's interpreter against the reference, and compiled without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from phalanx.config.experts import ClampedSwiGlu
from phalanx.kernels.moe import biased_heuristics, dispatch, reference
from phalanx.kernels.moe.heuristics import ExpertTiling, TileSize
from phalanx.kernels.moe.packing import SCALES_IN_WORD, packed, tiled
from phalanx.kernels.moe.tensors import ExpertTensors
from tests.support.kernels_compiled import compiled_as, spilled
from tests.support.kernels_interpreted import interpreted, let_loops_begin_anywhere
from tests.support.kernels_routing import routings

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

SWIGLU = ClampedSwiGlu(1.702, 1.5)


def experts_of(
    kind: str, *, count: int = 4, first: int = 0, hidden: int = 160, inner: int = 96, dtype: torch.dtype = torch.float32,
    down_bias: bool = True,
) -> ExpertTensors:  # fmt: skip
    """hidden: one turn of columns and a quarter, whose second word of scales has one; inner: less than a turn."""
    biases = torch.randn(count * 2 * inner).to(dtype), torch.randn(count * hidden).to(dtype) if down_bias else None
    rest = {"gate_up_bias": biases[0], "down_bias": biases[1], "swiglu": SWIGLU}
    if kind == "plain":
        gate_up, down = torch.randn(count * 2 * inner, hidden) / hidden**0.5, torch.randn(count * hidden, inner) / inner**0.5
        return ExpertTensors(count, first, gate_up.to(dtype), down.to(dtype), **rest)  # type: ignore[arg-type]
    parts = []
    for rows, columns in ((count * 2 * inner, hidden), (count * hidden, inner)):
        parts.append(torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8))
        scale = torch.zeros(rows, -(-columns // 128) * 4, dtype=torch.uint8)
        scale[:, : columns // 32] = torch.randint(120, 125, (rows, columns // 32))
        parts.append(tiled(scale, SCALES_IN_WORD))
    return ExpertTensors(count, first, parts[0], parts[2], parts[1], parts[3], **rest)  # type: ignore[arg-type]


def check_experts() -> None:
    """One token, few and many; drawn experts, the same for all, one that one token reaches, and experts of other ranks."""
    torch.manual_seed(0)
    for number, (kind, tokens) in enumerate((("plain", 5), ("mxfp4", 20), ("mxfp4", 1), ("mxfp4", 5))):
        experts = experts_of(kind)
        routing, x = routings(tokens, experts.count, 2)[number], torch.randn(tokens, experts.hidden)
        wanted, output = reference.fused_experts(x, experts, routing), dispatch.launched(x, experts, routing)
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


def check_every_part_changes_the_outcome() -> None:
    """Biases, activation and scales: what the check above compares is not neutral."""
    torch.manual_seed(1)
    experts, routing, x = experts_of("mxfp4"), routings(2, 4, 2)[0], torch.randn(2, 160)
    output = dispatch.launched(x, experts, routing)
    for changed in (
        replace(experts, gate_up_bias=experts.gate_up_bias * 1.1), replace(experts, down_bias=None), replace(experts, swiglu=None),
        replace(experts, swiglu=SWIGLU._replace(limit=2.0)), replace(experts, down_scale=experts.down_scale + 1),
    ):  # fmt: skip
        wanted = reference.fused_experts(x, changed, routing)
        assert (wanted - output).abs().max() > 0.01
        if changed.down_bias is None or changed.swiglu is None:
            torch.testing.assert_close(dispatch.launched(x, changed, routing), wanted, rtol=1e-4, atol=1e-4)


def check_bf16() -> None:
    torch.manual_seed(2)
    experts = experts_of("mxfp4", dtype=torch.bfloat16, down_bias=False)
    routing, x = routings(3, 4, 2)[0], torch.randn(3, 160).bfloat16()
    wanted, output = reference.fused_experts(x, experts, routing), dispatch.launched(x, experts, routing)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, wanted, rtol=2e-2, atol=5e-2)


def check_split_columns() -> None:
    """Split-K, whose bias is added once; and tiles of 128 tokens, and rows that do not fill a tile."""
    from phalanx.kernels.moe.biased_gemm import biased_gemm
    from phalanx.kernels.moe.combine import combine
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert

    torch.manual_seed(3)
    experts = experts_of("mxfp4", hidden=96, inner=416)
    for routing, tiling in zip(
        routings(50, 4, 2)[1:3], (ExpertTiling(32, 16, 4, 2, 4, parts=3), ExpertTiling(128, 128, 8, 2, 1)), strict=True
    ):
        x = torch.randn(50, 96)
        tiles = sort_by_expert(routing.ids, first=0, experts=4, pairs=tiling.tokens)
        of_layer: dict[str, Any] = {"top_k": 2, "experts": 4, "swiglu": SWIGLU}
        gate_up, down = (experts.gate_up_scale, experts.gate_up_bias), (experts.down_scale, experts.down_bias)
        inner = biased_gemm(x, experts.gate_up, *gate_up, tiles, tiling._replace(parts=1), gated=True, **of_layer)
        sums = biased_gemm(inner, experts.down, *down, tiles, tiling, gated=False, **of_layer)
        assert sums.shape[0] == (2 if tiling.parts == 3 else 1)
        shared, wanted = torch.randn(50, 96), reference.fused_experts(x, experts, routing)
        for plus, expected in ((None, wanted), (shared, wanted + shared)):
            output = combine(sums, routing, first=0, experts=4, out=torch.empty_like(x), plus=plus)
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-3)


def check_one_token() -> None:
    """The choice of a token that is alone makes its tiles: with experts of this rank between others', and with none."""
    from phalanx.kernels.moe.topk_softmax import topk_softmax

    torch.manual_seed(5)
    every, x, logits = experts_of("mxfp4", count=8), torch.randn(1, 160), torch.randn(1, 8)
    chosen = logits.topk(3).indices[0].tolist()
    for first, count in ((0, 8), (chosen[0], 1), (2, 4), (next(e for e in range(8) if e not in chosen), 1)):
        tensors = {name: value for name, value in vars(every).items() if isinstance(value, torch.Tensor)}
        of_part = {name: torch.cat(value.chunk(8)[first : first + count]) for name, value in tensors.items()}
        part = replace(every, count=count, first=first, **of_part)
        routing, tiles = topk_softmax(logits, x, 3, experts=8, renormalize=True, first=first, local_experts=count)
        assert tiles is not None
        assert tiles.in_order
        output = dispatch.run(x, part, routing, tiles, TileSize(8), 8, torch.empty_like(x))
        torch.testing.assert_close(output, reference.fused_experts(x, part, routing), rtol=1e-4, atol=1e-4)


def check_values_of_mxfp4() -> None:
    """Every byte under scales of the whole range, exactly: an identity times each row."""
    from phalanx.kernels.moe.biased_gemm import biased_gemm
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert

    blocks = tiled(packed(torch.arange(256, dtype=torch.uint8).view(4, 64).repeat(8, 1)))
    few = [[0, 1, 60, 126], [127, 128, 90, 80], [4, 3, 2, 1], [120, 121, 122, 127]]
    scale = tiled(torch.tensor(few, dtype=torch.uint8).repeat_interleave(8, 0), SCALES_IN_WORD)
    ids = torch.zeros(128, 1, dtype=torch.int32)
    tiles = sort_by_expert(ids, first=0, experts=1, pairs=128)
    tiling = ExpertTiling(64, 128, 4, 2, 4)
    outputs = biased_gemm(
        torch.eye(128), blocks, scale, None, tiles, tiling, top_k=1, experts=1, gated=False, swiglu=None
    )  # fmt: skip
    assert torch.equal(outputs[0].t(), reference.dequantize_mxfp4(blocks, scale, torch.float32))


CHECKS = [
    check_experts, check_every_part_changes_the_outcome, check_bf16, check_split_columns, check_one_token, check_values_of_mxfp4,
]  # fmt: skip


def test_in_the_interpreter() -> None:
    assert interpreted("tests.kernels.moe.test_biased_gemm").split() == [check.__name__ for check in CHECKS]


def compiled_kernel(tiling: ExpertTiling, arch: int, kind: str, *, gated: bool, full: bool) -> Any:
    from phalanx.kernels.moe.biased_gemm import _biased_gemm as kernel

    mxfp4 = kind == "mxfp4"
    constants: dict[str, Any] = {
        "TOP_K": 4, "GATED": gated, "CLAMPED": True, "MXFP4": mxfp4, "FULL": full, "PARTS": tiling.parts > 1, "ROWS": tiling.rows,
        "TOKENS": tiling.tokens, "BESIDE": tiling.beside, "IN_ORDER": tiling.parts > 1, "FIELDS": 4, "SM": arch,
        **({} if mxfp4 else {"scale": None}),
    }  # fmt: skip
    pointers = {
        "x": "bf16", "weight": "i16" if mxfp4 else "bf16", "scale": "i32", "selector_table": "i32", "bias": "bf16",
        "out": "fp32" if tiling.parts > 1 else "bf16", **dict.fromkeys(("pairs", "tiles", "num_tiles"), "i32"),
    }  # fmt: skip
    kinds = {name: "*" + kind for name, kind in pointers.items()}
    integers = ("count", "tiles_most", "outputs", "inputs", "row_blocks", "row_scales", "blocks", "part_blocks")
    kinds |= dict.fromkeys(integers, "i32") | dict.fromkeys(("alpha", "limit"), "fp32")
    aligned = [name for name in (*pointers, "outputs", "inputs") if name not in constants]
    return compiled_as(kernel, kinds, constants, arch, aligned=aligned, num_warps=tiling.warps, num_stages=tiling.stages)


SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@pytest.mark.parametrize(
    ("arch", "kind", "tokens"),
    [
        (90, "mxfp4", 1), (90, "mxfp4", 16), (90, "mxfp4", 64), (90, "mxfp4", 512), (90, "mxfp4", 1024), (90, "mxfp4", 8192),
        (90, "plain", 64), (80, "mxfp4", 1), (80, "mxfp4", 8192), (100, "mxfp4", 64), (100, "mxfp4", 1024), (100, "mxfp4", 8192),
    ],
)  # fmt: skip
def test_compiles(arch: int, kind: str, tokens: int) -> None:
    """As gpt-oss-120b launches it: on tensor cores, weights under way by 16 bytes, nothing spilled."""
    size = biased_heuristics.tile_pairs(tokens, 4, 128, mxfp4=kind == "mxfp4")
    for gated, outputs, inputs in ((True, 2880, 2880), (False, 2880, 2880)):
        busy = min(128, 4 * tokens)
        tiling = biased_heuristics.select(busy, size, outputs, inputs, gated=gated, mxfp4=kind == "mxfp4", num_sms=132, sm=arch)
        kernel = compiled_kernel(tiling, arch, kind, gated=gated, full=False)
        assert kernel.metadata.shared <= SHARED_MEMORY[arch]
        assert spilled(kernel) <= (
            64 if tiling.rows == 256 else 0
        )  # of the largest tile, a few registers before and behind the loop
        ptx = kernel.asm["ptx"]
        own = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch]
        # Triton does not always take Blackwell's own instruction for products of 32 columns, nor Hopper's for tiles of 8 tokens.
        others = {own, "mma.sync"} if kind == "mxfp4" and (arch == 100 or size <= 8) else {own}
        assert any(instruction in ptx for instruction in others)
        assert tiling.warps > 2 or (kind == "mxfp4" and size <= 8)
        assert ("griddepcontrol.wait" in ptx) == (arch >= 90)
        assert "cp.async.cg.shared.global" in ptx


@pytest.mark.gpu1
@pytest.mark.parametrize(("tokens", "inner"), [(1, 2880), (5, 736), (64, 704), (1500, 2880)])
@pytest.mark.parametrize("kind", ["mxfp4", "plain"])
def test_on_a_gpu(kind: str, tokens: int, inner: int) -> None:
    """With the widths of gpt-oss on one rank and on four, against the reference in fp32; the same bits each time."""
    torch.manual_seed(4)
    on_cpu = experts_of(kind, count=8, hidden=2880, inner=inner, dtype=torch.bfloat16)
    tensors = {name: value.cuda() for name, value in vars(on_cpu).items() if isinstance(value, torch.Tensor)}
    experts, x = replace(on_cpu, **tensors), torch.randn(tokens, 2880, device="cuda").bfloat16()
    for routing in routings(tokens, 8, 4):
        routing = type(routing)(*(each.cuda() for each in routing))
        outputs = [dispatch.launched(x, experts, routing) for _ in range(3)]
        in_fp32 = {name: value.float() for name, value in tensors.items() if value.dtype == torch.bfloat16}
        wanted = reference.fused_experts(x.float(), replace(experts, **in_fp32), routing)
        # Where all pairs of few tokens are with experts of other ranks, both are 0.
        assert (outputs[0].float() - wanted).norm() <= 1e-2 * wanted.norm()
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])


def test_tilings_fill_the_gpu_and_fit_it() -> None:
    for busy, tokens, mxfp4, sm in itertools.product((1, 4, 32, 128), (16, 32, 64, 128), (False, True), (80, 90)):
        down = biased_heuristics.select(busy, tokens, 2880, 2880, gated=False, mxfp4=mxfp4, num_sms=132, sm=sm)
        assert down.parts == 1 or busy * -(-2880 // down.rows) * down.parts <= 6 * 132
        assert 2 <= down.stages <= 6
    assert biased_heuristics.select(4, 16, 2880, 2880, gated=False, mxfp4=True, num_sms=132, sm=90).parts > 1


if __name__ == "__main__":
    let_loops_begin_anywhere()
    for check in CHECKS:
        check()
        print(check.__name__)

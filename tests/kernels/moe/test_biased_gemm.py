# SPDX-License-Identifier: Apache-2.0
"""Experts with biases, in 16 bit and in MXFP4, and experts in 4-bit integers: in Triton's interpreter against the reference, and
compiled without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from phalanx.config.experts import ClampedSwiGlu
from phalanx.kernels.gemm.int4_packing import dequantized
from phalanx.kernels.moe import biased_heuristics, dispatch, nvfp4_packing, reference
from phalanx.kernels.moe.heuristics import ExpertTiling, TileSize
from phalanx.kernels.moe.packing import SCALES_IN_WORD, packed, tiled
from phalanx.kernels.moe.tensors import ExpertTensors
from tests.support.kernels_compiled import compiled_as, spilled
from tests.support.kernels_int4 import drawn
from tests.support.kernels_interpreted import interpret
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


def int4_experts(
    group: int, zeros: bool, *, count: int = 4, first: int = 0, hidden: int = 256, inner: int = 352,
    dtype: torch.dtype = torch.bfloat16, device: str = "cpu", gated: bool = True,
) -> tuple[ExpertTensors, ExpertTensors]:  # fmt: skip
    """Experts in 4-bit integers, and the same in 16 bit by the formula alone."""
    sizes, packs, plain = (((2 if gated else 1) * inner, hidden), (hidden, inner)), [], []
    for outputs, inputs in sizes:
        every = [drawn(outputs, inputs, group, zeros, dtype, device) for _ in range(count)]
        # Each expert has other values: `drawn` begins with one seed.
        for number, (weight, elements) in enumerate(every):
            every[number] = weight._replace(scales=weight.scales.roll(number, -1)), elements
        weights = [weight for weight, _ in every]
        packs.append(weights[0]._replace(
            words=torch.stack([each.words for each in weights]), scales=torch.stack([each.scales for each in weights])
        ))  # fmt: skip
        plain.append(torch.cat([dequantized(each, dtype) for each in weights]))
    return (
        ExpertTensors(count, first, packs[0].words, packs[1].words, packed=(packs[0], packs[1]), gated=gated),
        ExpertTensors(count, first, *plain, gated=gated),
    )


def check_int4() -> None:
    """Few tokens and several tiles, groups within a k step and beyond, experts of other ranks, and both dtypes."""
    torch.manual_seed(6)
    cases = (
        (32, True, 5, torch.bfloat16),
        (64, False, 1, torch.float16),
        (128, False, 20, torch.bfloat16),
        (384, True, 3, torch.float16),
    )
    for number, (group, zeros, tokens, dtype) in enumerate(cases):
        experts, plain = int4_experts(group, zeros, dtype=dtype)
        assert (experts.hidden, experts.inner) == (256, 352)
        routing, x = routings(tokens, experts.count, 2)[number], torch.randn(tokens, 256).to(dtype)
        output = dispatch.launched(x, experts, routing)
        for wanted in (reference.fused_experts(x, experts, routing), reference.fused_experts(x, plain, routing)):
            assert (output.float() - wanted.float()).norm() <= 1e-2 * wanted.float().norm()


def check_int4_values() -> None:
    """Each widened element as the formula rounds it: an identity times each row, of an expert behind others."""
    from phalanx.kernels.moe.biased_gemm import biased_gemm
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert

    experts, plain = int4_experts(32, True, hidden=96, inner=64, dtype=torch.float16)
    assert experts.packed is not None
    tiles = sort_by_expert(torch.full((64, 1), 2, dtype=torch.int32), first=0, experts=4, pairs=64)
    tiling, down = ExpertTiling(32, 64, 4, 2, 4), experts.packed[1]
    x = torch.eye(64, dtype=torch.float16)
    outputs = biased_gemm(x, down, None, None, tiles, tiling, top_k=1, experts=4)
    assert torch.equal(outputs[0].t(), plain.down[2 * 96 : 3 * 96])


def nvfp4_experts(
    *, count: int = 4, hidden: int = 176, inner: int = 96, device: str = "cpu", gated: bool = True
) -> ExpertTensors:  # fmt: skip
    """In NVFP4: hidden is one k step and a half, and no multiple of 32; rows have scales of their own, also subnormal ones."""
    packs = []
    for outputs, inputs in (((2 if gated else 1) * inner, hidden), (hidden, inner)):
        codes = torch.randint(0, 256, (count, outputs, inputs // 2), dtype=torch.uint8, device=device)
        scales = torch.randint(0, 0x50, (count, outputs, inputs // 16), dtype=torch.uint8, device=device)
        every = [nvfp4_packing.packed(*each) for each in zip(codes, scales.view(torch.float8_e4m3fn), strict=True)]
        words, tables = (torch.stack(parts) for parts in zip(*every, strict=True))
        of_rows = (torch.rand(count, words.shape[1], device=device) + 0.5) / 8 / inputs**0.5
        packs.append(nvfp4_packing.Nvfp4Weight(words, tables, of_rows, outputs, inputs))
    return ExpertTensors(count, 0, packs[0].words, packs[1].words, packed=(packs[0], packs[1]), gated=gated)


def check_nvfp4() -> None:
    torch.manual_seed(8)
    for number, (tokens, dtype) in enumerate(((5, torch.float32), (1, torch.bfloat16), (20, torch.float16))):
        experts = replace(nvfp4_experts(), gelu=number == 2)
        routing, x = routings(tokens, experts.count, 2)[number], torch.randn(tokens, 176).to(dtype)
        output, wanted = dispatch.launched(x, experts, routing), reference.fused_experts(x, experts, routing)
        assert (output.float() - wanted.float()).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * wanted.float().norm()


def check_nvfp4_dense() -> None:
    """One expert that all tokens reach: a linear layer, with a bias, and programs that share its columns."""
    from phalanx.kernels.moe.nvfp4_mm import launched

    torch.manual_seed(9)
    packs = nvfp4_experts(count=1, hidden=512, inner=96).packed
    assert packs is not None
    weight = nvfp4_packing.Nvfp4Weight(*(each[0] for each in packs[0][:3]), *packs[0][3:])  # type: ignore[arg-type]
    for tokens in (1, 9, 130):
        x, bias = torch.randn(tokens, 512), torch.randn(192)
        wanted = x @ nvfp4_packing.dequantized(weight, torch.float32).t() + bias
        torch.testing.assert_close(launched(x, weight, bias), wanted, rtol=1e-4, atol=1e-4)


def check_experts_without_a_gate() -> None:
    """T15. One token, of which the first projection, too, has columns enough for programs to share; and several tiles."""
    torch.manual_seed(11)
    for number, tokens in enumerate((1, 5, 40)):
        for experts in (
            int4_experts(32, True, hidden=2048, inner=96, gated=False)[0], nvfp4_experts(hidden=2048, inner=96, gated=False)
        ):  # fmt: skip
            routing, x = routings(tokens, experts.count, 2)[number], torch.randn(tokens, experts.hidden).bfloat16()
            output, wanted = dispatch.launched(x, experts, routing), reference.fused_experts(x, experts, routing)
            assert (output.float() - wanted.float()).norm() <= 1e-2 * wanted.float().norm()


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
        inner = biased_gemm(x, experts.gate_up, *gate_up, tiles, tiling._replace(parts=1), activation="clamped", **of_layer)
        sums = biased_gemm(inner, experts.down, *down, tiles, tiling, **of_layer)
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
        torch.eye(128), blocks, scale, None, tiles, tiling, top_k=1, experts=1
    )  # fmt: skip
    assert torch.equal(outputs[0].t(), reference.dequantize_mxfp4(blocks, scale, torch.float32))


CHECKS = [
    check_experts, check_every_part_changes_the_outcome, check_bf16, check_split_columns, check_one_token, check_values_of_mxfp4,
    check_int4, check_int4_values, check_nvfp4, check_nvfp4_dense, check_experts_without_a_gate,
]  # fmt: skip


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


def compiled_kernel(tiling: ExpertTiling, arch: int, kind: str, *, first: str, full: bool) -> Any:
    from phalanx.kernels.moe.biased_gemm import _biased_gemm as kernel

    form, *group = kind.split()
    in_4_bits, int4 = form != "plain", form == "int4"
    constants: dict[str, Any] = {
        "TOP_K": 4, "FIRST": first, "FORM": form, "GROUP": int(group[0]) if int4 else 0,
        "ZEROS": "zeros" in group, "FULL": full, "PARTS": tiling.parts > 1, "ROWS": tiling.rows,
        "TOKENS": tiling.tokens, "BESIDE": tiling.beside, "IN_ORDER": tiling.parts > 1, "FIELDS": 4, "SM": arch,
        **({} if in_4_bits else {"scale": None}), **({"rows": None} if form in ("plain", "mxfp4") else {"bias": None}),
        **({} if form in ("mxfp4", "nvfp4") else {"selector_table": None}), **({} if form == "nvfp4" else {"row_scale": None}),
    }  # fmt: skip
    pointers = {
        "x": "bf16", "weight": "i16" if in_4_bits else "bf16", "scale": "i32",
        "row_scale": "fp32", "selector_table": "i32", "bias": "bf16",
        "out": "fp32" if tiling.parts > 1 else "bf16", **dict.fromkeys(("pairs", "tiles", "num_tiles"), "i32"),
    }  # fmt: skip
    kinds = {name: "*" + kind for name, kind in pointers.items()}
    integers = ("count", "tiles_most", "outputs", "inputs", "row_blocks", "row_scales", "rows", "blocks", "part_blocks")
    kinds |= dict.fromkeys(integers, "i32") | dict.fromkeys(("alpha", "limit"), "fp32")
    aligned = [name for name in (*pointers, "outputs", "inputs", "rows") if name not in constants]
    return compiled_as(kernel, kinds, constants, arch, aligned=aligned, num_warps=tiling.warps, num_stages=tiling.stages)


SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@pytest.mark.parametrize(
    ("arch", "kind", "tokens"),
    [
        (90, "mxfp4", 1), (90, "mxfp4", 16), (90, "mxfp4", 64), (90, "mxfp4", 512), (90, "mxfp4", 1024), (90, "mxfp4", 8192),
        (90, "plain", 64), (80, "mxfp4", 1), (80, "mxfp4", 8192), (100, "mxfp4", 64), (100, "mxfp4", 1024), (100, "mxfp4", 8192),
        *((arch, form, tokens) for form in ("int4 32", "nvfp4") for arch, tokens in ((80, 64), (90, 1), (90, 4096), (100, 64))),
        (90, "int4 128 zeros", 64),
    ],
)  # fmt: skip
def test_compiles(arch: int, kind: str, tokens: int) -> None:
    """As gpt-oss-120b launches it: on tensor cores, weights under way by 16 bytes, nothing spilled."""
    size = biased_heuristics.tile_pairs(tokens, 4, 128, in_4_bits=kind != "plain")
    for gated, outputs, inputs in ((True, 2880, 2880), (False, 2880, 2880)):
        busy = min(128, 4 * tokens)
        tiling = biased_heuristics.select(busy, size, outputs, inputs, gated=gated, in_4_bits=kind != "plain", num_sms=132, sm=arch)
        first = {"int4": "silu", "nvfp4": "gelu"}.get(kind.split()[0], "clamped") if gated else ""
        kernel = compiled_kernel(tiling, arch, kind, first=first, full=False)
        assert kernel.metadata.shared <= SHARED_MEMORY[arch]
        # Of the largest tiles, a few registers before and behind the loop.
        widest = tiling.rows == 256 or (kind.startswith(("int4", "nvfp4")) and gated and tiling.rows == 128)
        of_nvfp4 = {80: 16}.get(arch, 0) + 32 * widest if kind == "nvfp4" else 0
        assert spilled(kernel) <= 64 * widest + of_nvfp4
        ptx = kernel.asm["ptx"]
        own = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch]
        # Triton does not always take Blackwell's own instruction for products of 32 columns, nor Hopper's for tiles of 8 tokens.
        others = {own, "mma.sync"} if kind != "plain" and (arch == 100 or size <= 8) else {own}
        assert any(instruction in ptx for instruction in others)
        assert tiling.warps > 2 or (kind != "plain" and size <= 8)
        assert ("griddepcontrol.wait" in ptx) == (arch >= 90)
        assert "cp.async.cg.shared.global" in ptx


@pytest.mark.parametrize("kind", ["int4 32", "nvfp4"])
def test_experts_without_a_gate_compile(kind: str) -> None:
    tiling = biased_heuristics.select(4, 16, 1856, 2688, gated=False, in_4_bits=True, num_sms=132, sm=90)
    kernel = compiled_kernel(tiling._replace(parts=1), 90, kind, first="squared", full=True)
    assert "griddepcontrol.wait" in kernel.asm["ptx"]
    assert spilled(kernel) == 0


@pytest.mark.gpu1
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 64, 1500])
@pytest.mark.parametrize(("group", "zeros"), [(32, False), (128, False), (64, True)])
def test_int4_on_a_gpu(group: int, zeros: bool, tokens: int, gated: bool) -> None:
    """With the widths of Qwen3-30B-A3B, against the reference in fp32 of the widened weights; the same bits each time."""
    torch.manual_seed(7)
    experts, plain = int4_experts(group, zeros, count=8, hidden=2048, inner=768, device="cuda", gated=gated)
    x = torch.randn(tokens, 2048, device="cuda").bfloat16()
    for routing in routings(tokens, 8, 4):
        routing = type(routing)(*(each.cuda() for each in routing))
        outputs = [dispatch.launched(x, experts, routing) for _ in range(3)]
        in_fp32 = replace(plain, gate_up=plain.gate_up.float(), down=plain.down.float())
        wanted = reference.fused_experts(x.float(), in_fp32, routing)
        assert (outputs[0].float() - wanted).norm() <= 1e-2 * wanted.norm()
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])


@pytest.mark.gpu1
@pytest.mark.parametrize("tokens", [1, 5, 64, 1500])
def test_nvfp4_on_a_gpu(tokens: int) -> None:
    """Experts, and a dense layer, against the reference in fp32; the same bits each time."""
    from phalanx.kernels.moe.nvfp4_mm import nvfp4_mm

    torch.manual_seed(10)
    experts, x = nvfp4_experts(count=8, hidden=2048, inner=768, device="cuda"), torch.randn(tokens, 2048, device="cuda").bfloat16()
    for routing in routings(tokens, 8, 4):
        routing = type(routing)(*(each.cuda() for each in routing))
        outputs = [dispatch.launched(x, experts, routing) for _ in range(2)]
        wanted = reference.fused_experts(x.float(), experts, routing)
        assert (outputs[0].float() - wanted).norm() <= 1e-2 * wanted.norm()
        assert torch.equal(*outputs)
    weight = experts.packed[0]  # type: ignore[index]
    weight = nvfp4_packing.Nvfp4Weight(weight.words[1], weight.scales[1], weight.row_scale[1], 1536, 2048)  # type: ignore[union-attr]
    outputs, wanted = [nvfp4_mm(x, weight) for _ in range(2)], x.float() @ nvfp4_packing.dequantized(weight, torch.float32).t()
    assert (outputs[0].float() - wanted).norm() <= 5e-3 * wanted.norm()
    assert torch.equal(*outputs)


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
        down = biased_heuristics.select(busy, tokens, 2880, 2880, gated=False, in_4_bits=mxfp4, num_sms=132, sm=sm)
        assert down.parts == 1 or busy * -(-2880 // down.rows) * down.parts <= 6 * 132
        assert 2 <= down.stages <= 6
    assert biased_heuristics.select(4, 16, 2880, 2880, gated=False, in_4_bits=True, num_sms=132, sm=90).parts > 1

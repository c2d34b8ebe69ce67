# SPDX-License-Identifier: Apache-2.0
"""GEMMs with 4-bit integer weights: in Triton's interpreter and on a GPU against the formula, and compiled without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.kernels.gemm import int4_heuristics
from phalanx.kernels.gemm.int4_heuristics import Int4Tiling
from phalanx.kernels.gemm.int4_mm import int4_mm
from phalanx.kernels.gemm.int4_packing import dequantized, packed
from tests.support.kernels_compiled import compiled_as, spilled
from tests.support.kernels_int4 import SIZES, drawn, of_a_long_double
from tests.support.kernels_interpreted import interpret, let_loops_begin_anywhere

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_packed_weights_hold_what_they_were_made_of(size: tuple[int, int, int, bool], dtype: torch.dtype) -> None:
    weight, elements = drawn(*size, dtype)
    assert torch.equal(dequantized(weight, dtype), elements)
    x, bias = torch.randn(3, size[1]).to(dtype), torch.randn(size[0]).to(dtype)
    wanted = of_a_long_double(x, elements, bias)
    assert (int4_mm(x, weight, bias).double() - wanted).norm() < 4e-3 * wanted.norm()


def test_scales_in_another_dtype_than_activations() -> None:
    """T12: of a checkpoint's fp16 in a bf16 model they are rounded to bf16, and nothing asks for equal dtypes."""
    codes, scales = torch.randint(0, 16, (64, 256)), (torch.rand(64, 2) + 0.5).half()
    weight = packed(codes, scales, None, 128, torch.bfloat16)
    rounded = scales.bfloat16().float().repeat_interleave(128, 1)
    assert torch.equal(dequantized(weight, torch.float32), (codes - 8) * rounded)


def test_sizes_that_do_not_fit_are_refused() -> None:
    codes, scales = torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 2)
    with pytest.raises(ValueError, match="do not fit"):
        packed(codes, scales, None, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit"):
        packed(codes, scales, torch.zeros(8, 1), 32, torch.bfloat16)


def check_kernel() -> None:
    """One token and several, one program for each tile and several."""
    from phalanx.kernels.gemm.int4_gemm import int4_gemm

    let_loops_begin_anywhere()
    for dtype, size in zip((torch.bfloat16, torch.float16) * 3, SIZES, strict=True):
        weight, elements = drawn(*size, dtype)
        for tokens, parts in ((1, 1), (5, 2), (11, 3)):
            x, bias = torch.randn(tokens, size[1]).to(dtype), torch.randn(size[0]).to(dtype)
            output = int4_gemm(x, weight, bias, tiling=Int4Tiling(32, 8 if tokens < 9 else 16, 4, 2, parts))
            wanted = of_a_long_double(x, elements, bias)
            assert output.dtype == dtype
            assert (output.double() - wanted).norm() < (4e-3 if dtype == torch.bfloat16 else 5e-4) * wanted.norm()


def check_sums_beyond_fp16() -> None:
    """T12: partial sums of ten times what fp16 holds, of which the total is near 1."""
    from phalanx.kernels.gemm.int4_gemm import int4_gemm

    codes = torch.full((64, 256), 15)
    weight = packed(codes, torch.ones(64, 2), None, 128, torch.float16)
    x = torch.full((3, 256), 1000.0)
    x[:, 128:] = -1000.0
    x[:, 255] += 1 / 7
    wanted = (x.half().double() * 7).sum(-1, keepdim=True).expand(3, 64)
    for output in (int4_gemm(x.half(), weight), int4_mm(x.half(), weight)):
        assert torch.equal(output.double(), wanted)


def check_widened() -> None:
    from phalanx.kernels.gemm.int4_gemm import widen

    for dtype, size in zip((torch.bfloat16, torch.float16) * 3, SIZES, strict=True):
        weight, elements = drawn(*size, dtype)
        for rows in (slice(0, size[0]), slice(64, max(64, size[0]))):
            assert torch.equal(widen(weight, rows), elements[rows])


CHECKS = [check_kernel, check_sums_beyond_fp16, check_widened]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


def signature(kind: str) -> tuple[dict[str, str], list[str]]:
    """(kinds of the arguments, those that are aligned)."""
    kinds = dict.fromkeys(("x", "bias", "out"), f"*{kind}") | {"words": "*i16", "scales": "*i32"}
    kinds |= {"parts": "*fp32", "arrivals": "*i32"}
    kinds |= dict.fromkeys(("tokens", "first", "outputs", "rows", "inputs", "blocks", "part_blocks"), "i32")
    return kinds, ["x", "words", "scales", "out", "parts", "outputs", "rows", "inputs"]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("kind", "group", "zeros"), [("bf16", 128, False), ("fp16", 32, True)])
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_compiled(arch: int, kind: str, group: int, zeros: bool, tokens: int) -> None:
    from phalanx.kernels.gemm import int4_gemm

    kinds, aligned = signature(kind)
    tiling = int4_heuristics.select(tokens, 10240, 8192, num_sms=132)
    constants: dict[str, Any] = {
        "GROUP": group, "ZEROS": zeros, "FULL": True, "SHARED": tiling.parts > 1, "ROWS": tiling.rows, "TOKENS": tiling.tokens,
        "SM": arch, "bias": None,
    }  # fmt: skip
    result = compiled_as(
        int4_gemm._int4_gemm, kinds, constants, arch, aligned=aligned, num_warps=tiling.warps, num_stages=tiling.stages
    )
    assert len(result.asm["cubin"]) > 0
    assert not spilled(result)
    # The widened weight stays in the registers that the tensor cores read: only sums pass through shared memory.
    assert result.asm["ptx"].count("st.shared") <= 16
    widened = {name: constants[name] for name in ("GROUP", "ZEROS", "SM")}
    aligned = [name for name in aligned if name in int4_gemm._int4_widen.arg_names]
    assert len(compiled_as(int4_gemm._int4_widen, kinds, widened, arch, aligned=aligned, num_warps=2).asm["cubin"]) > 0


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [*SIZES, (1024, 4096, 128, False), (640, 8192, 64, True)])
def test_on_gpu(size: tuple[int, int, int, bool], dtype: torch.dtype) -> None:
    weight, elements = drawn(*size, dtype, "cuda")
    unit = torch.eye(size[1], device="cuda", dtype=dtype)
    assert torch.equal(torch.cat([int4_mm(some, weight).t() for some in unit.split(64)], 1), elements)
    for tokens in (1, 3, 8, 17, 33, 64, 200):
        x, bias = torch.randn(tokens, size[1], device="cuda").to(dtype), torch.randn(size[0], device="cuda").to(dtype)
        output, wanted = int4_mm(x, weight, bias), of_a_long_double(x, elements, bias)
        assert (output.double() - wanted).norm() < 6e-3 * wanted.norm()
        assert torch.equal(output, int4_mm(x, weight, bias)), "a run repeats"

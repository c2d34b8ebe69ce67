# SPDX-License-Identifier: Apache-2.0
"""Activations in e4m3 by weights of 4-bit integers: in Triton's interpreter and on a GPU against the plain code, the instructions
that widen against their table, and compiled without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from phalanx.kernels.gemm.int4_mm import FP8_MIN_TOKENS, int4_fp8_plain, int4_mm
from phalanx.kernels.gemm.int4_packing import dequantized
from tests.support.kernels_compiled import compiled_as, spilled
from tests.support.kernels_int4 import SIZES, drawn, of_a_long_double
from tests.support.kernels_interpreted import interpret, let_loops_begin_anywhere

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.mark.parametrize("size", SIZES)
def test_only_activations_are_rounded(size: tuple[int, int, int, bool]) -> None:
    """The error is that of e4m3, and only from FP8_MIN_TOKENS on."""
    weight, elements = drawn(*size, torch.bfloat16)
    x, bias = torch.randn(FP8_MIN_TOKENS, size[1]).bfloat16(), torch.randn(size[0]).bfloat16()
    wanted = of_a_long_double(x, elements, bias)
    error = (int4_mm(x, weight, bias, fp8=True).double() - wanted).norm() / wanted.norm()
    assert 0.01 < error < 0.035
    assert torch.equal(int4_mm(x[1:], weight, bias, fp8=True), int4_mm(x[1:], weight, bias))


def check_kernel() -> None:
    """Tokens and outputs that do not fill their tiles; groups within a k step and beyond."""
    from phalanx.kernels.gemm.int4_fp8 import int4_fp8_gemm

    let_loops_begin_anywhere()
    for dtype, size in zip((torch.bfloat16, torch.float16) * 3, SIZES, strict=True):
        weight, _ = drawn(*size, dtype)
        x, bias = torch.randn(131, size[1]).to(dtype), torch.randn(size[0]).to(dtype)
        output, wanted = int4_fp8_gemm(x, weight, bias), int4_fp8_plain(x, weight, bias)
        assert output.dtype == dtype
        assert (output.double() - wanted.double()).norm() < (2e-3 if dtype == torch.bfloat16 else 5e-4) * wanted.double().norm()


CHECKS = [check_kernel]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


def run_ptx(code: str, inputs: dict[str, int]) -> int:
    """What straight code of a few instructions leaves in $0."""
    values, mask = dict(inputs), 0xFFFFFFFF

    def prmt(low: int, high: int, selector: int) -> int:
        table = (low | high << 32).to_bytes(8, "little")
        picked = [(table[n & 7], n >> 3 & 1) for n in (selector >> 4 * at & 15 for at in range(4))]
        return int.from_bytes(bytes((0xFF if byte >> 7 else 0) if sign else byte for byte, sign in picked), "little")

    def lop3(a: int, b: int, c: int, table: int) -> int:
        bits = ((a >> at & 1) << 2 | (b >> at & 1) << 1 | (c >> at & 1) for at in range(32))
        return sum((table >> bit & 1) << at for at, bit in enumerate(bits))

    acts: dict[str, Any] = {
        "shr": lambda a, b: a >> b, "shl": lambda a, b: a << b & mask, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
        "not": lambda a: ~a & mask, "prmt": prmt, "lop3": lop3,
    }  # fmt: skip
    for name, operands in re.findall(r"(\w+)\.b32 (.*);", code):
        if name != "reg":
            target, *sources = (each.strip() for each in operands.split(","))
            values[target] = acts[name](*(values[each] if each in values else int(each, 0) for each in sources))
    return values["$0"]


def test_the_instructions_widen_every_value() -> None:
    from phalanx.kernels.gemm.int4_fp8 import _WIDEN

    for place in range(4):
        code = _WIDEN.format(shift=4 * place).replace(".reg .b32 a, b, s, n, lo, hi, m;", "")
        for first in range(16):
            every = [(first + 5 * at) % 16 for at in range(4)]
            words = [q << 4 * place | 0x9A5C & ~(0xF << 4 * place) for q in every]
            word = run_ptx(code, {"$1": words[0] | words[1] << 16, "$2": words[2] | words[3] << 16})
            bytes_of = torch.tensor(list(word.to_bytes(4, "little")), dtype=torch.uint8)
            assert bytes_of.view(torch.float8_e4m3fn).float().tolist() == [q - 8 for q in every]


@pytest.mark.parametrize(
    ("kind", "group", "zeros"), [("bf16", 128, False), ("bf16", 32, False), ("fp16", 64, True), ("bf16", 128, True)]
)  # fmt: skip
def test_compiled(kind: str, group: int, zeros: bool) -> None:
    from phalanx.kernels.gemm import int4_fp8

    kinds = {"x": "*fp8e4nv", "x_scale": "*fp32", "sums": "*fp32", "words": "*i16", "scales": "*i32", "out": f"*{kind}"}
    kinds |= dict.fromkeys(("tokens", "outputs", "rows", "blocks"), "i32")
    tile = int4_fp8.tile_tokens(drawn(64, 128, group, zeros, torch.bfloat16)[0])
    constants = {
        "bias": None, "GROUP": group, "ZEROS": zeros, "ROWS": int4_fp8.ROWS, "TOKENS": tile, "BESIDE": int4_fp8.BESIDE,
        "SM": 90,
    }  # fmt: skip
    aligned = ["x", "x_scale", "sums", "words", "scales", "out", "outputs", "rows"]
    result = compiled_as(int4_fp8._int4_fp8, kinds, constants, 90, aligned=aligned, num_warps=8, num_stages=3)
    assert "wgmma.mma_async" in result.asm["ptx"]
    assert "e4m3" in result.asm["ptx"]
    assert spilled(result) == 0
    assert result.metadata.shared <= 227 * 1024


@pytest.mark.gpu1
@pytest.mark.parametrize("size", [*SIZES, (1024, 4096, 128, False), (640, 8192, 64, True), (4096, 4096, 128, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(size: tuple[int, int, int, bool], dtype: torch.dtype) -> None:
    from phalanx.kernels.gemm.int4_fp8 import int4_fp8_gemm
    from phalanx.kernels.ops.dispatch import quantize_fp8

    weight, _ = drawn(*size, dtype, "cuda")
    for tokens in (129, 512, 1000):
        x, bias = torch.randn(tokens, size[1], device="cuda").to(dtype), torch.randn(size[0], device="cuda").to(dtype)
        outputs = [int4_fp8_gemm(x, weight, bias) for _ in range(2)]
        values, scale = quantize_fp8(x)  # the kernel's, which rounds ties by a quotient of its own
        wanted = values.float() @ dequantized(weight, torch.float32).t() * scale + bias.float()
        assert (outputs[0].double() - wanted.double()).norm() < 4e-3 * wanted.double().norm()
        assert torch.equal(*outputs)

# SPDX-License-Identifier: Apache-2.0
"""The scales of a GEMM output, applied as its vectors are loaded: in Triton's interpreter against the formula, and compiled."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.scaled_tensors import Unscaled
from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 (where there is a Triton)
from triton.language.extra.cuda import gdc_wait  # noqa: E402

from phalanx.kernels.vectors import load_output, load_row, load_scales, store  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_python")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@triton.jit
def flat(x, rows, columns, out, vectors, pitch, KIND: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr):
    """Stores what it loads: vectors wherever they lie."""
    if SM >= 90:
        gdc_wait()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < vectors
    store(out, index, load_output(x, rows, columns, index, pitch, mask, KIND, SM), mask, SM)


@triton.jit
def by_row(x, rows, columns, out, pitch, KIND: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr):
    """Stores what it loads: a row by each program."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    column_scales = load_scales(columns, column, mask, KIND, SM)
    if SM >= 90:
        gdc_wait()
    index = row * pitch + column
    store(out, index, load_row(x, rows, column_scales, row, index, mask, KIND, SM), mask, SM)


def check() -> None:
    for kind, dtype in DTYPES.items():
        for tokens, width in ((1, 8), (3, 104), (2, 2056)):
            sums = Unscaled((torch.randn(tokens, width) * 1e3).to(dtype), torch.rand(tokens, 1), torch.rand(width))
            pitch = width * dtype.itemsize // 16
            fixed = {"KIND": kind, "SM": 0}
            for rows, columns, wanted in ((*sums[1:], sums.to_fp32().to(dtype)), (None, None, sums.values)):
                x, out = sums.values.view(torch.int32), torch.zeros_like(sums.values)
                flat[(-(-tokens * pitch // 32),)](x, rows, columns, out.view(torch.int32), tokens * pitch, pitch, BLOCK=32, **fixed)
                assert torch.equal(out, wanted), (kind, tokens, width, "flat")
                out.zero_()
                by_row[(tokens,)](x, rows, columns, out.view(torch.int32), pitch, BLOCK=1024, **fixed)
                assert torch.equal(out, wanted), (kind, tokens, width, "by row")


def test_in_the_interpreter() -> None:
    interpret([check])


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_column_scales_come_in_two_vectors_of_16_bytes(arch: int) -> None:
    kinds = {"x": "*i32", "rows": "*fp32", "columns": "*fp32", "out": "*i32", "pitch": "i32"}
    constants = {"KIND": "bf16", "BLOCK": 128}
    for kernel, more in ((flat, {"vectors": "i32"}), (by_row, {})):
        result = compiled(kernel, kinds | more, constants, arch)
        assert result.asm["ptx"].count("ld.global.v4.b32") == 3

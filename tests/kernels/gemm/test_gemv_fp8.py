# SPDX-License-Identifier: Apache-2.0
"""GEMV in e4m3: in Triton's interpreter against the reference, and compiled for the GPUs that have FP8."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from tests.support.kernels_compiled import compiled, compiled_as
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def check() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.gemm.gemv_fp8 import gemv_fp8
    from phalanx.kernels.gemm.heuristics import GemvTiling

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for outputs, inputs, block in ((1, 16, 64), (7, 208, 64), (33, 128, 64), (5, 1040, 1024)):
            x, full = torch.randn(1, inputs).to(dtype), torch.randn(outputs, inputs)
            weight, scale = reference.quantize_fp8(full)
            scale = scale.flatten()
            for static in (None, torch.tensor(0.01)):
                values, x_scale = reference.quantize_fp8(x, static)
                wanted = reference.scaled_mm(values, x_scale, weight, scale, dtype)
                output = gemv_fp8(values, x_scale, weight, scale, dtype=dtype, tiling=GemvTiling(4, block, 4))
                torch.testing.assert_close(output, wanted, rtol=torch.finfo(dtype).eps, atol=1e-4)
                itself = gemv_fp8(x, static, weight, scale, dtype=dtype, tiling=GemvTiling(4, block, 4))
                assert torch.equal(itself, output)  # quantized there or before: the same bits
    zeros = gemv_fp8(torch.zeros(1, inputs), None, weight, scale, dtype=torch.bfloat16, tiling=GemvTiling(4, 1024, 4))
    assert torch.equal(zeros, torch.zeros(1, outputs, dtype=torch.bfloat16))


def test_in_the_interpreter() -> None:
    interpret([check])


@pytest.mark.parametrize("arch", [89, 90, 100])
@pytest.mark.parametrize("quantize", [False, True])
def test_compiles(arch: int, quantize: bool) -> None:
    from phalanx.kernels.gemm import gemv_fp8

    constants = {"COLUMNS": 2048, "PADDED": 2048, "QUANTIZE": quantize, "STATIC": not quantize, "ROWS": 4, "BLOCK": 2048}
    pointers = {"x": "bf16" if quantize else "fp8e4nv", "x_scale": "fp32", "weight": "fp8e4nv", "scale": "fp32", "out": "bf16"}
    kinds = {name: "*" + kind for name, kind in pointers.items()} | {"rows": "i32"}
    compiled(gemv_fp8._gemv_fp8, kinds, constants, arch)


@pytest.mark.parametrize("inputs", [2048, 3584, 8192])
def test_quantizing_adds_up_in_the_same_order(inputs: int) -> None:
    """As many sums of each kind, in a thread and between threads, and none of them of what shared memory has moved elsewhere."""
    counts = {quantize: instructions(inputs, quantize) for quantize in (False, True)}
    for name in ("fma.rn.f32", "add.f32", "shfl.sync.bfly.b32", "ld.shared.b32"):
        assert counts[True][name] == counts[False][name] > 0, name
    assert not [name for name in counts[True] if name.startswith("ld.shared.v")]


def instructions(inputs: int, quantize: bool) -> Counter[str]:
    """How often each stands in the kernel for an H200, whose tensors begin where vectors may."""
    from phalanx.kernels.gemm import gemv_fp8, heuristics

    tiling = heuristics.select_fp8(1, 2048, inputs)
    assert isinstance(tiling, heuristics.GemvTiling)
    constants = {
        "COLUMNS": inputs, "PADDED": inputs, "QUANTIZE": quantize, "STATIC": True, "ROWS": tiling.rows, "BLOCK": tiling.block,
        "SM": 90,
    }  # fmt: skip
    pointers = {"x": "bf16" if quantize else "fp8e4nv", "x_scale": "fp32", "weight": "fp8e4nv", "scale": "fp32", "out": "bf16"}
    kinds = {name: "*" + kind for name, kind in pointers.items()} | {"rows": "i32"}
    aligned = gemv_fp8._gemv_fp8.arg_names[:6]
    kernel = compiled_as(gemv_fp8._gemv_fp8, kinds, constants, 90, aligned=aligned, num_warps=tiling.warps)
    return Counter(re.findall(r"^\s+(?:@%p\d+ )?([a-z][a-z.0-9]+)", kernel.asm["ptx"], re.MULTILINE))

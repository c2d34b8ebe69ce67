# SPDX-License-Identifier: Apache-2.0
"""A few rows times a matrix: in Triton's interpreter against the reference, and compiled for three generations of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")


def check() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.products.choice import FewRows
    from phalanx.kernels.products.few_rows import counters, few_rows

    cases = [
        (1, 7, 208, FewRows(64, 64, 1)), (2, 64, 64, FewRows(64, 64, 1)), (5, 130, 336, FewRows(64, 64, 3)),
        (17, 48, 640, FewRows(32, 128, 4)), (64, 65, 256, FewRows(64, 128, 2)), (3, 16, 48, FewRows(64, 128, 4)),
    ]  # fmt: skip
    for tokens, outputs, inputs, tiling in cases:
        x, wide = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
        for dtype in (torch.bfloat16, torch.float16):
            into = torch.full((tokens, outputs), float("nan"), dtype=dtype)
            assert few_rows(x.to(dtype), wide.to(dtype), tiling=tiling, out=into) is into
            wanted = reference.linear(x.to(dtype), wide.to(dtype))
            torch.testing.assert_close(into, wanted, rtol=torch.finfo(dtype).eps, atol=1e-4)
        weight, scale = reference.quantize_fp8(wide)
        for static in (None, torch.tensor(0.01)):
            values, x_scale = reference.quantize_fp8(x, static)
            wanted = reference.scaled_mm(values, x_scale, weight, scale.flatten(), torch.bfloat16)
            found = few_rows(values, weight, tiling=tiling, x_scale=x_scale, scale=scale.flatten(), dtype=torch.bfloat16)
            torch.testing.assert_close(found, wanted, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-4)
    assert not counters(torch.device("cpu")).any()


def test_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.products.test_few_rows"], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "checked"


@pytest.mark.parametrize(("arch", "kind"), [(80, "bf16"), (89, "fp8e4nv"), (90, "bf16"), (90, "fp8e4nv"), (100, "fp8e4nv")])
def test_compiles(arch: int, kind: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from phalanx.kernels.products import few_rows

    scaled = kind != "bf16"
    constants = {
        "COLUMNS": 8192, "SCALED": scaled, "PER_TOKEN": True, "TOKENS": 16, "ROWS": 64, "BLOCK": 128, "SPLITS": 4,
        "PROMOTE": 128 if scaled else 0, "STAGES": 4, "AHEAD": 4, "PTX": arch,
    }  # fmt: skip
    pointers = {"x": kind, "x_scale": "fp32", "weight": kind, "scale": "fp32", "out": "bf16", "partials": "fp32", "arrived": "i32"}
    signature = {name: "*" + held for name, held in pointers.items()} | {"tokens": "i32", "rows": "i32"}
    attributes = {(place,): [["tt.divisibility", 16]] for place in range(len(pointers))}
    source = ASTSource(few_rows._few_rows, signature | dict.fromkeys(constants, "constexpr"), constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert len(compiled.asm["cubin"]) > 0
    ptx = compiled.asm["ptx"]
    assert ("griddepcontrol.wait" in ptx) == ("prefetch.global.L2" in ptx) == (arch >= 90)
    assert {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch] in ptx


def test_counters_are_not_made_in_a_capture() -> None:
    from phalanx.errors import EngineError
    from phalanx.kernels.products import few_rows

    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
    with capturing, pytest.raises(EngineError, match="before the capture"):
        few_rows.counters(torch.device("cuda", 7))


if __name__ == "__main__":
    torch.manual_seed(0)
    check()
    print("checked")

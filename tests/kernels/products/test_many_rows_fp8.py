# SPDX-License-Identifier: Apache-2.0
"""Many rows times a matrix in e4m3: in Triton's interpreter against the reference, and compiled for the GPUs that have FP8."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


def check() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.products.choice import ManyRows
    from phalanx.kernels.products.many_rows_fp8 import many_rows_fp8

    for tokens, outputs, inputs in ((130, 136, 144), (128, 64, 64), (300, 72, 80)):
        for dtype in (torch.bfloat16, torch.float16):
            x, wide = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs)
            weight, scale = reference.quantize_fp8(wide)
            scale = scale.flatten()
            for static in (None, torch.tensor(0.01)):
                values, x_scale = reference.quantize_fp8(x, static)
                wanted = reference.scaled_mm(values, x_scale, weight, scale, dtype)
                into = torch.full((tokens, outputs), float("nan"), dtype=dtype)
                found = many_rows_fp8(values, x_scale, weight, scale, dtype=dtype, out=into, tiling=ManyRows(64, 64, 64))
                assert found is into
                torch.testing.assert_close(found, wanted, rtol=torch.finfo(dtype).eps, atol=1e-4)


def take_scalars_as_indices() -> None:
    """numpy no longer takes an array of one number for an index, and the interpreter's scalars are such."""
    from triton.runtime.interpreter import TensorHandle

    begin = TensorHandle.__init__

    def flat(self: Any, data: Any, *rest: Any, **named: Any) -> None:
        begin(self, data.reshape(()) if getattr(data, "shape", None) == (1,) else data, *rest, **named)

    TensorHandle.__init__ = flat


def test_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.products.test_many_rows_fp8"], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "checked"


@pytest.mark.parametrize("arch", [90, 100])
def test_compiles(arch: int) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from phalanx.kernels.products import choice, many_rows_fp8

    tiling = choice.ManyRows()
    constants = {
        "COLUMNS": 8192, "PER_TOKEN": True, "TOKENS": tiling.tokens, "ROWS": tiling.rows, "BLOCK": tiling.block,
        "KIND": tl.bfloat16, "PTX": arch,
    }  # fmt: skip
    signature = {
        "x": f"tensordesc<fp8e4nv[{tiling.tokens}, {tiling.block}]>", "x_scale": "*fp32",
        "weight": f"tensordesc<fp8e4nv[{tiling.rows}, {tiling.block}]>", "scale": "*fp32",
        "out": f"tensordesc<bf16[{tiling.tokens}, {tiling.rows}]>", "tokens": "i32", "rows": "i32", "turns": "i32",
    }  # fmt: skip
    source = ASTSource(many_rows_fp8._many_rows_fp8, signature | dict.fromkeys(constants, "constexpr"), constants)
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
    assert {90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch] in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "griddepcontrol.wait" in ptx


if __name__ == "__main__":
    torch.manual_seed(0)
    take_scalars_as_indices()
    check()
    print("checked")

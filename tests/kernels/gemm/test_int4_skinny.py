# SPDX-License-Identifier: Apache-2.0
"""Skinny GEMM with 4-bit integer weights: compiled for Hopper; on a GPU what it computes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from phalanx.kernels.gemm import int4_heuristics
from phalanx.kernels.gemm.int4_heuristics import SkinnyInt4Tiling
from tests.support.kernels_compiled import compiled_as, gluon_compiles, spilled
from tests.support.kernels_int4 import SIZES, drawn, of_a_long_double

if not gluon_compiles():
    pytest.skip("the kernel is for another Triton", allow_module_level=True)


@pytest.mark.parametrize("tokens", [1, 32, 128])
@pytest.mark.parametrize(("planes", "zeros"), [(1, False), (1, True), (2, False), (4, True)])
def test_compiles(tokens: int, planes: int, zeros: bool) -> None:
    """Words come as 16 bytes from shared memory and widened ones do not return there."""
    from triton.experimental.gluon import language as gl

    from phalanx.kernels.gemm import int4_skinny

    tiling, columns = int4_heuristics.select_skinny(tokens, 8192, num_sms=132), max(8, tokens)
    sums, loaded, stored = int4_skinny.layouts(tiling.rows, columns, tiling.warps)
    constants = {
        "KT": 64, "PER": 1, "ROWS": tiling.rows, "PLANES": planes, "ZEROS": zeros, "STAGES": tiling.stages, "SUMS": sums,
        "LOADED": loaded, "STORED": stored, "AT_ONCE": 1, "SHARED": True,
    }  # fmt: skip
    kinds = {
        "x": f"tensordesc<bf16[{columns},32],{gl.NVMMASharedLayout(64, 16, 2)!r}>",
        "words": f"tensordesc<i16[8,256],{gl.NVMMASharedLayout(0, 16, 2)!r}>",
        "scales": f"tensordesc<i32[1,{tiling.rows}],{gl.NVMMASharedLayout(0, 32, 2)!r}>",
        "out": "*bf16", "parts": "*fp32", "arrivals": "*i32", "tokens": "i32", "outputs": "i32", "units": "i32",
    }  # fmt: skip
    aligned = ["out", "parts", "arrivals", "outputs"]
    kernel = compiled_as(int4_skinny._int4_skinny, kinds, constants, 90, aligned=aligned, num_warps=tiling.warps)
    ptx = kernel.asm["ptx"]
    assert spilled(kernel) == 0
    assert kernel.metadata.shared * (tiling.programs // 132) <= 227 * 1024, "as many programs run on a multiprocessor at once"
    assert ptx.count("wgmma.mma_async") == 8 * tiling.rows // 64
    assert ptx.count("st.shared") <= 1
    assert "ld.shared.v4" in ptx
    before = ptx[: ptx.index("griddepcontrol.wait")]
    assert not any(act in before for act in ("st.global", "ld.global", "atom."))


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [*(size for size in SIZES if size[1] % 8 == 0), (1024, 4096, 128, False), (2560, 8192, 64, True)])
def test_on_gpu(size: tuple[int, int, int, bool], dtype: torch.dtype) -> None:
    from phalanx.kernels.gemm.int4_skinny import int4_skinny_gemm, supports

    weight, elements = drawn(*size, dtype, "cuda")
    nothing = torch.zeros(size[0], device="cuda")
    for tokens in (1, 3, 8, 17, 64, 100, 128):
        for tiling in (SkinnyInt4Tiling(64, 4, 4, 132), SkinnyInt4Tiling(128, 4, 3, 264), SkinnyInt4Tiling(256, 8, 3, 7)):
            x = torch.randn(tokens, size[1], device="cuda").to(dtype)
            assert supports(x, weight)
            output, wanted = int4_skinny_gemm(x, weight, tiling), of_a_long_double(x, elements, nothing)
            assert (output.double() - wanted).norm() < 6e-3 * wanted.norm()
            assert torch.equal(output, int4_skinny_gemm(x, weight, tiling)), "a run repeats"

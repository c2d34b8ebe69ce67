# SPDX-License-Identifier: Apache-2.0
"""Skinny GEMM in e4m3: compiled for Hopper, how the weight is divided over programs; on a GPU what it computes."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from phalanx.errors import EngineError
from phalanx.kernels.gemm import heuristics
from tests.support.kernels_compiled import compiled_as, gluon_compiles, spilled

if not gluon_compiles():
    pytest.skip("the kernel is for another Triton", allow_module_level=True)

SHARED_MEMORY = 227 * 1024  # of one program, in Hopper's shared memory


def compiled_kernel(rows: int, tokens: int, warps: int, *, shared: bool, scaled: bool) -> Any:
    from triton.experimental.gluon import language as gl

    from phalanx.kernels.gemm import fp8_skinny

    sums, stored = fp8_skinny.layouts(rows, tokens, warps)
    constants = {
        "KT": 64, "STAGES": heuristics.num_stages(rows, tokens), "SUMS": sums, "STORED": stored, "AT_ONCE": 2, "SHARED": shared,
    }  # fmt: skip
    pointers = {"out": "bf16", "row_scale": "fp32", "column_scale": "fp32", "parts": "fp32", "arrivals": "i32"}
    if not scaled:
        constants |= {"row_scale": None, "column_scale": None}
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    kinds = {"x": f"tensordesc<fp8e4nv[{tokens},128],{swizzled!r}>", "weight": f"tensordesc<fp8e4nv[{rows},128],{swizzled!r}>"}
    kinds |= {name: "*" + kind for name, kind in pointers.items()} | dict.fromkeys(("tokens", "outputs", "units"), "i32")
    kernel = fp8_skinny._fp8_skinny
    aligned = [name for name in kernel.arg_names if name in (*pointers, "outputs") and name not in constants]
    return compiled_as(kernel, kinds, constants, 90, aligned=aligned, num_warps=warps)


@pytest.mark.parametrize(("rows", "tokens", "warps"), [(64, 8, 4), (128, 16, 4), (64, 32, 4), (64, 64, 4), (128, 64, 4)])
@pytest.mark.parametrize("scaled", [False, True])
def test_compiles(rows: int, tokens: int, warps: int, scaled: bool) -> None:
    kernel = compiled_kernel(rows, tokens, warps, shared=True, scaled=scaled)
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert spilled(kernel) == 0
    ptx = kernel.asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    before = ptx[:wait]
    assert before.count("cp.async.bulk.tensor") == heuristics.num_stages(rows, tokens) + 1  # the weight's tiles, and x's descriptor
    assert not any(act in before for act in ("st.global", "ld.global", "atom."))
    assert "wgmma.mma_async" in ptx[wait:]
    if tokens >= 16:
        assert "st.global.v4.b32" in ptx  # 8 rows at once


def right_side(kernel: Any, begins: str) -> str:
    """The expression behind the `=` of a kernel's line."""
    return next(line.split("=", 1)[1].strip() for line in inspect.getsource(kernel).splitlines() if line.strip().startswith(begins))


def test_counters_are_there_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights that no GEMM has met: a capture is preceded by a few layers alone."""
    from phalanx.kernels.gemm.counters import Counters

    monkeypatch.setattr(Counters, "BLOCK", 1024)
    monkeypatch.setattr(Counters, "ROOM", 512)
    capturing = True
    monkeypatch.setattr(Counters, "_capturing", lambda _: capturing)
    counters = Counters(torch.device("cpu"))
    with pytest.raises(EngineError, match="while a CUDA graph is captured"):
        counters.of(0x1000, 8)
    capturing = False
    first = counters.of(0x1000, 8)
    capturing = True
    others = [counters.of(0x2000 + number, 40) for number in range(8)]  # 8 x 64 counters: all that is kept free
    assert first.dtype == torch.int32
    assert not any(each.any() for each in (first, *others))
    begins = sorted(each.data_ptr() for each in (first, *others))
    assert all(later - earlier >= 128 for earlier, later in pairwise(begins))  # on lines of their own, so aligned alike
    assert counters.of(0x1000, 8) is first
    assert counters.of(0x1000, 9) is not first
    with pytest.raises(EngineError, match="run the GEMM once"):
        counters.of(0x5000, 600)
    capturing = False
    assert len(counters.of(0x5000, 600)) == 600  # more than a block has room for
    first += 1
    assert int(counters.of(0x1000, 8).sum()) == 8  # an earlier block stays


@pytest.mark.parametrize(("along", "deep", "programs"), [(20, 64, 120), (20, 64, 132), (1, 9, 7), (112, 64, 132), (3, 1, 2)])
def test_programs_of_a_row_of_tiles_are_the_same_from_both_sides(along: int, deep: int, programs: int) -> None:
    """Which programs have tiles of a row, by each program's run and by the row's ends, both by the kernel's own expressions; and no
    slot is used twice."""
    from phalanx.kernels.gemm import fp8_skinny

    units = along * deep
    run = right_side(fp8_skinny._fp8_skinny.fn, "first, last =")
    runs = [eval(run, {"program": p, "programs": programs, "units": units}) for p in range(programs)]
    sharers = right_side(fp8_skinny._combine.fn, "first_program, end_program =")
    slots: set[int] = set()
    for row in range(along):
        begin, end = row * deep, (row + 1) * deep
        sharing = [p for p, (first, last) in enumerate(runs) if first < end and last > begin]
        first_program, end_program = eval(sharers, {"tile": row, "KT": deep, "programs": programs, "units": units})
        assert sharing == list(range(first_program, end_program))
        if len(sharing) > 1:
            left = {2 * p + (p == first_program) for p in sharing}
            assert not slots & left
            slots |= left
    assert all(slot < 2 * programs for slot in slots)


SHAPES = ((2560, 8192), (8192, 2048), (14336, 8192), (37888, 3584), (4096, 4096), (2576, 2064), (48, 144), (16, 16))
SHAPES_405B = ((4608, 16384), (16384, 4096), (26624, 16384), (16384, 13312), (53248, 16384), (16384, 26624))
"""Of a model of 405 billion weights, on a rank of four or of two."""


@pytest.mark.gpu1
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES + SHAPES_405B)
def test_is_as_exact_as_the_tensor_cores(outputs: int, inputs: int) -> None:
    """In steps of bf16, with and without scales, whoever adds parts up. Hopper's tensor cores keep 13 bits behind the point when
    they add 32 products in e4m3 to a sum: each time up to 2^-13 of it is lost, which is 1/32 of a step of bf16."""
    from phalanx.kernels.capabilities import gpu
    from phalanx.kernels.gemm.fp8_skinny import fp8_skinny_gemm, supports

    needs_hopper()
    torch.manual_seed(0)
    e4m3, bound = torch.float8_e4m3fn, 1.5 + inputs / 32 / 32
    weight = (torch.randn(outputs, inputs, device="cuda") * 0.5).to(e4m3)
    columns = torch.rand(outputs, device="cuda") + 0.1
    for tokens in (1, 5, 16, 33, 64):
        x, rows = torch.randn(tokens, inputs, device="cuda").to(e4m3), torch.rand(tokens, 1, device="cuda") + 0.1
        tiling = heuristics.select_fp8_skinny(tokens, outputs, inputs, gpu(x.device).num_sms)
        assert supports(x, weight)
        if tiling is None:
            continue
        sums = x.float() @ weight.float().t()
        for scales, wanted in ((None, sums), ((rows, columns), sums * rows * columns)):
            first = fp8_skinny_gemm(x, weight, tiling, scales)
            assert steps(first, wanted) <= bound, (tokens, tiling)
            for _ in range(3):
                assert torch.equal(first, fp8_skinny_gemm(x, weight, tiling, scales)), (tokens, tiling)
        scaled = fp8_skinny_gemm(x, weight, tiling, (rows, columns), dtype=torch.float16)
        assert steps(scaled, sums * rows * columns) <= bound


def needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")


def steps(output: Any, wanted: Any) -> float:
    """The largest error, in steps of bf16 at the size of the value, or of the others where it is smaller."""
    size = wanted.abs().maximum(wanted.square().mean().sqrt()) * 2**-8
    return float(((output.float() - wanted).abs() / size).max().item())


@pytest.mark.gpu1
def test_replays_behind_kernels_that_start_it_early() -> None:
    """GEMMs with one weight, split and not, behind each other and behind a norm, in a graph: the bits of eager ones."""
    from phalanx.kernels.capabilities import gpu
    from phalanx.kernels.gemm.fp8_skinny import fp8_skinny_gemm
    from phalanx.kernels.ops.residual_rms_norm import residual_rms_norm

    needs_hopper()
    torch.manual_seed(0)
    e4m3 = torch.float8_e4m3fn
    weights = [(torch.randn(*shape, device="cuda") * 0.5).to(e4m3) for shape in ((2560, 8192), (8192, 2560), (8192, 8192))]
    norm = torch.ones(8192, device="cuda", dtype=torch.bfloat16)
    for tokens in (3, 40, 64):
        start = torch.randn(tokens, 8192, device="cuda", dtype=torch.bfloat16)

        def chain(start: torch.Tensor = start) -> list[torch.Tensor]:
            outputs, residual = [], start
            for _ in range(4):
                x, _, residual = residual_rms_norm(start, residual, norm, 1e-5, quant="fp8")
                for weight in weights:
                    tiling = heuristics.select_fp8_skinny(len(x), *weight.shape, gpu(x.device).num_sms)
                    if tiling is None:
                        tiling = heuristics.SkinnyTiling(64, heuristics.num_stages(64, len(x)), -(-weight.shape[0] // 64), 4)
                    sums = fp8_skinny_gemm(x, weight, tiling)
                    outputs.append(sums)
                    x = (sums / 256).to(e4m3)
                outputs.append(residual)
            return outputs

        wanted = [each.clone() for each in chain()]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = chain()
        for _ in range(50):
            graph.replay()
            for left, right in zip(outputs, wanted, strict=True):
                assert torch.equal(left, right)

# SPDX-License-Identifier: Apache-2.0
"""One token's GEMVs with the delta of its adapter inside: in Triton's interpreter against the two kernels' reference, compiled for
three generations of GPUs, and on a GPU over many steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phalanx.kernels.adapters import reference
from phalanx.kernels.adapters.rows import AdapterFactors, AdapterRows, GemvDelta
from phalanx.kernels.scaled_tensors import GemvArgs
from tests.support.kernels_adapters import WIDTHS, factors_of
from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytestmark = pytest.mark.usefixtures("forked_python")

RANKS = ([16, 0, 3], [40, 8, 20], [1, 1, 1])
"""Of the slots: as many as are added at a time, more, fewer, and none."""


def rows_of(slot: int, step: int) -> AdapterRows:
    """One token in a captured step, with the adapter of a slot, or with none."""
    tile = [[slot, 0, 1]] if slot >= 0 else [[0, 0, 0]]
    tiles, order = torch.tensor(tile, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    return AdapterRows(1, order, tiles, 16, step=torch.tensor([step], dtype=torch.int32))


def args_of(factors: AdapterFactors, rows: AdapterRows, *, bias: bool = False) -> GemvArgs:
    dtype, outputs, inputs = factors.a.dtype, factors.b.shape[1], factors.a.shape[2]
    added = torch.randn(outputs).to(dtype) if bias else None
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    return GemvArgs(torch.randn(1, inputs).to(dtype), None, weight, None, added, dtype, GemvDelta.of(factors, rows))


def wanted_of(args: GemvArgs, factors: AdapterFactors, rows: AdapterRows) -> Tensor:
    """[1, out] in fp32."""
    out = args.x.float() @ args.weight.float().T + (0.0 if args.bias is None else args.bias.float())
    return reference.add_delta(out, args.x, factors, rows) if rows.tiles[0, 2] else out


def check_gemv() -> None:
    """Each slot, and no adapter, one step after the other: no sum of one step is read by the next."""
    from phalanx.kernels.adapters.gemv_delta import gemv
    from phalanx.kernels.gemm.heuristics import GemvTiling

    for dtype, bound in ((torch.float32, 1e-4), (torch.float16, 2e-2)):
        factors = factors_of(RANKS, 200, 48, dtype)
        for step, (slot, rows, bias) in enumerate([(1, 1, True), (0, 2, False), (-1, 1, True), (2, 4, False), (1, 2, False)], 1):
            at = rows_of(slot, step)
            args, out = args_of(factors, at, bias=bias), torch.empty(1, sum(WIDTHS), dtype=dtype)
            assert gemv(args, out, GemvTiling(rows, 64, 4)) is out
            torch.testing.assert_close(out.float(), wanted_of(args, factors, at), rtol=bound, atol=10 * bound)


def check_gate_up_silu() -> None:
    from phalanx.kernels.gemm.gemv_fused_kernels import gate_up_silu
    from phalanx.kernels.gemm.heuristics import FusedGemvTiling

    width = WIDTHS[0]
    for step, (slot, pairs) in enumerate([(0, 1), (1, 8), (-1, 1)], 1):
        factors = factors_of([[16, 3], [20, 0]], 136, 32, torch.float32)
        columns = [(0, 0, width), (1, width, 2 * width)]
        b = torch.randn(2, 2 * width, 32)
        factors = AdapterFactors.empty(2, 32, 136, columns, torch.float32, b.device)._replace(
            a=factors.a, b=b, ranks=factors.ranks, ranks_cpu=factors.ranks_cpu
        )
        rows = rows_of(slot, step)
        args = args_of(factors, rows)
        gate, up = wanted_of(args, factors, rows).chunk(2, dim=1)
        output = gate_up_silu(args, FusedGemvTiling(pairs, 64, 4))
        torch.testing.assert_close(output, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-3)


def check_qkv_rope_store() -> None:
    from phalanx.kernels import reference as ops
    from phalanx.kernels.gemm.gemv_fused_kernels import qkv_rope_store
    from phalanx.kernels.gemm.heuristics import FusedGemvTiling

    heads, dim, inputs = (4, 2), 16, 72
    query, kv = heads[0] * dim, heads[1] * dim
    columns = [(0, 0, query), (1, query, query + kv), (2, query + kv, query + 2 * kv)]
    empty = AdapterFactors.empty(1, 16, inputs, columns, torch.float32, torch.zeros(0).device)
    ranks = [[16, 0, 5]]
    factors = empty._replace(
        a=torch.randn(1, 48, inputs) / inputs**0.5, b=torch.randn(1, query + 2 * kv, 16),
        ranks=torch.tensor(ranks, dtype=torch.int32), ranks_cpu=ranks,
    )  # fmt: skip
    rows = rows_of(0, 7)
    args, angles, slots = args_of(factors, rows, bias=True), torch.rand(1, dim // 2) * 7, torch.tensor([3])
    caches = [torch.zeros(2, 4, heads[1], dim) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    output = wanted_of(args, factors, rows).view(1, -1, dim)
    wanted = ops.rope_store(output, angles.cos(), angles.sin(), *expected, slots, heads[0])
    rotated = qkv_rope_store(args, angles.cos(), angles.sin(), *caches, slots, heads[0], None, FusedGemvTiling(1, 64, 4))
    for actual, want in zip((rotated, *caches), (wanted, *expected), strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-4, atol=1e-3)


CHECKS = [check_gemv, check_gate_up_silu, check_qkv_rope_store]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.gpu1
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("check", CHECKS)
def test_on_gpu(check: Callable[[], None]) -> None:
    with torch.device("cuda"):
        check()


@pytest.mark.gpu1
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_thousands_of_steps_on_gpu() -> None:
    """Layers of a decoder's size, one behind the other, whose slots change: each output is that of the step's adapter."""
    from phalanx.kernels.gemm.linear import linear_with_delta

    torch.manual_seed(0)
    with torch.device("cuda"):
        columns = [(0, 0, 4096), (1, 4096, 5120), (2, 5120, 6144)]
        empty = AdapterFactors.empty(3, 16, 4096, columns, torch.bfloat16, torch.device("cuda"))
        ranks = [[16, 16, 16], [8, 16, 0], [16, 1, 3]]
        factors = empty._replace(
            a=(torch.randn(3, 48, 4096) / 64).bfloat16(), b=torch.randn(3, 6144, 16).bfloat16(),
            ranks=torch.tensor(ranks, dtype=torch.int32), ranks_cpu=ranks,
        )  # fmt: skip
        args = args_of(factors, rows_of(0, 1))
        wanted = [wanted_of(args, factors, rows_of(slot, 1)) for slot in range(3)]
        for begin in range(0, 3000, 30):
            outs = [
                linear_with_delta(args._replace(delta=GemvDelta.of(factors, rows_of(step % 3, step + 1))))
                for step in range(begin, begin + 30)
            ]
            for at, out in enumerate(outs, begin):
                assert out is not None
                torch.testing.assert_close(out.float(), wanted[at % 3], rtol=3e-2, atol=0.15)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("kernel", ["gemv", "gate_up_silu", "qkv_rope_store"])
def test_compiles(kernel: str, arch: int) -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.adapters import gemv_delta
    from phalanx.kernels.gemm import gemv_fused_kernels

    kinds = dict.fromkeys(("x", "weight", "bias", "out", "query", "a", "b", "key_cache", "value_cache"), "*bf16")
    kinds |= {"sums": "*i64", "part_of": "*i8", "tiles": "*i32", "ranks": "*i32", "step": "*i32", "slots": "*i64"}
    kinds |= dict.fromkeys(("parts", "room", "rows", "pairs", "q_heads", "kv_heads"), "i32")
    kinds |= {"cos": "*fp32", "sin": "*fp32", "key_inverse": "fp32", "value_inverse": "fp32"}
    constants = {"COLUMNS": 4096, "BLOCK": 2048}
    if kernel == "gemv":
        function, more = gemv_delta._gemv, {"ROWS": 1}
    else:
        function = getattr(gemv_fused_kernels, f"_{kernel}")
        more = dict.fromkeys(("x_scale", "scale")) | {"PADDED": 4096, "QUANTIZE": False, "STATIC": False, "PAIRS": 1}
        more |= {"SPAN": 14336} if kernel == "gate_up_silu" else {"SPAN": 64, "FP8_CACHE": False}
    code = compiled(function, kinds, constants | more, arch).asm["ptx"]
    assert code.count("ld.volatile.global.b64") == 3, "sums are read before the loop, while they are not there, and in the loop"

# SPDX-License-Identifier: Apache-2.0
"""GEMVs with fused epilogues: in Triton's interpreter the same bits as by two kernels, compiled for the GPUs that run them,
and on a GPU beside two kernels."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from phalanx.kernels.adapters.rows import GemvDelta
from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

if TYPE_CHECKING:
    from phalanx.kernels.scaled_tensors import GemvArgs

FP8 = torch.float8_e4m3fn
KINDS = ["16", "quantized", "quantizes", "static"]
"""Of args: both in 16 bit; both in e4m3; x quantized by the kernel, with its own scale, or with a given one."""


def args_of(kind: str, outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False, device: str = "cpu") -> GemvArgs:
    from phalanx.kernels import reference
    from phalanx.kernels.scaled_tensors import GemvArgs

    x, exact = torch.randn(1, inputs, device=device).to(dtype), torch.randn(outputs, inputs, device=device)
    added = torch.randn(outputs, device=device).to(dtype) if bias else None
    if kind == "16":
        return GemvArgs(x, None, exact.to(dtype), None, added, dtype)
    weight, scale = reference.quantize_fp8(exact)
    scale = scale.flatten() / inputs**0.5
    if kind == "quantized":
        return GemvArgs(*reference.quantize_fp8(x), weight, scale, added, dtype)
    return GemvArgs(x, torch.tensor(0.01, device=device) if kind == "static" else None, weight, scale, added, dtype)


def output_of(args: GemvArgs, tiling: tuple[int, int, int]) -> Tensor:
    """By the GEMV kernel without a fused op."""
    from phalanx.kernels.gemm.gemv import gemv
    from phalanx.kernels.gemm.gemv_fp8 import gemv_fp8
    from phalanx.kernels.gemm.heuristics import GemvTiling

    x, x_scale, weight, scale, bias, dtype, _ = args
    assert bias is None
    if scale is None:
        return gemv(x, weight, **GemvTiling(*tiling)._asdict())
    return gemv_fp8(x, x_scale, weight, scale, dtype=dtype, tiling=GemvTiling(*tiling))


def check_gate_up_silu() -> None:
    from phalanx.kernels.gemm.gemv_fused_kernels import gate_up_silu
    from phalanx.kernels.gemm.heuristics import FusedGemvTiling
    from phalanx.kernels.ops.silu_and_mul import silu_mul

    for kind in KINDS:
        for dtype, inner, inputs, pairs in ((torch.bfloat16, 3, 16, 1), (torch.float16, 7, 208, 2), (torch.bfloat16, 33, 1040, 8)):
            args = args_of(kind, 2 * inner, inputs, dtype)
            wanted = silu_mul(output_of(args, (16, 256, 4)))
            got_outputs = gate_up_silu(args, FusedGemvTiling(pairs, 256, 4))
            assert got_outputs.shape == (1, inner)
            assert torch.equal(got_outputs, wanted), (kind, dtype, inner)


def check_qkv_rope_store() -> None:
    from phalanx.kernels.gemm.gemv_fused_kernels import qkv_rope_store
    from phalanx.kernels.gemm.heuristics import FusedGemvTiling
    from phalanx.kernels.ops.rope_kv_cache import rope_store

    cases = [
        (torch.bfloat16, (2, 1, 4, 1), False, 5), (torch.float16, (3, 1, 12, 4), True, 5),
        (torch.bfloat16, (6, 3, 16, 16), True, 0),
        (torch.bfloat16, (4, 2, 8, 8), False, -1),
    ]  # fmt: skip
    for kind, (dtype, (q_heads, kv_heads, head_dim, pairs), fp8, slot) in itertools.product(KINDS, cases):
        heads = q_heads + 2 * kv_heads
        args = args_of(kind, heads * head_dim, 48, dtype)
        angles, slots = torch.rand(1, head_dim // 2) * 7, torch.tensor([slot])
        caches = [torch.randn(3, 4, kv_heads, head_dim).to(FP8 if fp8 else dtype) for _ in range(2)]
        expected = [cache.clone() for cache in caches]
        scales = (0.25, 0.5) if fp8 else None
        output = output_of(args, (32, 64, 4)).view(1, heads, head_dim)
        wanted = rope_store(output, angles.cos(), angles.sin(), *expected, slots, q_heads, scales)
        query = qkv_rope_store(args, angles.cos(), angles.sin(), *caches, slots, q_heads, scales, FusedGemvTiling(pairs, 64, 4))
        for actual, want in zip((query, *caches), (wanted, *expected), strict=True):
            assert actual.dtype == want.dtype
            assert torch.equal(actual.float(), want.float()), (kind, dtype, head_dim, fp8, slot)


def check_a_bias_is_added_before_the_rounding() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.gemm.gemv_fused_kernels import qkv_rope_store
    from phalanx.kernels.gemm.heuristics import FusedGemvTiling

    for kind in ("16", "quantized"):
        args = args_of(kind, 8 * 8, 48, torch.bfloat16, bias=True)
        angles, slots = torch.rand(1, 4) * 7, torch.tensor([2])
        caches = [torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
        expected = [cache.clone() for cache in caches]
        x, x_scale, weight, scale, bias, *_ = args
        assert bias is not None
        exact = x.float() @ weight.float().t() * (1.0 if scale is None or x_scale is None else x_scale * scale)
        output = (exact + bias.float()).to(torch.bfloat16).view(1, 8, 8)
        wanted = reference.rope_store(output, angles.cos(), angles.sin(), *expected, slots, 4)
        query = qkv_rope_store(args, angles.cos(), angles.sin(), *caches, slots, 4, None, FusedGemvTiling(8, 64, 4))
        for actual, want in zip((query, *caches), (wanted, *expected), strict=True):
            torch.testing.assert_close(actual, want, rtol=2.0**-7, atol=2.0**-6)


CHECKS = [check_gate_up_silu, check_qkv_rope_store, check_a_bias_is_added_before_the_rounding]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.parametrize("kernel", ["gate_up_silu", "qkv_rope_store", "qkv_rope_store in e4m3"])
@pytest.mark.parametrize(("kind", "arch"), [("16", 80), ("16", 90), ("16", 100), ("e4m3", 90), ("e4m3", 100), ("quantize", 90)])
def test_compiles(kernel: str, kind: str, arch: int) -> None:
    from phalanx.kernels.gemm import gemv_fused_kernels

    fp8 = kind != "16"
    pointers = {"x": "fp8e4nv" if kind == "e4m3" else "bf16", "weight": "fp8e4nv" if fp8 else "bf16"}
    constants = {
        "COLUMNS": 4096, "PADDED": 4096, "QUANTIZE": kind == "quantize", "STATIC": kind == "e4m3", "PAIRS": 1,
        "BLOCK": 4096 if fp8 else 2048,
    } | dict.fromkeys(GemvDelta._fields)  # fmt: skip
    for name, here in (("x_scale", kind == "e4m3"), ("scale", fp8)):
        if here:
            pointers[name] = "fp32"
        else:
            constants[name] = None
    numbers = {"pairs": "i32"}
    if kernel == "gate_up_silu":
        function = gemv_fused_kernels._gate_up_silu
        pointers["out"], constants["bias"], constants["SPAN"] = "bf16", None, 14336
    else:
        function, cache = gemv_fused_kernels._qkv_rope_store, "u8" if kernel.endswith("e4m3") else "bf16"
        pointers |= {"bias": "bf16", "cos": "fp32", "sin": "fp32", "query": "bf16", "slots": "i64"}
        pointers |= {"key_cache": cache, "value_cache": cache}
        numbers |= {"q_heads": "i32", "kv_heads": "i32", "key_inverse": "fp32", "value_inverse": "fp32"}
        constants |= {"SPAN": 64, "FP8_CACHE": cache == "u8"}
    compiled(function, {name: "*" + of for name, of in pointers.items()} | numbers, constants, arch)


TILINGS = {"16": [(1, 2048, 4), (2, 1024, 4)], "fp8": [(1, 8192, 4), (2, 2048, 2), (1, 4096, 4)]}


def needs_fp8(kind: str) -> None:
    from phalanx.kernels.capabilities import has_fp8_gemm

    if kind != "16" and not has_fp8_gemm(torch.device("cuda")):
        pytest.skip("this GPU has no FP8 GEMM")


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inner", "inputs"), [(512, 4096), (3584, 8192), (72, 3584)])
def test_gate_up_silu_on_gpu(kind: str, inner: int, inputs: int) -> None:
    """The bits of two kernels."""
    from phalanx import kernels
    from phalanx.kernels.gemm import gemv_fused
    from phalanx.kernels.gemm.gemv_fused_kernels import gate_up_silu
    from phalanx.kernels.gemm.heuristics import FusedGemvTiling

    needs_fp8(kind)
    torch.manual_seed(inner)
    args = args_of(kind, 2 * inner, inputs, torch.bfloat16, device="cuda")
    for pairs, block, warps in TILINGS["16" if kind == "16" else "fp8"]:
        wanted = kernels.silu_mul(output_of(args, (2 * pairs, block, warps)))
        got_outputs = gate_up_silu(args, FusedGemvTiling(pairs, block, warps))
        assert torch.equal(got_outputs, wanted), f"{(got_outputs != wanted).sum()} of {inner}, {(pairs, block, warps)}"
    chosen = gemv_fused.gate_up_silu(args)
    assert chosen is not None
    assert (chosen.float() - wanted.float()).norm() < 1e-2 * wanted.float().norm()


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8])
@pytest.mark.parametrize("slot", [37, -1])
def test_qkv_rope_store_on_gpu(kind: str, cache: torch.dtype, slot: int) -> None:
    """The bits of two kernels."""
    from phalanx import kernels
    from phalanx.kernels.gemm import gemv_fused
    from phalanx.kernels.gemm.gemv_fused_kernels import qkv_rope_store
    from phalanx.kernels.gemm.heuristics import FusedGemvTiling

    needs_fp8(kind)
    torch.manual_seed(slot)
    q_heads, kv_heads, head_dim, inputs = 8, 2, 128, 8192
    args = args_of(kind, (q_heads + 2 * kv_heads) * head_dim, inputs, torch.bfloat16, device="cuda")
    angles, slots = torch.rand(1, head_dim // 2, device="cuda") * 7, torch.tensor([slot], device="cuda")
    cos_sin, scales = (angles.cos(), angles.sin()), (0.25, 0.5) if cache == FP8 else None
    caches = [torch.randn(4, 16, kv_heads, head_dim, device="cuda").to(cache) for _ in range(2)]
    for pairs, block, warps in TILINGS["16" if kind == "16" else "fp8"]:
        got_outputs, wanted = ([each.clone() for each in caches] for _ in range(2))
        output = output_of(args, (2 * pairs, block, warps)).view(1, -1, head_dim)
        wanted.append(kernels.rope_store(output, *cos_sin, wanted[0], wanted[1], slots, q_heads, scales))
        got_outputs.append(
            qkv_rope_store(
                args, *cos_sin, got_outputs[0], got_outputs[1], slots, q_heads, scales, FusedGemvTiling(pairs, block, warps)
            )
        )
        for actual, want in zip(got_outputs, wanted, strict=True):
            assert torch.equal(actual.view(torch.uint8), want.view(torch.uint8)), (pairs, block, warps)
    if slot < 0:
        assert torch.equal(got_outputs[0].view(torch.uint8), caches[0].view(torch.uint8))
    chosen = gemv_fused.qkv_rope_store(args, *cos_sin, caches[0], caches[1], slots, q_heads, scales)
    assert chosen is not None
    assert (chosen.float() - wanted[2].float()).norm() < 1e-2 * wanted[2].float().norm()

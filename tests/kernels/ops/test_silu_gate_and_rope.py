# SPDX-License-Identifier: Apache-2.0
"""The kernels between products: in Triton's interpreter against the reference, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from phalanx.kernels.scaled_tensors import Unscaled
from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpreted

pytest.importorskip("triton")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_silu_mul() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import silu_and_mul

    for dtype, (tokens, width) in itertools.product(DTYPES.values(), [(1, 64), (3, 100), (2, 2100), (0, 8)]):
        gate_up = (torch.randn(tokens, 2 * width) * 3).to(dtype)
        # Two roundings: where exp() differs in its last bit, either may fall on the other side.
        step = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(silu_and_mul.silu_mul(gate_up), reference.silu_mul(gate_up), rtol=step, atol=1e-6)
        for scale in (None, torch.tensor(0.02)):
            got, scales = silu_and_mul.silu_mul_quant_fp8(gate_up, scale)
            wanted, wanted_scales = reference.silu_mul_quant_fp8(gate_up, scale)
            assert got.dtype == torch.float8_e4m3fn
            torch.testing.assert_close(scales, wanted_scales, rtol=step, atol=0)
            near = (got.float() - wanted.float()).abs() <= wanted.float().abs() / 8 + 2.0**-9
            assert near.all()
            assert (got.float() == wanted.float()).float().mean() > 0.98 if tokens else True


def unscaled(values: torch.Tensor) -> Unscaled:
    """The values as sums, of a thousand times what they were."""
    tokens, width = values.shape
    return Unscaled((values.float() * 1e3).to(values.dtype), torch.rand(tokens, 1) / 500, torch.rand(width) + 0.5)


def check_silu_mul_of_sums() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import silu_and_mul

    for dtype, (tokens, width) in itertools.product((torch.bfloat16, torch.float32), [(3, 100), (2, 2100), (0, 8)]):
        sums, eps = unscaled((torch.randn(tokens, 2 * width) * 3).to(dtype)), torch.finfo(dtype).eps
        torch.testing.assert_close(silu_and_mul.silu_mul(sums), reference.silu_mul(sums), rtol=max(eps, 1e-6), atol=1e-6)
        finished = reference.silu_mul(sums.to_fp32().to(dtype))
        torch.testing.assert_close(silu_and_mul.silu_mul(sums), finished, rtol=6 * eps, atol=1e-3 * eps**0.5)
        for scale in (None, torch.tensor(0.02)):
            got, scales = silu_and_mul.silu_mul_quant_fp8(sums, scale)
            wanted, wanted_scales = reference.silu_mul_quant_fp8(sums, scale)
            torch.testing.assert_close(scales, wanted_scales, rtol=max(eps, 1e-6), atol=0)
            assert ((got.float() - wanted.float()).abs() <= wanted.float().abs() / 8 + 2.0**-9).all()
            assert (got.float() == wanted.float()).float().mean() > 0.98 if tokens else True


def check_beyond_what_exp_can_be() -> None:
    from phalanx.kernels.ops import silu_and_mul

    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 1e30, 1.0, -1.0]])
    got = silu_and_mul.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(got, torch.nn.functional.silu(gate))


def check_a_row_of_zeros_quantizes() -> None:
    from phalanx.kernels.ops import silu_and_mul

    values, scales = silu_and_mul.silu_mul_quant_fp8(torch.zeros(2, 64))
    assert (values.float() == 0).all()
    assert (scales > 0).all()


def check_rope_store() -> None:
    rope_store_is_the_references(scaled_by_it=False)


def check_rope_store_of_sums() -> None:
    rope_store_is_the_references(scaled_by_it=True)


def rope_store_is_the_references(*, scaled_by_it: bool) -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import rope_kv_cache

    shapes = [(4, 2, 8), (6, 1, 12), (12, 4, 16)]
    for (name, dtype), (q_heads, kv_heads, head_dim), fp8 in itertools.product(DTYPES.items(), shapes, (False, True)):
        qkv = torch.randn(5, q_heads + 2 * kv_heads, head_dim).to(dtype)
        if scaled_by_it:
            qkv = unscaled(qkv.flatten(1)).view(*qkv.shape)
        angles = torch.rand(5, head_dim // 2) * 7
        slots = torch.tensor([5, -1, 11, 0, -1])
        kind = torch.float8_e4m3fn if fp8 else dtype
        held = [torch.randn(3, 4, kv_heads, head_dim).to(kind) for _ in range(2)]
        scales = (0.25, 0.004) if fp8 else None
        expected = [cache.clone() for cache in held]
        wanted = reference.rope_store(qkv, angles.cos(), angles.sin(), *expected, slots, q_heads, scales)
        query = rope_kv_cache.rope_store(qkv, angles.cos(), angles.sin(), *held, slots, q_heads, scales)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(query, wanted, rtol=2 * step, atol=step)
        for got, want in zip(held, expected, strict=True):
            if fp8:
                assert (got.float() == want.float()).float().mean() > 0.98, name
            torch.testing.assert_close(got.float(), want.float(), rtol=0.126 if fp8 else 2 * step, atol=2.0**-8 if fp8 else step)
        untouched = [3, 7, 8]  # -1 stores nothing, not even at the end of the cache
        for got, want in zip(held, expected, strict=True):
            assert torch.equal(got.float().flatten(0, 1)[untouched], want.float().flatten(0, 1)[untouched])


CHECKS = [
    check_silu_mul, check_silu_mul_of_sums, check_beyond_what_exp_can_be, check_a_row_of_zeros_quantizes, check_rope_store,
    check_rope_store_of_sums,
]  # fmt: skip


def test_in_the_interpreter() -> None:
    assert interpreted("tests.kernels.ops.test_silu_gate_and_rope").split() == [check.__name__ for check in CHECKS]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("kernel", ["silu_mul", "silu_mul_quant_fp8", "silu_mul_given_fp8", "rope_store", "rope_store_fp8"])
def test_compiles(kernel: str, sums: bool, arch: int) -> None:
    """Down to machine code. The launch's own choices (PDL from Hopper on, the FP8 conversion from Ada on) compile with it."""
    from phalanx.kernels.ops import rope_kv_cache, silu_and_mul

    bf16, bytes_, fp32, int64 = "*bf16", "*u8", "*fp32", "*i64"
    if kernel == "silu_mul":
        function, signature = silu_and_mul._silu_mul, {"gate_up": bf16, "out": bf16, "width": "i32"}
        constants = {"BLOCK": 2048}
    elif kernel.startswith("silu_mul"):
        function, signature = silu_and_mul._silu_mul_quant_fp8, {"gate_up": bf16, "out": bytes_, "scales": fp32, "width": "i32"}
        constants = {"GIVEN": "given" in kernel, "BLOCK": 16384}
    else:
        cache = bytes_ if kernel.endswith("fp8") else bf16
        function = rope_kv_cache._rope_store
        signature = {
            "qkv": bf16, "cos": fp32, "sin": fp32, "query": bf16, "key_cache": cache, "value_cache": cache, "slots": int64,
            "q_heads": "i32", "kv_heads": "i32", "half": "i32", "key_inverse": "fp32", "value_inverse": "fp32",
        }  # fmt: skip
        constants = {"BLOCK": rope_kv_cache.HEADS, "HALF": 64, "FP8": kernel.endswith("fp8")}
    if sums:
        signature |= {"rows": fp32, "columns": fp32}
    else:
        constants |= {"rows": None, "columns": None}
    sm = compiled(function, signature, constants, arch).asm["ptx"]
    if arch >= 89 and kernel in ("silu_mul_given_fp8", "rope_store_fp8"):
        assert "min.NaN." in sm, "clipped to +-448, and NaN stays NaN"


if __name__ == "__main__":
    torch.manual_seed(0)
    for check in CHECKS:
        check()
        print(check.__name__)

# SPDX-License-Identifier: Apache-2.0
"""RoPE and the KV cache: in Triton's interpreter against the reference, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from phalanx.kernels.scaled_tensors import Unscaled
from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def unscaled(values: torch.Tensor) -> Unscaled:
    """The values as an unscaled GEMM output, a thousand times as large."""
    tokens, width = values.shape
    return Unscaled((values.float() * 1e3).to(values.dtype), torch.rand(tokens, 1) / 500, torch.rand(width) + 0.5)


def check_rope_store() -> None:
    rope_store_is_the_references(is_unscaled=False)


def check_rope_store_of_an_unscaled_output() -> None:
    rope_store_is_the_references(is_unscaled=True)


def check_rope_store_of_normed_heads() -> None:
    rope_store_is_the_references(is_unscaled=True, has_norm=True)


def rope_store_is_the_references(*, is_unscaled: bool, has_norm: bool = False) -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import rope_kv_cache

    shapes = [(4, 2, 8), (6, 1, 12), (12, 4, 16)]
    for (name, dtype), (q_heads, kv_heads, head_dim), fp8 in itertools.product(DTYPES.items(), shapes, (False, True)):
        qkv = torch.randn(5, q_heads + 2 * kv_heads, head_dim).to(dtype)
        if is_unscaled:
            qkv = unscaled(qkv.flatten(1)).view(*qkv.shape)
        angles = torch.rand(5, head_dim // 2) * 7
        slots = torch.tensor([5, -1, 11, 0, -1])
        kind = torch.float8_e4m3fn if fp8 else dtype
        caches = [torch.randn(3, 4, kv_heads, head_dim).to(kind) for _ in range(2)]
        scales = (0.25, 0.004) if fp8 else None
        expected = [cache.clone() for cache in caches]
        norm = reference.HeadNorm(*(torch.randn(2, head_dim) + 1).to(dtype), 1e-5) if has_norm else None
        wanted = reference.rope_store(qkv, angles.cos(), angles.sin(), *expected, slots, q_heads, scales, norm)
        query = rope_kv_cache.rope_store(qkv, angles.cos(), angles.sin(), *caches, slots, q_heads, scales, norm)
        step = torch.finfo(dtype).eps * (4 if has_norm else 1)  # a norm magnifies what the first rounding leaves
        torch.testing.assert_close(query, wanted, rtol=2 * step, atol=step)
        for actual, want in zip(caches, expected, strict=True):
            if fp8:
                assert (actual.float() == want.float()).float().mean() > 0.98, name
            torch.testing.assert_close(actual.float(), want.float(), rtol=0.126 if fp8 else 2 * step, atol=2.0**-8 if fp8 else step)
        untouched = [3, 7, 8]  # -1 stores nothing, not even at the end of the cache
        for actual, want in zip(caches, expected, strict=True):
            assert torch.equal(actual.float().flatten(0, 1)[untouched], want.float().flatten(0, 1)[untouched])


def check_rope_store_in_int8() -> None:
    """Bit for bit, where nothing is rotated: rows of zeros, ties, rows of all sizes, NaN and infinity among them."""
    from phalanx.kernels import reference
    from phalanx.kernels.ops import rope_kv_cache

    sizes = torch.tensor([1.0, 1e-6, 1e4, 1e-12, 0.0])[:, None, None]
    shapes = [(4, 2, 8, 4), (6, 1, 12, 5), (12, 4, 16, 1)]
    for (name, dtype), (q_heads, kv_heads, head_dim, block_size) in itertools.product(DTYPES.items(), shapes):
        qkv = (torch.randn(5, q_heads + 2 * kv_heads, head_dim) * sizes).to(dtype)
        qkv[0, q_heads:, :3] = torch.tensor([127.0, 0.5, -2.5])  # the scale is 1: ties go to even integers
        qkv[0, q_heads:, 3:] = torch.tensor(1.5)
        qkv[1, q_heads, 1], qkv[1, -1, 2] = float("nan"), float("-inf")
        slots = torch.tensor([17, 4, 11, 0, -1])
        blocks = 24 // block_size
        angles = torch.zeros(5, head_dim // 2)
        caches = [torch.randint(-99, 99, (blocks, block_size, kv_heads, head_dim), dtype=torch.int8) for _ in range(2)]
        scales = torch.rand(blocks, kv_heads, block_size, 2).to(torch.bfloat16)
        expected, expected_scales = [cache.clone() for cache in caches], scales.clone()
        arguments = qkv, angles.cos(), angles.sin()
        wanted = reference.rope_store(*arguments, *expected, slots, q_heads, token_scales=expected_scales)
        query = rope_kv_cache.rope_store(*arguments, *caches, slots, q_heads, token_scales=scales)
        torch.testing.assert_close(query, wanted, rtol=0, atol=0)
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
        by_slot = scales.transpose(1, 2).flatten(0, 1)  # [slots, kv_heads, 2]
        assert by_slot[4, 0, 0].isnan(), name
        assert by_slot[4, -1, 1].isinf(), name
        assert bool((by_slot[[17, 11, 0]] > 0).all())
        for part, (actual, want) in enumerate(zip(caches, expected, strict=True)):
            finite = by_slot[..., part].isfinite()
            assert torch.equal(actual.flatten(0, 1)[finite], want.flatten(0, 1)[finite]), name
            assert actual.flatten(0, 1)[17, 0, :4].tolist() == [127, 0, -2, 2]


def check_rope_store_in_int8_rotates_and_scales_too() -> None:
    """As `check_rope_store`, with an unscaled output and a head norm: within a step of the reference."""
    from phalanx.kernels import reference
    from phalanx.kernels.ops import rope_kv_cache

    qkv = unscaled(torch.randn(5, 8, 16).to(torch.bfloat16).flatten(1)).view(5, 8, 16)
    angles, slots = torch.rand(5, 8) * 7, torch.tensor([5, -1, 11, 0, 2])
    norm = reference.HeadNorm(*(torch.randn(2, 16) + 1).to(torch.bfloat16), 1e-5)
    caches = [torch.zeros(3, 4, 2, 16, dtype=torch.int8) for _ in range(4)]
    scales = [torch.ones(3, 2, 4, 2, dtype=torch.bfloat16) for _ in range(2)]
    reference.rope_store(qkv, angles.cos(), angles.sin(), *caches[:2], slots, 4, None, norm, scales[0])
    rope_kv_cache.rope_store(qkv, angles.cos(), angles.sin(), *caches[2:], slots, 4, None, norm, scales[1])
    torch.testing.assert_close(scales[1], scales[0], rtol=0.02, atol=0)
    for actual, want in zip(caches[2:], caches[:2], strict=True):
        assert (actual.int() - want.int()).abs().max() <= 2
        assert (actual == want).float().mean() > 0.9


CHECKS = [
    check_rope_store_in_int8,
    check_rope_store_in_int8_rotates_and_scales_too,
    check_rope_store,
    check_rope_store_of_an_unscaled_output,
    check_rope_store_of_normed_heads,
]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("kv", ["model", "fp8", "int8"])
def test_compiles(kv: str, unscaled: bool, arch: int) -> None:
    """Down to machine code. The launch's own choices (PDL from Hopper on, the FP8 conversion from Ada on) compile with it."""
    from phalanx.kernels.ops import rope_kv_cache
    from phalanx.kernels.ops.heuristics import rope_heads

    cache = {"model": "*bf16", "fp8": "*u8", "int8": "*i8"}[kv]
    signature = {
        "qkv": "*bf16", "pitch": "i32", "cos": "*fp32", "sin": "*fp32", "query": "*bf16", "key_cache": cache,
        "value_cache": cache, "slots": "*i64", "q_heads": "i32", "kv_heads": "i32", "half": "i32",
        "eps": "fp32", "key_inverse": "fp32", "value_inverse": "fp32",
        "token_scales": "*bf16",
    }  # fmt: skip
    constants = {"BLOCK": rope_heads(1000), "HALF": 64, "FP8": kv == "fp8", "BLOCK_SIZE": 16}
    if kv != "int8":
        constants["token_scales"] = None
    if unscaled:
        signature |= {"rows": "*fp32", "columns": "*fp32", "q_norm": "*bf16", "k_norm": "*bf16"}
    else:
        constants |= dict.fromkeys(("rows", "columns", "q_norm", "k_norm"))
    ptx = compiled(rope_kv_cache._rope_store, signature, constants, arch).asm["ptx"]
    if arch >= 89 and kv == "fp8":
        assert "min.NaN." in ptx, "clipped to +-448, and NaN stays NaN"


@pytest.mark.gpu1
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("kind", list(DTYPES))
def test_int8_on_a_gpu(kind: str, block_size: int) -> None:
    """What is not rotated has the reference's bits; what is has its scales, and values within a step of its."""
    from phalanx.kernels import reference
    from phalanx.kernels.ops import rope_kv_cache

    dtype, device, generator = DTYPES[kind], torch.device("cuda"), torch.Generator().manual_seed(1)
    sizes = 10.0 ** torch.randint(-6, 5, (200, 1, 1), generator=generator)
    qkv = (torch.randn(200, 4 + 2 * 2, 128, generator=generator) * sizes).to(dtype).to(device)
    qkv[3], qkv[4, :, 0] = 0.0, float("nan")
    slots = torch.randperm(60 * block_size, generator=generator)[:200].to(device)
    slots[7] = -1
    angles = (torch.rand(200, 64, generator=generator) * 7).to(device)
    caches = [torch.zeros(60, block_size, 2, 128, dtype=torch.int8, device=device) for _ in range(4)]
    scales = [torch.ones(60, 2, block_size, 2, dtype=torch.bfloat16, device=device) for _ in range(2)]
    wanted = reference.rope_store(qkv, angles.cos(), angles.sin(), *caches[:2], slots, 4, token_scales=scales[0])
    query = rope_kv_cache.rope_store(qkv, angles.cos(), angles.sin(), *caches[2:], slots, 4, token_scales=scales[1])
    step = torch.finfo(dtype).eps
    # Of a rotated pair, sums of products that cancel: errors are relative to the largest of a head.
    largest = wanted.nan_to_num().abs().amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    torch.testing.assert_close(query / largest, wanted / largest, rtol=2 * step, atol=2 * step, equal_nan=True)
    torch.testing.assert_close(scales[1][..., 1], scales[0][..., 1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scales[1], scales[0], rtol=0.01, atol=0, equal_nan=True)
    finite = scales[0].transpose(1, 2).isfinite()
    assert torch.equal(caches[3][finite[..., 1]], caches[1][finite[..., 1]])
    assert int((caches[2].int() - caches[0].int())[finite[..., 0]].abs().max()) <= 1

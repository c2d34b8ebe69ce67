# SPDX-License-Identifier: Apache-2.0
"""RoPE and the latent cache: in Triton's interpreter against the reference, and compiled for three generations of GPUs."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_latent_rope_store() -> None:
    """The inputs are columns of wider tensors, as in a model."""
    from phalanx.kernels import reference
    from phalanx.kernels.ops import latent_rope_store as op

    kinds = [*itertools.product(DTYPES.items(), [(20, 16, 12, 24)], (False, True), (False, True))]
    kinds.append((("bf16", torch.bfloat16), (17, 128, 64, 512), False, True))
    for (name, dtype), (heads, nope, rope, rank), fp8, interleaved in kinds:
        width = heads * (nope + rope)
        projected = torch.randn(5, width + rank + rope).to(dtype)
        angles = torch.rand(5, rope // 2) * 7
        slots = torch.tensor([5, -1, 11, 0, -1])
        weight = (torch.randn(rank) + 1).to(dtype)
        cache = torch.randn(3, 4, 1, rank + rope).to(torch.float8_e4m3fn if fp8 else dtype)
        both = []
        for act in (reference.latent_rope_store, op.latent_rope_store):
            own, target = projected.clone(), cache.clone()
            query = own[:, :width].view(5, heads, nope + rope)
            act(query, own[:, width:], angles.cos(), angles.sin(), weight, 1e-6, target, slots, interleaved=interleaved)
            assert torch.equal(own[:, width:], projected[:, width:])
            assert torch.equal(query[..., :nope], projected[:, :width].view(query.shape)[..., :nope])
            both.append((query.contiguous(), target))
        (wanted, expected), (query, target) = both
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(query, wanted, rtol=2 * step, atol=step)
        if fp8:
            assert (target.float() == expected.float()).float().mean() > 0.98, name
        rtol, atol = (0.126, 2.0**-8) if fp8 else (4 * step, 2 * step)
        torch.testing.assert_close(target.float(), expected.float(), rtol=rtol, atol=atol)
        untouched = [3, 7, 8]  # -1 stores nothing, not even at the end of the cache
        assert torch.equal(target.float().flatten(0, 1)[untouched], cache.float().flatten(0, 1)[untouched])


def test_in_the_interpreter() -> None:
    interpret([check_latent_rope_store])


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("fp8", [False, True])
def test_compiles(fp8: bool, arch: int) -> None:
    """Down to machine code, for DeepSeek-V3."""
    from phalanx.kernels.ops import latent_rope_store as op

    signature = {
        "query": "*bf16", "latent": "*bf16", "cos": "*fp32", "sin": "*fp32", "weight": "*bf16", "cache": "*u8" if fp8 else "*bf16",
        "slots": "*i64", "eps": "fp32",
        **dict.fromkeys(("heads", "head_stride", "query_stride", "latent_stride", "first_rotated", "rank", "half"), "i32"),
    }  # fmt: skip
    constants = {"HEADS": op.HEADS_PER_PROGRAM, "RANK": 512, "HALF": 32, "INTERLEAVED": True, "FP8": fp8}
    ptx = compiled(op._latent_rope_store, signature, constants, arch).asm["ptx"]
    assert "bar.sync" in ptx

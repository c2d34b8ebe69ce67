# SPDX-License-Identifier: Apache-2.0
"""The keys and queries of an indexer: in Triton's interpreter against plain torch, compiled, and on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from phalanx.kernels.attention import indexer
from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def check(dtype: torch.dtype, heads: int, head_dim: int, rope: int, *, fp8: bool, interleaved: bool, device: str = "cpu") -> None:
    """The inputs are columns of wider tensors, as in a model."""
    from phalanx.kernels.attention import index_rope_store as op

    generator = torch.Generator().manual_seed(heads + rope)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    projected, weight, bias = (random(*shape).to(dtype) for shape in ((5, 7 + (heads + 1) * head_dim), (head_dim,), (head_dim,)))
    angles, slots = random(5, rope // 2) * 7, torch.tensor([5, -1, 11, 0, -1], device=device)
    cache = random(3, 4, 1, head_dim).to(torch.float8_e4m3fn if fp8 else dtype)
    scales = torch.full((3, 4, 1, 1), 7.0, device=device) if fp8 else None
    both = []
    for act in (indexer.index_rope_store, op.index_rope_store):
        own, target, factors = projected.clone(), cache.clone(), None if scales is None else scales.clone()
        query, key = own[:, 7 : 7 + heads * head_dim].view(5, heads, head_dim), own[:, -head_dim:]
        act(query, key, angles.cos(), angles.sin(), weight, bias, 1e-6, target, factors, slots, interleaved=interleaved)
        assert torch.equal(key, projected[:, -head_dim:])
        assert torch.equal(own[:, :7], projected[:, :7])
        both.append((query.contiguous(), target, factors))
    (wanted, expected, wanted_factors), (query, target, factors) = both
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(query, wanted, rtol=2 * step, atol=2 * step)
    assert not torch.equal(query, projected[:, 7 : 7 + heads * head_dim].view_as(query))
    if fp8:
        torch.testing.assert_close(factors, wanted_factors, rtol=4 * step, atol=0)
    rtol, atol = (0.126, 2.0**-6) if fp8 else (4 * step, 4 * step)
    torch.testing.assert_close(target.float(), expected.float(), rtol=rtol, atol=atol)
    untouched = [3, 7, 8]  # -1 stores nothing, not even at the end of the cache
    assert torch.equal(target.float().flatten(0, 1)[untouched], cache.float().flatten(0, 1)[untouched])
    assert factors is None or (factors.flatten(0, 1)[untouched] == 7.0).all()


def check_index_rope_store() -> None:
    for dtype, fp8, interleaved in itertools.product((torch.bfloat16, torch.float32), (False, True), (False, True)):
        check(dtype, 20, 24, 12, fp8=fp8, interleaved=interleaved)
    check(torch.bfloat16, 3, 128, 64, fp8=True, interleaved=False)
    check(torch.float32, 3, 16, 16, fp8=False, interleaved=True)


def test_in_the_interpreter() -> None:
    interpret([check_index_rope_store])


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("fp8", [False, True])
def test_compiles(fp8: bool, arch: int) -> None:
    """Down to machine code, for DeepSeek-V3.2."""
    from phalanx.kernels.attention import index_rope_store as op

    kinds = {
        **dict.fromkeys(("query", "key", "weight", "bias"), "*bf16"), **dict.fromkeys(("cos", "sin", "scales"), "*fp32"),
        "cache": "*u8" if fp8 else "*bf16", "slots": "*i64", "eps": "fp32",
        **dict.fromkeys(("heads", "head_dim", "query_stride", "key_stride", "half"), "i32"),
    }  # fmt: skip
    sizes = {"HEADS": op.HEADS_PER_PROGRAM, "DIM": 128, "HALF": 32, "INTERLEAVED": True, **({} if fp8 else {"scales": None})}
    assert "bar.sync" in compiled(op._index_rope_store, kinds, sizes, arch).asm["ptx"]


@pytest.mark.gpu1
@pytest.mark.parametrize("fp8", [False, True])
def test_on_a_gpu(fp8: bool) -> None:
    for interleaved in (False, True):
        check(torch.bfloat16, 64, 128, 64, fp8=fp8, interleaved=interleaved, device="cuda")

# SPDX-License-Identifier: Apache-2.0
"""Embedding and first norm: in Triton's interpreter against the reference, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_embed() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import embedding_rmsnorm

    last_tokens, slots = torch.tensor([9, 7, 8, 50]), torch.tensor([2, 0, 1, 3, 2])
    ids = torch.tensor([3, -1, 12, -1, 0])
    for dtype, hidden, begin in itertools.product(DTYPES, (8, 72), (0, 4)):
        table = torch.randn(10, hidden).to(dtype)
        for last in (None, (last_tokens, slots)):
            expected = reference.embed(ids, table, begin, last)
            for output, wanted in zip(embedding_rmsnorm.embed(ids, table, begin, last), expected, strict=True):
                assert torch.equal(output, wanted)


def check_embed_norm() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import embedding_rmsnorm
    from phalanx.kernels.ops.residual_rms_norm import residual_rms_norm

    ids, last = torch.tensor([3, -1, 1]), (torch.tensor([9, 7, 8]), torch.tensor([2, 0, 1]))
    scale = torch.tensor(0.01)
    for dtype, hidden in itertools.product(DTYPES, (16, 80)):
        table, weight = torch.randn(10, hidden).to(dtype), torch.randn(hidden).to(dtype)
        vectors = table[[3, 9, 1]]
        for quant, quant_scale in (("none", None), ("fp8", None), ("fp8", scale), ("nvfp4", scale)):
            options: dict[str, Any] = {"quant": quant, "scale": quant_scale}
            outputs = embedding_rmsnorm.embed_norm(ids, table, last, weight, 1e-5, **options)
            assert torch.equal(outputs[-1], vectors)
            # To the bit what the kernel gives that adds a residual.
            for one, other in zip(
                outputs, residual_rms_norm(torch.zeros_like(vectors), vectors, weight, 1e-5, **options), strict=True
            ):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        plain = reference.embed_norm(ids, table, last, weight, 1e-5)
        step = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(embedding_rmsnorm.embed_norm(ids, table, last, weight, 1e-5)[0], plain[0], rtol=step, atol=1e-6)


def check_rms_norm() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import embedding_rmsnorm

    for dtype, of_weight in [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)]:
        heads, weight = torch.randn(3, 7, 16).to(dtype), torch.randn(16).to(of_weight)
        for x in (heads[:, 1:5], heads[:, 5], heads[0], heads[:0, 0]):
            assert embedding_rmsnorm.runs_of_rows(x) != (0, 0)
            step = 2 * torch.finfo(dtype).eps
            output = embedding_rmsnorm.rms_norm(x, weight, 1e-5)
            assert output.is_contiguous()
            torch.testing.assert_close(output, reference.rms_norm(x, weight, 1e-5), rtol=step, atol=1e-6)
    for odd in (heads.transpose(0, 1), heads[..., ::2], torch.randn(4, 24)[:, :16], torch.randn(16)):
        assert embedding_rmsnorm.runs_of_rows(odd) == (0, 0)


CHECKS = [check_embed, check_embed_norm, check_rms_norm]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.gpu1
@pytest.mark.parametrize("check", CHECKS)
def test_on_gpu(check: Callable[[], None]) -> None:
    with torch.device("cuda"):
        check()


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("kernel", ["embed", "embed_norm", "embed_norm_fp8", "rms_norm", "rms_norm_fp32_weight"])
def test_compiles(kernel: str, arch: int) -> None:
    """Down to machine code. The launch's own choices (PDL from Hopper on) compile with it."""
    from phalanx.kernels.ops import embedding_rmsnorm

    words, ids = "*i32", "*i64"
    known: dict[str, Any] = {"ids": ids, "last_tokens": ids, "slots": ids, "table": words}
    constants: dict[str, Any]
    if kernel == "embed":
        function = embedding_rmsnorm._embed
        signature = known | {"out": words, "zeros": words, "begin": "i32", "table_rows": "i32", "vectors": "i32"}
        constants = {"LAST": True, "BLOCK": 512}
    else:
        fp8 = kernel.endswith("fp8")
        function = embedding_rmsnorm._embed_norm
        pointers = (words, words, "*i64" if fp8 else words, "*fp32" if fp8 else words)
        signature = known | {
            "weight": words, "pointers": pointers, "scale": "*fp32" if fp8 else words, "begin": "i32", "table_rows": "i32", 
            "inner": "i32", "outer": "i32", "hidden": "i32", "eps": "fp32",
        }  # fmt: skip
        with_ids = not kernel.startswith("rms_norm")
        constants = {"IDS": with_ids, "LAST": with_ids, "KIND": "bf16", "QUANT": "fp8_token" if fp8 else "none", "BLOCK": 512}
        constants["FP32_WEIGHT"] = kernel == "rms_norm_fp32_weight"
    compiled(function, signature, constants, arch)

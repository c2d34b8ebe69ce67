# SPDX-License-Identifier: Apache-2.0
"""Cosines and sines of positions: in Triton's interpreter against the reference, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def check_rope_cos_sin() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops.rope_cos_sin import rope_cos_sin

    positions, inv_freq = torch.tensor([0, 1, 77, 131071]), 1e4 ** (-torch.arange(12) / 12)
    for factor in (1.0, 1.3):
        expected = reference.rope_cos_sin(positions, inv_freq, factor)
        for output, wanted in zip(rope_cos_sin(positions, inv_freq, factor), expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)


CHECKS = [check_rope_cos_sin]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.gpu1
@pytest.mark.parametrize("check", CHECKS)
def test_on_gpu(check: Callable[[], None]) -> None:
    with torch.device("cuda"):
        check()


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles_with_an_exact_cosine(arch: int) -> None:
    from phalanx.kernels.ops import rope_cos_sin

    signature = {"positions": "*i64", "half": "i32", "factor": "fp32"} | dict.fromkeys(("inv_freq", "cosines", "sines"), "*fp32")
    ptx = compiled(rope_cos_sin._rope_cos_sin, signature, {"BLOCK": 64}, arch).asm["ptx"]
    assert "cos.approx" not in ptx

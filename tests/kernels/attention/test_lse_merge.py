# SPDX-License-Identifier: Apache-2.0
"""Parts of attention merged by log-sum-exp: in Triton's interpreter against plain torch, compiled, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.kernels.attention import dispatch
from tests.support.kernels_compiled import compiled_as, spilled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

KINDS = [(2, torch.bfloat16, 512), (8, torch.bfloat16, 24), (3, torch.float16, 40), (4, torch.float32, 12)]
"""(ranks, dtype, width)."""


def received_of(ranks: int, dtype: torch.dtype, width: int) -> Tensor:
    """Of 5 rows of 3 heads; of some a rank has no token, of the first none has."""
    parts, logs = torch.randn(ranks, 5, 3, width).to(dtype), torch.randn(ranks, 5, 3, 1) * 9
    logs[:, 0] = logs[1:, 1] = logs[0, 2] = -1e30
    parts[:, 0] = parts[1:, 1] = parts[0, 2] = 0
    return torch.cat((parts, logs.view(dtype)), dim=-1)


def check_parts_are_merged() -> None:
    from phalanx.kernels.attention.lse_merge import merge_by_lse

    for kind in KINDS:
        received, width = received_of(*kind), kind[2]
        wanted = dispatch.merge_by_lse(received, width)
        assert not wanted[0].any()
        step = torch.finfo(kind[1]).eps
        torch.testing.assert_close(merge_by_lse(received, width), wanted, rtol=step, atol=step, msg=lambda m, k=kind: f"{k}: {m}")
    assert merge_by_lse(received[:, :0], width).shape == (0, 3, width)


def test_in_the_interpreter() -> None:
    interpret([check_parts_are_merged])


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles(arch: int) -> None:
    """For DeepSeek-V3 in bf16 over eight ranks."""
    from phalanx.kernels.attention.lse_merge import _lse_merge

    kinds = {"parts": "*bf16", "logs": "*fp32", "out": "*bf16", "count": "i32"}
    constants = {"PITCH": 514, "WIDTH": 512, "LANES": 512, "RANKS": 8, "SM": arch}
    compiled = compiled_as(_lse_merge, kinds, constants, arch, aligned=["parts", "logs", "out"], num_warps=4)
    assert spilled(compiled) == 0
    assert compiled.asm["ptx"].count("ex2.approx") == 8


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_on_a_gpu(kind: tuple[int, torch.dtype, int]) -> None:
    received = received_of(*kind)
    step = torch.finfo(kind[1]).eps
    wanted = dispatch.merge_by_lse(received, kind[2])
    torch.testing.assert_close(dispatch.merge_by_lse(received.cuda(), kind[2]).cpu(), wanted, rtol=step, atol=step)

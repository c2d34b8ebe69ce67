# SPDX-License-Identifier: Apache-2.0
"""All-reduce on GPUs equals the oracles: odd shapes, graphs with skewed ranks, several groups, every fusion and dtype."""

from __future__ import annotations

import pytest

from tests.support.comm_gpu_ranks import run

RANK = "tests.support.comm_allreduce_rank"

CHECKS = (
    "sums", "strange_values", "fusions", "large_fusion", "graph", "two_groups", "pairs", "picked", "unscaled",
    "unscaled_from_gemm",
)  # fmt: skip


@pytest.mark.gpu2
@pytest.mark.parametrize("check", CHECKS)
def test_two_gpus(check: str) -> None:
    run(2, RANK, check)


@pytest.mark.gpu4
@pytest.mark.parametrize("check", CHECKS)
def test_four_gpus(check: str) -> None:
    run(4, RANK, check)

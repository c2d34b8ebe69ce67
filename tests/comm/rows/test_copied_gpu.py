# SPDX-License-Identifier: Apache-2.0
"""Rows that copy engines carry, on GPUs: the bits of the unfused kernels, interleaved, in graphs with skewed ranks."""

from __future__ import annotations

import pytest

from tests.comm.gpu_ranks import run

RANK = "tests.comm.rows.copied_rank"

CHECKS = ("shapes", "interleaved", "graph", "of_group")


@pytest.mark.gpu2
@pytest.mark.parametrize("check", CHECKS)
def test_two_gpus(check: str) -> None:
    run(2, RANK, check)


@pytest.mark.gpu4
@pytest.mark.parametrize("check", CHECKS)
def test_four_gpus(check: str) -> None:
    run(4, RANK, check)

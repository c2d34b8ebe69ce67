# SPDX-License-Identifier: Apache-2.0
"""The exchanges of expert parallel on GPUs: dispatch and combine against plain indexing, in graphs with skewed ranks, and with a
layer's experts."""

from __future__ import annotations

import pytest

from tests.support.comm_gpu_ranks import run

RANK = "tests.support.comm_one_sided_rank"

CHECKS = ("cases", "graph", "layers_in_16_bit", "layers_in_fp8")


@pytest.mark.gpu2
@pytest.mark.parametrize("check", CHECKS)
def test_two_gpus(check: str) -> None:
    run(2, RANK, check)


@pytest.mark.gpu4
@pytest.mark.parametrize("check", CHECKS)
def test_four_gpus(check: str) -> None:
    run(4, RANK, check)

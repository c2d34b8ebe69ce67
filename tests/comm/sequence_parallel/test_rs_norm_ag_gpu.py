# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism on GPUs: the bits of the unfused kernels and of two-shot, in chunks, in graphs with skewed ranks, in a
chain."""

from __future__ import annotations

import pytest

from tests.support.comm_gpu_ranks import run

RANK = "tests.support.comm_sequence_parallel_rank"

CHECKS = (
    "shapes",
    "launches",
    "chunks",
    "strange_values",
    "graph",
    "picked",
    "gemm_rs",
    "gemm_rs_in_a_graph",
    "gemm_rs_in_fp8",
    "gemm_rs_in_16_bit",
)


@pytest.mark.gpu2
@pytest.mark.parametrize("check", CHECKS)
def test_two_gpus(check: str) -> None:
    run(2, RANK, check)


@pytest.mark.gpu4
@pytest.mark.parametrize("check", CHECKS)
def test_four_gpus(check: str) -> None:
    run(4, RANK, check)

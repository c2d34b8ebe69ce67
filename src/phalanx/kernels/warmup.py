# SPDX-License-Identifier: Apache-2.0
"""Which steps compile every variant of these kernels: each dispatcher knows at which counts it changes variants."""

from __future__ import annotations

from phalanx.kernels.attention import heuristics as attention
from phalanx.kernels.gemm import block_heuristics as block_gemm
from phalanx.kernels.gemm import heuristics as gemm
from phalanx.kernels.moe import heuristics as moe
from phalanx.kernels.ops import heuristics as ops
from phalanx.kernels.sampling import sampling


def warmup_token_counts(max_tokens: int) -> list[int]:
    """Token counts 1 .. max_tokens, ascending, such that steps of these counts launch every variant that depends on the tokens of a
    step (GEMM, experts, ops) of any count up to max_tokens. Includes max_tokens."""
    counts = {count for dispatcher in (ops, gemm, block_gemm, moe) for count in dispatcher.warmup_token_counts(max_tokens)}
    return sorted(counts | ({max_tokens} if max_tokens > 0 else set()))


def warmup_row_counts(max_rows: int) -> list[int]:
    """Row counts 1 .. max_rows, ascending, such that steps of these counts of decode rows launch every variant that depends on the
    rows of a step (decode attention, sampling) of any count up to max_rows. Includes max_rows."""
    counts = {count for dispatcher in (attention, sampling) for count in dispatcher.warmup_token_counts(max_rows)}
    return sorted(counts | ({max_rows} if max_rows > 0 else set()))

# SPDX-License-Identifier: Apache-2.0
"""Which steps compile every variant of these kernels: each dispatcher knows at which token counts it changes variants."""

from __future__ import annotations

from phalanx.kernels.attention import heuristics as attention
from phalanx.kernels.gemm import block_heuristics as block_gemm
from phalanx.kernels.gemm import heuristics as gemm
from phalanx.kernels.ops import heuristics as ops
from phalanx.kernels.sampling import sampling


def warmup_token_counts(max_tokens: int) -> list[int]:
    """Token counts 1 .. max_tokens, ascending, such that steps of these counts launch every variant of every kernel that a step of
    any count up to max_tokens launches. A decode row and a row of logits count as a token. Includes max_tokens."""
    dispatchers = (ops, gemm, block_gemm, attention, sampling)
    counts = {count for dispatcher in dispatchers for count in dispatcher.warmup_token_counts(max_tokens)}
    return sorted(counts | ({max_tokens} if max_tokens > 0 else set()))

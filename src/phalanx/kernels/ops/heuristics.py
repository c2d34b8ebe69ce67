# SPDX-License-Identifier: Apache-2.0
"""How many threads a row gets in these kernels: pure functions of the sizes, as measured on H200."""

from __future__ import annotations

FEW_TOKENS = 128
"""Tokens (or rows) up to which a row gets more threads, since programs are few."""
MANY_SHORT_ROWS = 4096
"""Rows of up to 1,024 columns from which on a program quantizes several: a GPU starts only so many programs at a time."""
MAX_QUANTIZED_COLUMNS = 65536
"""Columns of a row that the kernel of `quantize_fp8` takes: what the threads of one program hold in registers."""


def row_warps(block: int, rows: int) -> int:
    """Warps for one row of `block` vectors: as many as it can use while rows are few, else as many as suffice to fill the GPU."""
    most = max(1, min(32, block // 32))
    return most if rows <= FEW_TOKENS else min(most, 8)


def column_warps(block: int, rows: int) -> int:
    """Warps for one row of `block` columns in a kernel that moves no vectors: few rows finish sooner with many threads each; of
    many rows more are in flight when each thread has more of one."""
    return max(1, min(32, block // (256 if rows <= FEW_TOKENS else 1024)))


def quantized_rows(block: int, rows: int) -> int:
    """Rows of `block` columns that one program of `quantize_fp8` works on: one, or of thousands of short ones so many that a
    program has some bytes for each of its threads."""
    return max(1, 4096 // block) if rows >= MANY_SHORT_ROWS and block <= 1024 else 1


def rope_heads(tokens: int) -> int:
    """Heads that one program of the RoPE kernel works on: fewer for few tokens, for which there would be too few programs."""
    return 8 if tokens <= FEW_TOKENS else 16


def warmup_token_counts(max_tokens: int) -> list[int]:
    """Token counts up to max_tokens that between them launch every variant of these kernels that any count does."""
    return sorted({min(tokens, max_tokens) for tokens in (1, 2 * FEW_TOKENS)} - {0})

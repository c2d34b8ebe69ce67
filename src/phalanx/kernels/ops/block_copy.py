# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""KV blocks of many tensors, gathered in a buffer and scattered from one, by one launch each.

    buffer[i] = concatenation of row[blocks[i]] over the tensors        and back

A launch for each tensor would take the host longer than a decode step: 160 tensors of 80 layers, two directions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = tl.constexpr(1024)
"""That a program copies at a time."""


@triton.jit(do_not_specialize=["words"])
def _copy_blocks(addresses, ends, blocks, buffer, words, BACK: tl.constexpr):
    """Program (copy, tensor). addresses [tensors]; ends [tensors]: of each tensor's words among the `words` of a block of all."""
    copy, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(ends + row)
    begin = tl.load(ends + row - 1, row > 0, 0)
    block = tl.load(blocks + copy)
    tensor = tl.load(addresses + row).to(tl.pointer_type(buffer.dtype.element_ty)) + block * (end - begin)
    part = buffer + copy * words + begin
    for at in range(0, end - begin, WORDS):
        each = at + tl.arange(0, WORDS)
        if BACK:
            tl.store(tensor + each, tl.load(part + each, each < end - begin), each < end - begin)
        else:
            tl.store(part + each, tl.load(tensor + each, each < end - begin), each < end - begin)


def copy_blocks(table: tuple[Tensor, Tensor], blocks: Tensor, buffer: Tensor, *, back: bool) -> None:
    """table: the tensors' addresses, and `ends` of their words; buffer [blocks, words]. See `block_rows.BlockRows`."""
    if len(blocks):
        _copy_blocks[(len(blocks), len(table[0]))](*table, blocks, buffer, buffer.shape[1], BACK=back, num_warps=4)

# SPDX-License-Identifier: Apache-2.0
"""KV blocks of many tensors, on their way to one buffer and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor


class BlockRows:
    """rows: [blocks, words] each, contiguous, of one dtype and device, whose memory stays where it is."""

    def __init__(self, rows: Sequence[Tensor], *, by_kernel: bool) -> None:
        """by_kernel: with Triton, on a GPU or in its interpreter; else torch copies one tensor after the other."""
        self._rows, self._widths = list(rows), [row.shape[1] for row in rows]
        self.words = sum(self._widths)
        self._table: tuple[Tensor, Tensor] | None = None
        if by_kernel:
            table = [row.data_ptr() for row in rows], list(accumulate(self._widths))
            addresses, ends = torch.tensor(table, dtype=torch.int64, device=rows[0].device)
            self._table = addresses, ends

    def gather(self, blocks: Tensor, out: Tensor) -> None:
        """blocks [n] int64, on the device; out [n, words], contiguous."""
        if self._table is not None:
            from phalanx.kernels.ops.block_copy import copy_blocks

            copy_blocks(self._table, blocks, out, back=False)
        else:
            for row, part in self._parts(out):
                part.copy_(row.index_select(0, blocks))

    def scatter(self, blocks: Tensor, source: Tensor) -> None:
        """As `gather`, the other way. No block is there twice."""
        if self._table is not None:
            from phalanx.kernels.ops.block_copy import copy_blocks

            copy_blocks(self._table, blocks, source, back=True)
        else:
            for row, part in self._parts(source):
                row.index_copy_(0, blocks, part)

    def _parts(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each tensor: its blocks, and its part of those in a buffer."""
        return zip(self._rows, torch.split(buffer, self._widths, dim=1), strict=True)

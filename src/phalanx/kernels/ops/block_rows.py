# SPDX-License-Identifier: Apache-2.0
"""KV blocks of many tensors, on their way to one buffer and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor


class BlockRows:
    """rows: [blocks, words] each, contiguous, of one dtype and device."""

    def __init__(self, rows: Sequence[Tensor], *, by_kernel: bool) -> None:
        """by_kernel: with Triton, on a GPU or in its interpreter; else torch copies one tensor after the other."""
        self._rows, self._widths = list(rows), [row.shape[1] for row in rows]
        self.words = sum(self._widths)
        self._by_kernel, self._ends = by_kernel, list(accumulate(self._widths))
        self._addresses: list[int] = []
        self._table: tuple[Tensor, Tensor] | None = None

    def _now(self) -> tuple[Tensor, Tensor] | None:
        """The kernel's table. Memory has another address once it was given back and taken again (sleep)."""
        if self._by_kernel and (addresses := [row.data_ptr() for row in self._rows]) != self._addresses:
            both = torch.tensor((addresses, self._ends), dtype=torch.int64, device=self._rows[0].device)
            self._addresses, self._table = addresses, (both[0], both[1])
        return self._table

    def gather(self, blocks: Tensor, out: Tensor) -> None:
        """blocks [n] int64, on the device; out [n, words], contiguous."""
        if (table := self._now()) is not None:
            from phalanx.kernels.ops.block_copy import copy_blocks

            copy_blocks(table, blocks, out, back=False)
        else:
            for row, part in self._parts(out):
                part.copy_(row.index_select(0, blocks))

    def scatter(self, blocks: Tensor, source: Tensor) -> None:
        """As `gather`, the other way. No block is there twice."""
        if (table := self._now()) is not None:
            from phalanx.kernels.ops.block_copy import copy_blocks

            copy_blocks(table, blocks, source, back=True)
        else:
            for row, part in self._parts(source):
                row.index_copy_(0, blocks, part)

    def _parts(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each tensor: its blocks, and its part of those in a buffer."""
        return zip(self._rows, torch.split(buffer, self._widths, dim=1), strict=True)

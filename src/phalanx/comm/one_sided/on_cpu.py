# SPDX-License-Identifier: Apache-2.0
"""The one-sided exchange between CPU ranks of one host, over the memory of `comm.shared_memory`.

A rank posts its tokens with their routing, and reads those tokens of the others that have one of its experts; then it posts the
sums that its experts give, and reads those of its own tokens. Steps of many rows go in posts of some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.comm import shared_memory
from phalanx.comm.group import Group
from phalanx.comm.shared_memory import SharedMemory
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.scaled_tensors import Quantized


class CpuOneSided:
    """`OneSided` of one group. max_rows: see there; the memory holds any number of rows, in posts."""

    def __init__(self, memory: SharedMemory, max_rows: int) -> None:
        self._memory, self.max_rows = memory, max_rows

    def dispatch(
        self, x: Tensor | Quantized, routing: Routing, rows: int, experts: int
    ) -> tuple[Tensor | Quantized, Routing]:  # fmt: skip
        """See `OneSided.dispatch`."""
        rank, world = self._memory.rank, self._memory.world
        by_row = isinstance(x, Quantized) and x.scale.dim() > 0
        payload = [x.values, x.scale] if isinstance(x, Quantized) and by_row else [x.values if isinstance(x, Quantized) else x]
        sent = [routing.ids, routing.weights, *payload]
        received = [part.new_zeros((world, rows, part.shape[1])) for part in sent]
        widths = [part.shape[1] * part.element_size() for part in sent]
        for chunk in self._chunks(rows, sum(widths)):
            half = self._post(sent, widths, chunk)
            for source, posted in enumerate(self._memory.posted(half, len(chunk) * sum(widths), torch.uint8)):
                columns = torch.split(posted.view(len(chunk), -1), widths, dim=1)
                parts = [column.contiguous().view(part.dtype) for column, part in zip(columns, sent, strict=True)]
                here = (parts[0] >= 0) & (parts[0] // (experts // world) == rank)
                own = here.any(1)
                for number, (target, part) in enumerate(zip(received, parts, strict=True)):
                    place = target[source, chunk.start : chunk.stop]
                    place.copy_(part) if number < 2 else _copy_rows(place, part, own)
        ids, weights, values, *scale = (part.flatten(0, 1) for part in received)
        if isinstance(x, Quantized):
            return Quantized(values, scale[0] if scale else x.scale), Routing(weights, ids)
        return values, Routing(weights, ids)

    def combine(self, sums: Tensor, sent: Routing, received: Routing, experts: int) -> Tensor:
        """See `OneSided.combine`."""
        memory, (total_rows, hidden) = self._memory, sums.shape
        rows, count = total_rows // memory.world, len(sent.ids)
        by_source = sums.view(memory.world, rows, hidden)
        total = torch.zeros((count, hidden), dtype=torch.float32)
        for chunk in self._chunks(rows, memory.world * hidden * sums.element_size()):
            values = memory.world * len(chunk) * hidden
            memory.next_post(values, sums.dtype).view(memory.world, len(chunk), hidden).copy_(
                by_source[:, chunk.start : chunk.stop]
            )
            half = memory.post_written()
            own = slice(chunk.start, min(chunk.stop, count))
            for rank, posted in enumerate(memory.posted(half, values, sums.dtype)):
                goes = (sent.ids[own] >= 0) & (sent.ids[own] // (experts // memory.world) == rank)
                part = posted.view(memory.world, len(chunk), hidden)[memory.rank, : len(goes)]
                total[own] += torch.where(goes.any(1, keepdim=True), part.float(), 0.0)
        return total.to(sums.dtype)

    def _post(self, sent: Sequence[Tensor], widths: Sequence[int], chunk: range) -> int:
        """Post rows `chunk` of these tensors, side by side as bytes: experts first, -1 and zeros where there are no such rows."""
        post = self._memory.next_post(len(chunk) * sum(widths), torch.uint8).view(len(chunk), -1)
        rows = [part[chunk.start : chunk.stop].contiguous().view(torch.uint8) for part in sent]
        present = len(rows[0])
        if present:
            torch.cat(rows, dim=1, out=post[:present])
        post[present:].zero_()
        post[present:, : widths[0]] = 255  # experts of -1
        return self._memory.post_written()

    def _chunks(self, rows: int, row_bytes: int) -> Iterator[range]:
        step = self._memory.rows_at_once(row_bytes, torch.uint8)
        for first in range(0, rows, step):
            yield range(first, min(first + step, rows))


def _copy_rows(target: Tensor, source: Tensor, which: Tensor) -> None:
    """Those rows of source for which `which` is true; other rows stay."""
    as_bytes = source.view(torch.uint8)
    target.view(torch.uint8)[which] = as_bytes[which]


def form(
    group: Group, *, hidden: int, top_k: int, dtype: torch.dtype, rows: int, timeout: float
) -> CpuOneSided | str:  # fmt: skip
    """See `one_sided.form`."""
    row_bytes = 8 * top_k + group.size * hidden * dtype.itemsize
    memory = shared_memory.form(group, min(rows, 1 << 20) * row_bytes, timeout=timeout, what="an exchange of tokens")
    if isinstance(memory, str):
        return memory
    if not memory.rows_at_once(row_bytes, torch.uint8):
        return f"a row of {row_bytes:,} bytes is longer than a post in shared memory"
    return CpuOneSided(memory, rows)

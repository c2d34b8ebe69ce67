# SPDX-License-Identifier: Apache-2.0
"""The one-sided exchange on GPUs: the launches of `kernels.one_sided` over symmetric memory.

Each rank's memory: two halves, of dispatches in turn, with a header for each row of every other rank, and a payload; then a region
of sums, one row for each of this rank's rows and every other rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.comm.shared_memory import share_text
from phalanx.comm.strategies import formed
from phalanx.comm.symmetric import SymmetricRegion, form_region
from phalanx.comm.torch_group import TorchGroup
from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.scaled_tensors import Quantized

LIMIT_BYTES = 256 << 20
"""The largest size of a rank's memory; steps of more rows take another exchange."""
_VECTOR = 16
_WARPS = 8
_PER_SM = 2
"""Programs of a multiprocessor: all programs of a grid must run at once."""
_FEW_ROWS = 64
"""Rows up to which a combine splits them over many programs. A power of 2, which a warm-up meets."""
_FEW_VECTORS, _MANY_VECTORS = 128, 512
"""Vectors of a row that a program of a combine handles at once: of few rows, and of many."""


class RegionSizes(NamedTuple):
    """Bytes of the memory of one rank of `world`, for `rows` rows of a rank: of a half, and of the region of sums."""

    rows: int
    half: int
    sums: int

    @property
    def total(self) -> int:
        return 2 * self.half + self.sums

    @classmethod
    def of(cls, world: int, rows: int, row_bytes: int, top_k: int, limit: int = LIMIT_BYTES) -> RegionSizes:
        """For rows of `row_bytes` in the dtype of sums, which a payload does not exceed. Fewer rows where they would exceed the
        limit."""
        each = (world - 1) * (header_vectors(top_k) * _VECTOR + row_bytes)
        rows = min(rows, limit // (2 * each + (world - 1) * row_bytes))
        return cls(rows, rows * each, rows * (world - 1) * row_bytes)


def header_vectors(top_k: int) -> int:
    """Vectors of 16 bytes that hold a token's experts and their weights."""
    return -(-2 * top_k // 4)


def _words(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.view(torch.int32)


def _power_of_2(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True)
class GpuOneSided:
    """`OneSided` of one group."""

    region: SymmetricRegion
    sizes: RegionSizes

    @property
    def max_rows(self) -> int:
        return self.sizes.rows

    def dispatch(
        self, x: Tensor | Quantized, routing: Routing, rows: int, experts: int
    ) -> tuple[Tensor | Quantized, Routing]:  # fmt: skip
        """See `OneSided.dispatch`."""
        from phalanx.kernels.one_sided.dispatch import dispatch

        region = self.region
        if rows > self.max_rows:
            raise ValueError(f"{rows} rows of a rank do not fit memory for {self.max_rows}")
        values, scale = x if isinstance(x, Quantized) else (x, None)
        values = values.contiguous()
        count, hidden = values.shape
        by_row = None if scale is None or scale.dim() == 0 else scale
        scale_words = 0 if by_row is None else by_row.shape[1]
        vectors, top_k, total = hidden * values.element_size() // _VECTOR, routing.top_k, region.world * rows
        pitch = vectors + -(-scale_words // 4)
        out = torch.empty((total, hidden), dtype=values.dtype, device=values.device)
        weights, ids = (part.new_empty((total, top_k)) for part in routing)
        out_scale = None if by_row is None else by_row.new_empty((total, scale_words))
        block = max(_power_of_2(pitch), 32 * _WARPS)
        programs = min(max(rows, (region.world - 1) * rows), _PER_SM * region.num_sms)
        dispatch[(programs,)](
            values.view(torch.int32), _words(by_row), *((0, 0) if by_row is None else by_row.stride()),
            routing.weights.view(torch.int32), routing.ids, out.view(torch.int32),
            _words(out_scale), weights.view(torch.int32), ids, region.addresses, region.epoch, self.sizes.half // _VECTOR, count,
            rows, vectors, pitch, scale_words, experts // region.world,
            TOP_K=top_k, SLOTS=_power_of_2(top_k), HEADER=header_vectors(top_k), BLOCK=block, **self._constants,
        )  # fmt: skip
        received = Routing(weights, ids)
        if scale is None:
            return out, received
        return Quantized(out, scale if out_scale is None else out_scale), received

    def combine(self, sums: Tensor, sent: Routing, received: Routing, experts: int) -> Tensor:
        """See `OneSided.combine`."""
        from phalanx.kernels.one_sided.combine import combine

        region, top_k = self.region, sent.top_k
        rows, count = len(sums) // region.world, len(sent.ids)
        pitch = sums.shape[1] * sums.element_size() // _VECTOR
        block = max(_FEW_VECTORS if rows <= _FEW_ROWS else _MANY_VECTORS, 32 * (warps := 4 if rows <= _FEW_ROWS else _WARPS))
        out = sums.new_empty((count, sums.shape[1]))
        programs = min(rows * -(-pitch // block), _PER_SM * (_WARPS // warps) * region.num_sms)
        combine[(programs,)](
            sums.view(torch.int32), sent.ids, received.ids, out.view(torch.int32), region.addresses, region.epoch,
            2 * self.sizes.half, count, rows, pitch, experts // region.world,
            KIND=DTYPE_NAMES[sums.dtype], TOP_K=top_k, SLOTS=_power_of_2(top_k), BLOCK=block,
            **{**self._constants, "WARPS": warps, "num_warps": warps},
        )  # fmt: skip
        return out

    @property
    def _constants(self) -> dict[str, int | bool]:
        region = self.region
        return {
            "RANK": region.rank, "WORLD": region.world, "WARPS": _WARPS, "SM": region.sm, "num_warps": _WARPS,
            "maxnreg": 65536 // (_PER_SM * _WARPS * 32), "launch_pdl": region.sm >= 90,
        }  # fmt: skip


def form(group: TorchGroup, *, hidden: int, top_k: int, dtype: torch.dtype, rows: int) -> GpuOneSided | str:
    """See `one_sided.form`."""
    if any(share_text(group, "" if has_triton() else "no", group.device)):
        return "Triton is not installed"
    sizes = RegionSizes.of(group.size, rows, hidden * dtype.itemsize, top_k)
    region = formed(group, partial(form_region, group.process_group, group.device, sizes.total))
    return region if isinstance(region, str) else GpuOneSided(region, sizes)

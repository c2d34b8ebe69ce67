# SPDX-License-Identifier: Apache-2.0
"""The delta of adapters: two Triton kernels on GPUs, whatever the number of adapters and of parts, and `reference` elsewhere."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

import phalanx.kernels.adapters.reference as reference
from phalanx.kernels.adapters.rows import AdapterFactors, AdapterRows
from phalanx.kernels.capabilities import has_triton


class Delta(NamedTuple):
    """What adapters add to the output of a layer for x [T, in]. low: of the first kernel; None where there is none."""

    x: Tensor
    factors: AdapterFactors
    rows: AdapterRows
    low: Tensor | None

    @classmethod
    def begin(cls, x: Tensor, factors: AdapterFactors, rows: AdapterRows) -> Delta:
        """Launch what needs no output yet: it goes before the layer's own GEMM, beside the end of the kernel that writes x."""
        if not (x.is_cuda and has_triton()):
            return cls(x, factors, rows, None)
        from phalanx.kernels.adapters.shrink import shrink

        return cls(x, factors, rows, shrink(x.contiguous(), factors, rows))

    def add_to(self, out: Tensor) -> Tensor:
        """See `reference.add_delta`."""
        if self.low is None:
            return reference.add_delta(out, self.x, self.factors, self.rows)
        from phalanx.kernels.adapters.expand import expand

        return expand(out, self.low, self.factors, self.rows)

# SPDX-License-Identifier: Apache-2.0
"""The delta of adapters: two Triton kernels on GPUs, whatever the number of adapters and of parts, and `reference` elsewhere."""

from __future__ import annotations

from torch import Tensor

import phalanx.kernels.adapters.reference as reference
from phalanx.kernels.adapters.rows import AdapterFactors, AdapterRows
from phalanx.kernels.capabilities import has_triton


def add_delta(out: Tensor, x: Tensor, factors: AdapterFactors, rows: AdapterRows) -> Tensor:
    """See `reference.add_delta`."""
    if out.is_cuda and has_triton():
        from phalanx.kernels.adapters.expand import expand
        from phalanx.kernels.adapters.shrink import shrink

        return expand(out, shrink(x.contiguous(), factors, rows), factors, rows)
    return reference.add_delta(out, x, factors, rows)

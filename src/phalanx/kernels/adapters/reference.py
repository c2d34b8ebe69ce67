# SPDX-License-Identifier: Apache-2.0
"""The delta of adapters in plain torch: the definition, the oracle of tests, and the implementation on CPUs."""

from __future__ import annotations

from torch import Tensor

from phalanx.kernels.adapters.rows import AdapterFactors, AdapterRows


def add_delta(out: Tensor, x: Tensor, factors: AdapterFactors, rows: AdapterRows) -> Tensor:
    """out [T, out] += B (A x), x [T, in], of the tokens that have an adapter; in place. A x and the output are summed in fp32, and
    each is rounded once."""
    room = factors.b.shape[2]
    for slot, begin, end in rows.tiles.tolist():
        tokens = rows.order[begin:end]
        values = x[tokens].float()
        for part, first, last in factors.columns:
            rank = factors.ranks_cpu[slot][part]
            if rank:
                low = (values @ factors.a[slot, part * room : part * room + rank].float().T).to(x.dtype).float()
                delta = low @ factors.b[slot, first:last, :rank].float().T
                out[tokens, first:last] = (out[tokens, first:last].float() + delta).to(out.dtype)
    return out

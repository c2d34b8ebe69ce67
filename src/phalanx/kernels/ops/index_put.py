# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Write a few words into a large table, in one kernel. Places and values lie on the device, so that a captured graph can do it.

table[places[k]] = values[k]                          unless places[k] < 0
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch

BLOCK = 256


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["places", "values"])
def _index_put(table, places, values, count, BLOCK: tl.constexpr, SM: tl.constexpr):
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + index, index < count, -1)
    valid = place >= 0
    tl.store(table + place, tl.load(values + index, valid, 0).to(table.dtype.element_ty), valid)


def index_put_(table: Tensor, places: Tensor, values: Tensor) -> None:
    """The kernel of `reference.index_put_`."""
    if len(places):
        # Launched without programmatic dependence: kernels behind it may read early what kernels before it have written.
        _index_put[(triton.cdiv(len(places), BLOCK),)](
            table, places, values, len(places), BLOCK=BLOCK, SM=sm_arch(table.device), num_warps=4
        )

# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A kernel to compile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def double(x, out, count, BLOCK: tl.constexpr, FAILS: tl.constexpr):
    tl.static_assert(FAILS == 0, "fails when asked to")
    place = tl.arange(0, BLOCK)
    tl.store(out + place, 2 * tl.load(x + place, place < count), place < count)

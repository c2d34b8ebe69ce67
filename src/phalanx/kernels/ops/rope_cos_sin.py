# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""By what each position turns queries and keys, in one kernel.

    angle = position * inverse_wavelengths                in fp32
    cos(angle) * factor, sin(angle) * factor

A program has a token. Angles reach thousands of turns, so it is the library's cosine, not the processor's quick one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from phalanx.kernels.residual_rms_norm import capability


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _turns(positions, wavelengths, cosines, sines, half, factor, BLOCK: tl.constexpr, PTX: tl.constexpr):
    if PTX >= 90:
        gdc_launch_dependents()
    pair = tl.arange(0, BLOCK)
    mask = pair < half
    rate = tl.load(wavelengths + pair, mask, 0.0)  # no kernel writes them
    if PTX >= 90:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    angle = tl.load(positions + token).to(tl.float32) * rate
    if PTX > 0:
        cosine, sine = libdevice.cos(angle), libdevice.sin(angle)
    else:
        cosine, sine = tl.cos(angle), tl.sin(angle)
    tl.store(cosines + token * half + pair, cosine * factor, mask)
    tl.store(sines + token * half + pair, sine * factor, mask)


def turns(positions: Tensor, inverse_wavelengths: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The kernel of `reference.turns`."""
    tokens, half = len(positions), len(inverse_wavelengths)
    cosines, sines = (torch.empty((tokens, half), dtype=torch.float32, device=positions.device) for _ in range(2))
    if tokens:
        ptx = capability(positions.device)
        _turns[(tokens,)](
            positions, inverse_wavelengths, cosines, sines, half, factor, BLOCK=triton.next_power_of_2(half), PTX=ptx,
            num_warps=2, launch_pdl=ptx >= 90,
        )  # fmt: skip
    return cosines, sines

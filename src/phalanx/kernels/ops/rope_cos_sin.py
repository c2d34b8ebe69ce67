# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Cosines and sines of the angles by which RoPE rotates queries and keys, in one kernel.

    angle = position * inv_freq                in fp32
    cos(angle) * factor, sin(angle) * factor

A program has one token. Angles reach thousands of full rotations, so this takes the library's cosine, and not the fast hardware
instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from phalanx.kernels.capabilities import sm_arch


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rope_cos_sin(positions, inv_freq, cosines, sines, half, factor, BLOCK: tl.constexpr, SM: tl.constexpr):
    if SM >= 90:
        gdc_launch_dependents()
    pair = tl.arange(0, BLOCK)
    mask = pair < half
    frequency = tl.load(inv_freq + pair, mask, 0.0)  # no kernel writes them
    if SM >= 90:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    if SM > 0:
        cosine, sine = libdevice.cos(angle), libdevice.sin(angle)
    else:
        cosine, sine = tl.cos(angle), tl.sin(angle)
    tl.store(cosines + token * half + pair, cosine * factor, mask)
    tl.store(sines + token * half + pair, sine * factor, mask)


def rope_cos_sin(positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The kernel of `reference.rope_cos_sin`."""
    tokens, half = len(positions), len(inv_freq)
    cosines, sines = (torch.empty((tokens, half), dtype=torch.float32, device=positions.device) for _ in range(2))
    if tokens:
        sm = sm_arch(positions.device)
        _rope_cos_sin[(tokens,)](
            positions, inv_freq, cosines, sines, half, factor, BLOCK=triton.next_power_of_2(half), SM=sm,
            num_warps=2, launch_pdl=sm >= 90,
        )  # fmt: skip
    return cosines, sines

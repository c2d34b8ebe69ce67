# SPDX-License-Identifier: Apache-2.0
"""What this process and its GPUs can do, as far as kernels depend on it: Triton, the architecture, multiprocessors, shared
memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

VERIFIED_TRITON = ("3.6", "3.7")
"""Versions with which the kernels in Gluon were run on a GPU. Speeds were measured with the first."""
HOPPER_SHARED_MEMORY = 227 << 10
"""Bytes of shared memory that one program may use on Hopper and later; others have less."""


class GpuCapabilities(NamedTuple):
    """sm: compute capability times 10 (90 is Hopper), 0 where there is no GPU (CPU tensors and Triton's interpreter). num_sms: its
    multiprocessors. shared_memory: bytes that one program may use."""

    sm: int
    num_sms: int
    shared_memory: int


_NO_GPU = GpuCapabilities(0, 1, HOPPER_SHARED_MEMORY)
_simulated: GpuCapabilities | None = None
_plain = False


@cache
def has_triton() -> bool:
    """Whether Triton is installed, outside `plain_torch`. Does not import it."""
    return not _plain and importlib.util.find_spec("triton") is not None


@cache
def has_gluon() -> bool:
    """Whether the kernels in Gluon (`gemm.fp8_skinny`, `gemm.int4_skinny`, `attention.prefill_hopper`,
    `attention.latent_decode_hopper`) were verified with this Triton, which calls that language experimental."""
    if not has_triton():
        return False
    import triton

    return str(triton.__version__).startswith(tuple(f"{version}." for version in VERIFIED_TRITON))


def slower_kernels(device: torch.device) -> str | None:
    """What to tell a user whose Hopper GPU runs slower kernels than it could, for want of the verified Triton; else None."""
    if sm_arch(device) != 90 or not has_triton() or has_gluon():
        return None
    import triton

    return (
        f"Triton {triton.__version__}: the skinny GEMMs of FP8 and 4-bit integers, long prefill and decode attention of many heads "
        f"over latents use slower kernels; their Hopper kernels are verified with Triton {' and '.join(VERIFIED_TRITON)} only"
    )


@cache
def gpu(device: torch.device) -> GpuCapabilities:
    """The GPU behind a device; for a device without one, or inside `simulated`, a stand-in."""
    return _simulated or _probe(device)


@cache
def sm_arch(device: torch.device) -> int:
    """The device's compute capability times 10: 90 for Hopper; 0 where there is no GPU."""
    return (_simulated or _probe(device)).sm


@cache
def has_fp8_gemm(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 matrices: Ada (compute capability 8.9), Hopper and later."""
    return sm_arch(device) >= 89


@cache
def has_fp8_kernels(device: torch.device) -> bool:
    """Whether our FP8 GEMMs run on the device: on Hopper, where they were measured."""
    return sm_arch(device) == 90 and has_triton()


@contextmanager
def simulated(stand_in: GpuCapabilities) -> Iterator[None]:
    """Inside, every device seems to be this GPU, so that the choice of kernels can be tested where there is none."""
    global _simulated
    before, _simulated = _simulated, stand_in
    _forget()
    try:
        yield
    finally:
        _simulated = before
        _forget()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside, ops run as they do without Triton: in plain torch. Weights and back ends that were made before stay as they are."""
    global _plain
    before, _plain = _plain, True
    _forget_triton()
    try:
        yield
    finally:
        _plain = before
        _forget_triton()


def _forget_triton() -> None:
    """Drop the answers about Triton, which are kept."""
    for answers in (has_triton, has_gluon, has_fp8_kernels):
        answers.cache_clear()


def _forget() -> None:
    """Drop the answers about devices, which are kept: each GEMM asks for them."""
    for answers in (gpu, sm_arch, has_fp8_gemm, has_fp8_kernels):
        answers.cache_clear()


@cache
def _probe(device: torch.device) -> GpuCapabilities:
    if device.type != "cuda":
        return _NO_GPU
    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return GpuCapabilities(10 * properties.major + properties.minor, properties.multi_processor_count, int(shared_memory))

# SPDX-License-Identifier: Apache-2.0
"""Steps of a runner on a CPU that launch a Hopper GPU's kernels as far as Triton's choice of a compiled variant, which is recorded.
Nothing is compiled or run: tensors that kernels would have written hold zeros, and results mean nothing.

    with recorded() as variants:
        runner.run(step)
    assert variants == {Variant("_decode", "..."), ...}
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from phalanx.kernels.capabilities import HOPPER_SHARED_MEMORY, GpuCapabilities, has_gluon, simulated

SM, NUM_SMS = 90, 132


class Variant(NamedTuple):
    """One kernel as it would be compiled. key: Triton's, of the arguments' types, alignments and constants, and the options."""

    kernel: str
    key: str


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", SM, 32)

    def get_current_device(self) -> str:
        return "recorded"  # Triton keeps compiled kernels by device: none of other tests is found here

    def get_current_stream(self, device: str) -> int:
        return 0


class _Torch(TorchFunctionMode):
    """New integers are zeros, since no kernel writes them and indices are read; what of torch takes long and launches nothing of
    ours (GEMMs, copies of activations) does not run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.empty_like, torch.Tensor.new_empty):
            new = func(*args, **kwargs)
            return new if new.is_floating_point() else new.zero_()
        if func is torch.nn.functional.linear:
            return args[0].new_empty(args[0].shape[0], args[1].shape[0])
        if func in (torch.mm, torch.addmm, torch.bmm, torch._scaled_mm):
            left, right = args[1:3] if func is torch.addmm else args[:2]
            shape, dtype = (*left.shape[:-1], right.shape[-1]), kwargs.get("out_dtype") or left.dtype
            return torch.empty(shape, dtype=dtype) if kwargs.get("out") is None else kwargs["out"]
        if func is torch.cat and args[0][0].dtype is torch.bfloat16:
            (first, *others), dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
            shape = list(first.shape)
            shape[dim] += sum(other.shape[dim] for other in others)
            return first.new_empty(shape)
        if func is torch.Tensor.float and args[0].dtype is torch.bfloat16:
            return torch.empty_like(args[0], dtype=torch.float32)
        return func(*args, **kwargs)


def _seems_on_gpu(tensor: torch.Tensor) -> bool:
    """What the dispatchers of kernels are told; all other code is told the truth."""
    return str(sys._getframe(1).f_globals.get("__name__", "")).startswith("phalanx.kernels")


@contextmanager
def recorded() -> Iterator[set[Variant]]:
    """Inside, kernels take CPU tensors, and the set gets the variants that launches need."""
    from phalanx import kernels
    from phalanx.kernels.sampling import sampling

    for module in pkgutil.walk_packages(kernels.__path__, "phalanx.kernels."):
        if has_gluon() or not module.name.endswith((".fp8_skinny", ".prefill_hopper", ".latent_decode_hopper")):
            import_module(module.name)  # before tensors seem to be on a GPU
    for name in ("oneshot", "twoshot", "sequence_parallel.rs_norm_ag", "sequence_parallel.gemm_rs", "one_sided.on_gpu"):
        import_module(f"phalanx.comm.{name}")
    variants: set[Variant] = set()

    def record(self: Any, key: str, *_: Any) -> None:
        variants.add(Variant(self.fn.__name__, key))

    def score(logits: torch.Tensor, targets: torch.Tensor, most: int) -> torch.Tensor:
        return torch.zeros(len(targets), 2 + 2 * most, dtype=torch.float64)

    before = driver._active
    driver.set_active(_Driver())
    try:
        with pytest.MonkeyPatch.context() as patch, simulated(GpuCapabilities(SM, NUM_SMS, HOPPER_SHARED_MEMORY)), _Torch():
            patch.setattr(JITFunction, "_do_compile", record)
            patch.setattr(sampling, "score", score)  # long for large vocabularies, and without kernels of ours
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            patch.setattr(torch.Tensor, "is_cuda", property(_seems_on_gpu), raising=False)
            yield variants
    finally:
        driver._active = before

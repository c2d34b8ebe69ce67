# SPDX-License-Identifier: Apache-2.0
"""Steps of a runner on CPU that launch a GPU's kernels, as far as anybody can tell: each launch goes through Triton up to the
choice of a compiled variant, which is noted; nothing is compiled or run. What a model computes then means nothing.

    with noted() as variants:
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
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

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
        return "noted"  # compiled kernels are kept by device: nobody finds those of other tests here

    def get_current_stream(self, device: str) -> int:
        return 0


class _Zeros:
    """torch for a room whose kernels would have filled what it makes."""

    empty = staticmethod(torch.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _seems_on_gpu(tensor: torch.Tensor) -> bool:
    """What code that picks kernels is told; everybody else hears the truth."""
    return str(sys._getframe(1).f_globals.get("__name__", "")).startswith("phalanx.kernels")


@contextmanager
def noted() -> Iterator[set[Variant]]:
    """Inside, kernels take CPU tensors, and the variants that launches ask for are in the set."""
    from phalanx import kernels
    from phalanx.kernels.capabilities import has_gluon
    from phalanx.kernels.gemm import block_gemm
    from phalanx.kernels.sampling import sampling
    from phalanx.models.layers import embedding

    for found in pkgutil.walk_packages(kernels.__path__, "phalanx.kernels."):
        if has_gluon() or not found.name.endswith(".few_rows"):
            import_module(found.name)  # before anything is patched that a room would import and keep
    scaled_mm = import_module("phalanx.kernels.gemm.scaled_mm")  # the room has a function of that name
    variants: set[Variant] = set()

    def note(self: Any, key: str, *_: Any) -> None:
        variants.add(Variant(self.fn.__name__, key))

    def product(x: Any, weight: Any, bias: Any = None, *, out: Any = None, out_dtype: Any = None, **_: Any) -> Any:
        if out is None:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype or x.dtype)
        return out

    def product_of_two(x: Any, turned: Any, *_: Any, **named: Any) -> Any:
        return product(x, turned.t(), **{name: value for name, value in named.items() if name in ("out", "out_dtype")})

    def score(logits: Any, targets: Any, most: int) -> Any:
        return torch.zeros(len(targets), 2 + 2 * most, dtype=torch.float64)

    before = driver._active
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", note)
        patch.setattr(torch.Tensor, "is_cuda", property(_seems_on_gpu), raising=False)
        for name, module in list(sys.modules.items()):
            if name.startswith("phalanx.kernels") and hasattr(module, "capability"):
                patch.setattr(module, "capability", lambda device: SM)
        patch.setattr(scaled_mm, "has_fp8_products", lambda device: True)
        patch.setattr(scaled_mm, "has_fp8_kernels", lambda device: True)
        patch.setattr(scaled_mm, "_one", lambda device: torch.ones(()))
        if has_gluon():
            patch.setattr("phalanx.kernels.gemm.fp8_skinny.processors", lambda device: NUM_SMS)
            patch.setattr("phalanx.kernels.gemm.fp8_skinny._arrived", lambda device, *_: torch.zeros(256, dtype=torch.int32))
        patch.setattr(block_gemm, "_gpu", lambda device: block_gemm._Gpu(NUM_SMS, 227 << 10, True))
        patch.setattr("phalanx.kernels.gemm.gemv_fused.has_fp8_kernels", lambda device: True)
        # Products and reports of large vocabularies take long, and launch nothing of ours.
        patch.setattr("torch.nn.functional.linear", product)
        patch.setattr(torch, "mm", product_of_two)
        patch.setattr(torch, "_scaled_mm", product_of_two)
        patch.setattr(sampling, "score", score)
        patch.setattr(sampling, "torch", _Zeros())
        patch.setattr(embedding, "torch", _Zeros())
        driver.set_active(_Driver())
        try:
            yield variants
        finally:
            driver._active = before

# SPDX-License-Identifier: Apache-2.0
"""What a start says of kernels that this Triton does not run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.kernels import capabilities
from phalanx.kernels.capabilities import HOPPER_SHARED_MEMORY, GpuCapabilities, simulated, slower_kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sm", "version", "says"), [(90, "3.8.0", True), (90, "3.7.1", False), (90, "3.6.0", False), (80, "3.8.0", False)]
)
def test_slower_kernels_are_told_on_hopper(sm: int, version: str, says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    monkeypatch.setattr(capabilities, "has_triton", lambda: True)
    capabilities.has_gluon.cache_clear()
    try:
        with simulated(GpuCapabilities(sm, 132, HOPPER_SHARED_MEMORY)):
            warning = slower_kernels(CPU)
    finally:
        capabilities.has_gluon.cache_clear()
    assert (warning is not None) == says
    if warning is not None:
        assert "Triton 3.8.0" in warning
        assert "3.6 and 3.7 only" in warning


def test_a_cpu_has_no_slower_kernels() -> None:
    assert slower_kernels(CPU) is None


def test_kernels_are_left_out_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are kept, and change all the same."""
    monkeypatch.setattr(capabilities.importlib.util, "find_spec", lambda name: name)
    capabilities._forget_triton()
    try:
        assert capabilities.has_triton()
        with capabilities.plain_torch():
            assert not capabilities.has_triton()
            assert not capabilities.has_gluon()
            with capabilities.plain_torch():
                pass
            assert not capabilities.has_triton()
        assert capabilities.has_triton()
    finally:
        capabilities._forget_triton()


def test_what_triton_renamed_has_one_place() -> None:
    """CI has one Triton: with the other these kernels would not compile, which nobody would see here."""
    folder = Path(capabilities.__file__).parent
    files = [path for path in folder.rglob("*.py") if path.name != "gluon_names.py"]
    assert [path.name for path in files if re.search(r"gl\.(thread_)?barrier\(", path.read_text(encoding="utf-8"))] == []

# SPDX-License-Identifier: Apache-2.0
"""Packages have a small public API: `__init__` exports a handful of names, each of which exists. The public names are frozen."""

from __future__ import annotations

import importlib

import pytest

import phalanx
from tests.architecture.sources import SRC

PACKAGES = sorted(path.parent.name for path in SRC.glob("*/__init__.py"))
MAX_NAMES = 20


def test_public_names():
    assert phalanx.__all__ == ["LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "PhalanxError", "__version__"]
    for name in phalanx.__all__:
        assert getattr(phalanx, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = phalanx.nothing


@pytest.mark.parametrize("package", PACKAGES)
def test_public_api_of_a_package(package):
    module = importlib.import_module(f"phalanx.{package}")
    names = getattr(module, "__all__", [])
    assert len(names) <= MAX_NAMES, f"{package} exports {len(names)} names"
    for name in names:
        assert getattr(module, name) is not None

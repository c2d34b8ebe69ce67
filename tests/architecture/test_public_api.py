# SPDX-License-Identifier: Apache-2.0
"""Rooms have doors: `__init__` exports a handful of names, each of which exists; the public names are frozen here."""

from __future__ import annotations

import importlib

import pytest

import phalanx
from tests.architecture.sources import SRC

ROOMS = sorted(p.parent.name for p in SRC.glob("*/__init__.py"))


def test_public_names():
    assert phalanx.__all__ == ["LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "PhalanxError", "__version__"]
    for name in phalanx.__all__:
        assert getattr(phalanx, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = phalanx.nothing


@pytest.mark.parametrize("room", ROOMS)
def test_door(room):
    door = importlib.import_module(f"phalanx.{room}")
    names = getattr(door, "__all__", [])
    assert len(names) <= 12, f"{room}: a door is a handful of names, this is {len(names)}"
    for name in names:
        assert getattr(door, name) is not None

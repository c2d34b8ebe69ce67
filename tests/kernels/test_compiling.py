# SPDX-License-Identifier: Apache-2.0
"""Triton's seconds are told apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.kernels import compiling


def test_compilation_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.compilation, "listener", None)
    seconds: dict[str, float] = {}
    compiling.count(seconds)
    for hit in (False, False, True):
        times = SimpleNamespace(total=250_000)
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=hit)
    assert seconds == {"(kernels compiled)": 0.5, "(kernels from the cache)": 0.25}

# SPDX-License-Identifier: Apache-2.0
"""A family in which every second layer keeps a state for each request, in place of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from phalanx.config.model import ModelShape
from phalanx.layout.cache import CacheTensor
from phalanx.layout.families import dense, registry
from phalanx.layout.families.registry import LayerDeclaration

HYBRID = "HybridForCausalLM"


def cache(shape: ModelShape, index: int, dtype: str) -> Iterator[CacheTensor]:
    """The state of a KV head is a matrix."""
    if index % 2:
        yield CacheTensor("state", (shape.num_kv_heads, shape.head_dim, shape.head_dim), "fp32", "request", heads=shape.num_heads)
    else:
        yield from dense.cache(shape, index, dtype)


DECLARATION = LayerDeclaration(dense.layer, cache)


def hybrid(monkeypatch: pytest.MonkeyPatch, shape: ModelShape) -> ModelShape:
    """The shape of a dense model, as one of this family."""
    monkeypatch.setitem(registry.DECLARATIONS, HYBRID, DECLARATION)
    return replace(shape, architecture=HYBRID)

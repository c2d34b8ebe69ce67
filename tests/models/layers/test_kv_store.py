# SPDX-License-Identifier: Apache-2.0
"""Keys and values reach the cache as they are; in FP8: scaled, and clipped instead of lost; or in int8, each with a scale."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.layout.families import layer_cache
from phalanx.models.cache import LayerCache, empty_caches
from phalanx.models.layers.kv_store import KvStore
from phalanx.models.slices import LayerContext

CPU = torch.device("cpu")
CONTEXT = LayerContext(Solo(), torch.float32, CPU)


def cache_in(dtype: str) -> LayerCache:
    """Three blocks of four tokens, of two heads of 8 elements."""
    shape = ModelShape("LlamaForCausalLM", 8, 8, 8, 1, 2, 2, 8, 64, windows=(None,))
    return empty_caches([layer_cache(shape, 0, dtype)], 3, 4, CPU)[0]


def stored(store: KvStore, key: torch.Tensor, value: torch.Tensor) -> LayerCache:
    """Of positions that turn nothing; slot 5, none, slot 8."""
    cache = cache_in(store.context.kv_dtype)
    query = torch.randn(3, 4, 8)
    unrotated = torch.ones(3, 4), torch.zeros(3, 4)
    heads = torch.cat((query, key, value), dim=1)
    assert torch.equal(store(heads, unrotated, 4, cache, torch.tensor([5, -1, 8])), query)
    return cache


def test_as_they_are() -> None:
    key, value = torch.randn(2, 3, 2, 8)
    cache = stored(KvStore("a", context=CONTEXT), key, value)
    assert torch.equal(cache.key[1, 1], key[0])
    assert torch.equal(cache.value[2, 0], value[2])


@pytest.mark.parametrize("scales", [None, (0.5, 0.125)])
def test_in_fp8(scales: tuple[float, float] | None) -> None:
    key, value = torch.randn(2, 3, 2, 8)
    key[0, 0, 0], value[2, 1, 7] = 1e4, -1e4
    store = KvStore("a", context=replace(CONTEXT, kv_cache_dtype="fp8"))
    store.read_scales = scales
    cache = stored(store, key, value)
    for entries, vectors, scale in ((cache.key, key, (scales or (1.0,))[0]), (cache.value, value, (scales or (1.0, 1.0))[1])):
        assert entries.dtype == torch.float8_e4m3fn
        expected = (vectors / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(entries[1, 1].float(), expected[0])
        assert torch.equal(entries[2, 0].float(), expected[2])
        assert not entries[0].float().any()


def test_in_int8() -> None:
    """A scale for each token and head, from its own largest magnitude alone."""
    key, value = torch.randn(2, 3, 2, 8)
    key[0, 0], key[0, 1], value[2, 0] = 0.0, key[0, 1] * 1e-4, value[2, 0] * 1e4
    cache = stored(KvStore("a", context=replace(CONTEXT, kv_cache_dtype="int8")), key, value)
    assert cache.token_scales is not None
    for part, (entries, vectors) in enumerate(((cache.key, key), (cache.value, value))):
        assert entries.dtype == torch.int8
        for (block, offset), token in (((1, 1), 0), ((2, 0), 2)):
            scale = cache.token_scales[block, :, offset, part, None].float()
            step = vectors[token].abs().amax(-1, keepdim=True) / 127
            assert torch.equal(entries[block, offset].abs().amax(-1) == 127, step.squeeze(-1) > 0)
            assert bool(((entries[block, offset] * scale - vectors[token]).abs() <= 0.51 * step + 1e-12).all())
    assert not cache.token_scales[0].any()
    assert cache.nbytes == 2 * 3 * 4 * 2 * (8 + 2)


def test_a_gemv_is_not_fused_with_a_store_in_int8() -> None:
    """Its programs have parts of heads, and a scale depends on all of one. It must not even be asked."""
    store = KvStore("a", context=replace(CONTEXT, kv_cache_dtype="int8"))
    cache = cache_in("int8")
    qkv_proj: Any = SimpleNamespace(gemv_args=lambda x: x)
    cos_sin = torch.ones(1, 4), torch.zeros(1, 4)
    assert store.fused_with_gemv(torch.ones(1, 64), qkv_proj, 4, cos_sin, cache, torch.tensor([0])) is None

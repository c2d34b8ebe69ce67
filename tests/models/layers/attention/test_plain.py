# SPDX-License-Identifier: Apache-2.0
"""The reference of the self check gives what the other back ends give on CPU, for rows, caches and layers of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.models.layers.attention.plain import PlainBackend
from phalanx.models.layers.attention.sdpa import SdpaBackend
from phalanx.models.layers.attention.sdpa_latent import SdpaLatentBackend
from tests.support.models_attention import in_fp8, in_int8, latent_batch, made_batch

ROWS = [(7, 1), (30, 1), (0, 9), (11, 6), (5, 1)]
SINKS = torch.tensor([-1.0, 0.0, 1.0, 3.0, -50.0, 60.0])
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 5}, "sinks": {"sinks": SINKS, "window": 5}, "cap": {"cap": 1.5},
    "fp8": {"kv_scales": (0.5, 2.0)}, "int8": {"window": 5},
}  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_each_kind_of_layer(layer: str) -> None:
    options = {"window": None, "scale": 0.4, **LAYERS[layer]}
    batch, cache, *_ = made_batch(ROWS, options["window"])
    cache = in_fp8(cache, (0.5, 2.0)) if layer == "fp8" else in_int8(cache) if layer == "int8" else cache
    query = torch.randn(batch.token_ids.shape[0], 6, 8, generator=torch.Generator().manual_seed(4))
    out, expected = (each.plan(batch).forward(query, cache, **options) for each in (PlainBackend(latent=False), SdpaBackend()))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("indirect", [False, True])
def test_latent_attention(indirect: bool) -> None:
    torch.manual_seed(1)
    batch, cache = latent_batch(ROWS, indirect=indirect)
    query, up = torch.randn(batch.token_ids.shape[0], 3, 6 + 8), torch.randn(3, 6 + 5, 12)
    out, expected = (
        each.plan(batch).forward(query, cache, up=up, scale=0.2) for each in (PlainBackend(latent=True), SdpaLatentBackend())
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

# SPDX-License-Identifier: Apache-2.0
"""What layers keep between steps, as families declare it."""

from __future__ import annotations

import pytest

from phalanx.config.model import ModelShape
from phalanx.errors import LayoutError
from phalanx.layout.cache import CacheGroup, CacheTensor, group_of, kv_dtype, request_bytes, token_bytes
from phalanx.layout.families import known, layer_cache, model_cache

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def shape(family, **fields):
    return ModelShape.from_config({"architectures": [f"{family}ForCausalLM"], **SIZES, **fields})


def test_blocks_can_be_freed_only_where_every_layer_has_a_window():
    layers = (0, 1, 2, 3)
    assert group_of(model_cache(shape("Mistral", sliding_window=8))) == CacheGroup(layers, 8)
    assert group_of(model_cache(shape("Llama"))) == CacheGroup(layers, None)
    mixed = shape("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert {mixed.windows[layer] for layer in layers} == {None, 8}
    assert group_of(model_cache(mixed)).window is None


def test_layers_that_keep_no_tokens_need_no_blocks():
    state, keys = (CacheTensor("state", (4, 8), "fp32", "request"),), (CacheTensor("key", (1, 8), "bf16", window=16),)
    assert group_of([state, keys, state]) == CacheGroup((1,), 16)
    assert (token_bytes([state, keys]), request_bytes([state, keys])) == (16, 128)


def test_int8_has_a_scale_for_each_key_and_value():
    llama = shape("Llama")
    assert token_bytes([layer_cache(llama, 0, "int8")]) == 2 * 2 * (8 + 2)
    assert layer_cache(llama, 0, "int8")[2].allocated(blocks=5, block_size=4, slots=1) == (5, 2, 4, 2)


def test_heads_are_split_and_latents_are_not():
    state = CacheTensor("state", (4, 8), "fp32", "request", heads=4)
    assert [state.local(tp).shape for tp in (1, 2, 4)] == [(4, 8), (2, 8), (1, 8)]
    with pytest.raises(LayoutError, match="does not divide"):
        state.local(3)
    latent = ModelShape.from_config(known("deepseek-v2-lite"))
    assert {layer_cache(latent, 0, "bf16", tp)[0].shape for tp in (1, 2, 4)} == {(1, 576)}


def test_the_dtype_of_keys_and_values():
    assert [kv_dtype(option, dtype) for option in ("model", "fp8") for dtype in ("fp8", "fp16")] == ["bf16", "fp16", "fp8", "fp8"]

# SPDX-License-Identifier: Apache-2.0
"""What layers keep between steps, as families declare it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.config.model import ModelShape
from phalanx.errors import LayoutError
from phalanx.layout.cache import (
    CacheTensor,
    group_of,
    group_windows,
    in_group,
    kv_dtype,
    layer_groups,
    request_bytes,
    sharing,
    token_bytes,
)
from phalanx.layout.families import known, layer_cache, model_cache
from phalanx.layout.memory import block_bytes
from phalanx.models.cache import empty_caches

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def shape(family, **fields):
    return ModelShape.from_config({"architectures": [f"{family}ForCausalLM"], **SIZES, **fields})


def test_layers_of_one_window_share_block_ids():
    mistral, llama = model_cache(shape("Mistral", sliding_window=8)), model_cache(shape("Llama"))
    assert (layer_groups(mistral), group_windows(mistral)) == ((0, 0, 0, 0), (8,))
    assert (layer_groups(llama), group_windows(llama)) == ((0, 0, 0, 0), (None,))
    mixed = shape("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert mixed.windows == (None, 8, 8, 8)
    assert (layer_groups(model_cache(mixed)), group_windows(model_cache(mixed))) == ((0, 1, 2, 3), (None, 8, 8, 8))


KEY = CacheTensor("key", (1, 8), "bf16")
LAYERS_OF = {
    # full layers, layers with a window -> windows of the groups, tensors of a block
    "gpt-oss": (18, 18, (None, 128), 18),
    "gemma-3-27b": (10, 52, (None, *[128] * 6), 10),
    "gemma-3-1b": (4, 22, (None, *[128] * 6), 4),
    "olmo-3": (16, 48, (None, 128, 128, 128), 16),
    "one full layer": (1, 20, (None, *[128] * 7), 3),
    "one window": (20, 1, (*[None] * 5, 128), 4),
}


@pytest.mark.parametrize(("full", "windowed", "windows", "tensors"), LAYERS_OF.values(), ids=LAYERS_OF)
def test_the_groups_of_a_model_share_tensors(full, windowed, windows, tensors):
    """Blocks are as large as the layers of one group. Those without a window, whose blocks are many, are padded least."""
    total = full + windowed
    kinds = [None if layer * full // total != (layer + 1) * full // total else 128 for layer in range(total)]
    caches = [(replace(KEY, window=window),) for window in kinds]
    grouped = [in_group(cache, group) for cache, group in zip(caches, layer_groups(caches), strict=True)]
    assert group_windows(grouped) == windows
    owners = sharing(grouped)
    assert len(set(owners)) == tensors
    assert len({(owner, group_of(cache)) for owner, cache in zip(owners, grouped, strict=True)}) == total, "never two of a group"
    for stage in (grouped[: len(grouped) // 2], grouped[len(grouped) // 2 :]):
        assert len(set(sharing(stage))) <= tensors // 2 + 1, "each stage has as many layers of each group"
    allocated = empty_caches(grouped, 3, 4, torch.device("cpu"))
    assert len({cache.key.data_ptr() for cache in allocated}) == tensors
    assert [cache.group for cache in allocated] == list(layer_groups(caches))
    assert block_bytes(grouped, 4) == 4 * tensors * KEY.nbytes


def test_layers_with_other_bytes_are_in_one_group_and_keep_all():
    caches = [(KEY,), (replace(KEY, shape=(2, 8), window=16),)]
    assert (layer_groups(caches), group_windows(caches)) == ((0, 0), (None,))
    assert sharing(caches) == [0, 1]


def test_the_layers_of_a_draft_network_have_tensors_of_their_own():
    """They are in group 0, all of whose tensors are in use."""
    full, window, draft = (KEY,), in_group((replace(KEY, window=16),), 1), (replace(KEY, window=4),)
    assert sharing([full, window, draft]) == [0, 0, 2]
    assert group_windows([full, window, draft]) == (None, 16)


def test_layers_that_share_a_tensor_take_its_blocks_once():
    """Of three windows' layers, the fifth reads what the second stores, in its group."""

    def layer(window: int | None, shared: str = "") -> tuple[CacheTensor, ...]:
        return tuple(CacheTensor(name, (2, 8), "bf16", window=window, shared=shared) for name in ("key", "value"))

    caches = [layer(None), layer(8, "layer 1"), layer(8), layer(8), layer(8, "layer 1")]
    groups = layer_groups(caches)
    assert groups[4] == groups[1] != groups[0]
    assert sorted(groups[:4]) == [0, 1, 2, 3]
    in_groups = [in_group(cache, group) for cache, group in zip(caches, groups, strict=True)]
    assert sharing(in_groups) == [0, 0, 0, 0, 0]
    assert sharing([layer(None), layer(None, "layer 1"), layer(None, "layer 1")]) == [0, 1, 1]
    assert block_bytes([layer(None, "a"), layer(None, "a")], 4) == block_bytes([layer(None)], 4)
    first, second = empty_caches([layer(None, "a"), layer(None, "a")], 3, 4, torch.device("cpu"))
    assert first.key.data_ptr() == second.key.data_ptr()


def test_layers_that_keep_no_tokens_need_no_blocks():
    state, keys = (CacheTensor("state", (4, 8), "fp32", "request"),), (CacheTensor("key", (1, 8), "bf16", window=16),)
    assert (layer_groups([state, keys, state]), group_windows([state, keys, state])) == ((0, 0, 0), (16,))
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


def test_the_tokens_of_latents_are_divided_and_others_are_not():
    latent = [layer_cache(ModelShape.from_config(known("deepseek-v2-lite")), 0, "bf16", 8, dcp) for dcp in (1, 2, 4)]
    assert [cache[0].allocated(5, 64, slots=1) for cache in latent] == [(5, 64, 1, 576), (5, 32, 1, 576), (5, 16, 1, 576)]
    assert [block_bytes([cache], 64) for cache in latent] == [64 * 1152, 32 * 1152, 16 * 1152]
    draft = layer_cache(ModelShape.from_config(known("deepseek-v2-lite")), 1, "bf16", 8)
    assert block_bytes([latent[1], draft], 64) == (32 + 64) * 1152, "each rank has all of what a draft network keeps"
    assert layer_cache(shape("Llama"), 0, "bf16", 2, 2) == layer_cache(shape("Llama"), 0, "bf16", 2)


def test_the_dtype_of_keys_and_values():
    assert [kv_dtype(option, dtype) for option in ("model", "fp8") for dtype in ("fp8", "fp16")] == ["bf16", "fp16", "fp8", "fp8"]

# SPDX-License-Identifier: Apache-2.0
"""Declared tensors against published parameter counts, against the loader's own list, and against what splits must keep whole."""

from __future__ import annotations

import math

import pytest

from phalanx.config.model import ModelShape
from phalanx.errors import LayoutError, UnsupportedArchitecture
from phalanx.layout import weight_tensors
from phalanx.layout.cache import token_bytes
from phalanx.layout.families import registry
from phalanx.layout.families.registry import layer_cache, layer_tensors, outer_tensors


def every(name):
    shape = ModelShape.from_config(registry.known(name))
    return shape, [*outer_tensors(shape), *(t for layer in range(shape.num_layers) for t in layer_tensors(shape, layer))]


@pytest.mark.parametrize("name", registry.names())
def test_declared_tensors_add_up_to_the_published_parameters(name):
    _, tensors = every(name)
    assert sum(t.elements for t in tensors) / 1e9 == pytest.approx(registry.parameters(name), rel=0.004)
    names = [on_disk for t in tensors for on_disk in t.expand()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"])
def test_dense_families_declare_what_the_loader_expects(name):
    model = ModelShape.from_config(registry.known(name))
    _, tensors = every(name)
    assert {t.name: t.shape for t in tensors} == weight_tensors.tensors(model)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_splits_lose_nothing(name, tp):
    shape, tensors = every(name)
    for tensor in tensors:
        try:
            local = math.prod(tensor.local(tp))
        except LayoutError:
            assert shape.num_heads % tp or any(size % tp for size in tensor.shape)
            continue
        elements = math.prod(tensor.shape)
        assert elements / tp <= local <= elements
        if tensor.split in ("column", "row", "heads") and not tensor.unit and not tensor.kv_sections:
            assert local * tp == elements


def test_experts_that_tokens_reach():
    experts = ModelShape.from_config(registry.known("deepseek-v3")).experts
    assert experts.touched(1) == pytest.approx(8)
    assert experts.touched(64) == pytest.approx(222, abs=0.5)
    assert experts.touched(1e6) == pytest.approx(256)
    assert experts.dense_layers == (0, 1, 2)


def test_a_latent_cache_is_replicated_and_heads_are_split():
    v3, llama = ModelShape.from_config(registry.known("deepseek-v3")), ModelShape.from_config(registry.known("llama-3-70b"))
    assert {token_bytes([layer_cache(v3, 0, "fp8", tp)]) for tp in (1, 4, 8)} == {576}
    assert [token_bytes([layer_cache(llama, 0, "fp8", tp)]) for tp in (1, 4, 8, 16)] == [2048, 512, 256, 256]


def test_windows_of_gpt_oss_alternate():
    assert ModelShape.from_config(registry.known("openai/gpt-oss-20b")).windows[:3] == (128, None, 128)


@pytest.mark.parametrize(("tp", "columns"), [(1, 2880), (2, 1440), (4, 736), (8, 384)])
def test_blocks_of_mxfp4_stay_together(tp, columns):
    """90 blocks of 32 columns: of four ranks, two have 23 and two 22."""
    tensors = {t.name.rsplit(".", 1)[-1]: t for t in layer_tensors(ModelShape.from_config(registry.known("gpt-oss-20b")), 0)}
    assert tensors["down_proj"].local(tp) == (2880, columns)
    assert tensors["gate_up_proj"].local(tp) == (2 * columns, 2880)
    assert tensors["gate_up_proj_bias"].local(tp) == (2 * columns,)
    stored = weight_tensors.layer_tensors(ModelShape.from_config(registry.known("gpt-oss-20b")), 0)
    assert stored["model.layers.0.mlp.experts.down_proj_blocks"] == (32, 2880, 90, 16)
    assert stored["model.layers.0.mlp.experts.down_proj_scales"] == (32, 2880, 90)


def test_short_names_and_unknown_ones():
    assert registry.known("LLAMA-3-70B") == registry.known("meta-llama/Meta-Llama-3-70B")
    assert registry.known("nobody/nothing") is None
    with pytest.raises(UnsupportedArchitecture, match="none of which is supported"):
        ModelShape.from_config({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(UnsupportedArchitecture, match=r"heads that classify are not computed; use the checkpoint that it was made"):
        ModelShape.from_config({"architectures": ["Qwen3ForSequenceClassification"]})

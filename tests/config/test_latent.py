# SPDX-License-Identifier: Apache-2.0
"""Latent attention of config.json: defaults, null, and YaRN's factor of the softmax."""

from __future__ import annotations

import pytest

from phalanx.config.json_fields import JsonFields
from phalanx.config.latent import read_latent
from phalanx.config.rope import RopeDefaults, read_rope
from phalanx.errors import ModelError


def read(**values):
    fields = JsonFields({"num_attention_heads": 16, **values}, "config.json")
    return read_latent(fields, read_rope(fields, 4096, RopeDefaults(10_000.0)))


def test_the_defaults_are_those_of_the_reference():
    latent = read()
    assert (latent.q_rank, latent.kv_rank, latent.nope, latent.rope, latent.v) == (1536, 512, 128, 64, 128)
    assert latent.cached == 576
    assert latent.softmax_scale == 192**-0.5
    assert latent.interleaved


def test_null_is_no_down_projection_of_queries():
    assert read(q_lora_rank=None).q_rank is None


def test_mscale_all_dim_is_in_the_softmax_squared():
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    assert read(rope_scaling=yarn).softmax_scale == pytest.approx(192**-0.5 * 1.8739, rel=1e-4)
    assert read(rope_scaling={**yarn, "mscale_all_dim": 0}).softmax_scale == 192**-0.5


@pytest.mark.parametrize(("values", "message"), [
    ({"qk_rope_head_dim": 7}, "which is odd"), ({"num_key_value_heads": 1}, "each head has keys and values of its own"),
])  # fmt: skip
def test_what_no_layer_computes_is_refused(values, message):
    with pytest.raises(ModelError, match=message):
        read(**values)

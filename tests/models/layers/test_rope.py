# SPDX-License-Identifier: Apache-2.0
"""Angles against transformers' functions for each kind, and against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from phalanx import kernels
from phalanx.config.model import ModelShape
from phalanx.config.rope import ROPE_TYPES, Rope
from phalanx.models.layers.rope import Rotary, inv_freq

BASE: dict[str, Any] = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512}

KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0},
    {"rope_type": "llama3", **BASE, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", **BASE},
    {"rope_type": "yarn", **BASE, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 0.9},
    {"rope_type": "yarn", **BASE, "mscale": 0.7, "mscale_all_dim": 1.2},
]


@pytest.mark.parametrize("parameters", KINDS, ids=lambda rope_fields: rope_fields["rope_type"])
def test_wavelengths_are_transformers(parameters: dict[str, Any]) -> None:
    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
        "vocab_size": 10,
        "intermediate_size": 8,
    }
    reference = LlamaConfig(**sizes, num_hidden_layers=1, rope_parameters=dict(parameters))
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](reference, torch.device("cpu"))
    config = {"architectures": ["LlamaForCausalLM"], **sizes, "num_hidden_layers": 1, "rope_parameters": parameters}
    rope = ModelShape.from_config(config).rope
    torch.testing.assert_close(inv_freq(rope, 128), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)
    if parameters["rope_type"] != "linear":
        plain = inv_freq(Rope(theta=10000.0), 128)
        assert plain[0] == inv_freq(rope, 128)[0]
        assert inv_freq(rope, 128)[-1] == pytest.approx(plain[-1].item() / 8.0)


def test_every_kind_that_config_reads_is_built() -> None:
    for kind in ROPE_TYPES:
        rope = Rope(kind, factor=2.0, original_max_positions=64, factors=((1.0,) * 8, (2.0,) * 8))
        assert inv_freq(rope, 16).shape == (8,)
    with pytest.raises(ValueError, match="spiral"):
        inv_freq(Rope("spiral"), 16)


def test_longrope_has_the_factors_of_the_longest_context() -> None:
    rope = Rope("longrope", original_max_positions=64, factors=((1.0, 3.0), (2.0, 5.0)))
    plain = inv_freq(Rope(), 4)
    assert torch.equal(inv_freq(rope.within(64), 4), plain / torch.tensor([1.0, 3.0]))
    assert torch.equal(inv_freq(rope.within(65), 4), plain / torch.tensor([2.0, 5.0]))


def test_a_head_is_rotated_as_complex_numbers_are() -> None:
    rotary = Rotary(Rope(theta=100.0), 8, 8, torch.device("cpu"))
    x, positions = torch.randn(5, 3, 8), torch.tensor([0, 1, 7, 200, 4000])
    cos, sin, temperature = rotary(positions)
    assert temperature is None
    rotated = kernels.rope(x, cos, sin)
    angles = positions[:, None].double() * 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    number = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(rotated, torch.cat((number.real, number.imag), dim=-1).float(), rtol=1e-3, atol=1e-3)
    assert torch.equal(rotated[0], x[0])
    assert kernels.rope(x.bfloat16(), cos, sin).dtype == torch.bfloat16

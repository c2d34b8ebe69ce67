# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next's and Qwen3.5's config.json: which layers keep a state, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.config.gated_delta import FULL, LINEAR, GatedDelta
from phalanx.config.model import ModelShape
from phalanx.errors import ModelError

NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "max_position_embeddings": 262144, "rope_theta": 10000000, "partial_rotary_factor": 0.25, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MOE: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "mamba_ssm_dtype": "float32", "attn_output_gate": True, "output_gate_type": "swish",
        "mtp_num_hidden_layers": 1, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }, "vision_config": {"depth": 27},
}  # fmt: skip


def test_qwen3_next_as_released() -> None:
    shape = ModelShape.from_config(NEXT)
    layers = tuple(layer for layer in range(48) if layer % 4 != 3)
    assert shape.gated_delta == GatedDelta(layers, 16, 32, 128, 128, 4)
    assert (shape.rotary_in(3).rotated, shape.norm_offset, shape.qk_norm) == (64, True, True)
    assert shape.experts is not None
    assert (shape.experts.count, shape.experts.per_token, shape.experts.shared, shape.experts.shared_gate) == (512, 10, 512, True)
    assert shape.experts.renormalize


def test_a_tower_of_experts_needs_no_dense_width() -> None:
    shape = ModelShape.from_config(MOE)
    assert (shape.architecture, shape.wrapper) == ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
    assert shape.experts is not None
    assert (shape.experts.count, shape.experts.per_token, shape.head_dim, shape.num_kv_heads) == (256, 8, 256, 2)


@pytest.mark.parametrize(("field", "value"), [
    ("layer_types", [LINEAR] * 47), ("layer_types", [LINEAR] * 47 + ["sliding_attention"]), ("linear_num_value_heads", 24),
    ("mamba_ssm_dtype", "bfloat16"), ("output_gate_type", "sigmoid"), ("attn_output_gate", False), ("linear_conv_kernel_dim", 1),
])  # fmt: skip
def test_what_is_refused(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=field):
        ModelShape.from_config({**NEXT, field: value})


def test_stated_layer_types_count() -> None:
    kinds = [FULL, LINEAR] * 24
    gated = ModelShape.from_config({**NEXT, "layer_types": kinds}).gated_delta
    assert gated is not None
    assert gated.layers == tuple(range(1, 48, 2))

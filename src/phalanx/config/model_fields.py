# SPDX-License-Identifier: Apache-2.0
"""What Phalanx does with each field of config.json: honoured, harmless or refused.

The reference is what transformers computes for the architecture. The fields of one family alone are in its entry (`families`). A
field in none of the tables is a warning: the format allows additions.
"""

from __future__ import annotations

from typing import Any

from phalanx.config import generation
from phalanx.config.families import FAMILIES, Family
from phalanx.config.json_fields import FieldTable

_OF_ALL = """
architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
max_position_embeddings rope_parameters rope_scaling rope_theta partial_rotary_factor
original_max_position_embeddings tie_word_embeddings dtype torch_dtype eos_token_id quantization_config
generation_config
"""
_OF_TRAINING = """
attention_dropout attn_pdrop embd_pdrop resid_pdrop residual_dropout hidden_dropout hidden_dropout_prob classifier_dropout
summary_type
initializer_range aux_loss_alpha router_aux_loss_coef router_jitter_noise output_router_logits seq_aux gradient_checkpointing
use_unsloth_gradient_checkpointing neftune_noise_alpha unsloth_version unsloth_fixed pretraining_tp ep_size tensor_parallel
"""
_OF_A_LIBRARY = """
transformers_version auto_map custom_pipelines name_or_path transformers.js_config torchscript use_bfloat16 fp16 bf16
attn_implementation experts_implementation output_attentions output_hidden_states output_past return_dict return_dict_in_generate
use_return_dict use_cache cache_implementation chunk_size_feed_forward id2label label2id num_labels problem_type finetuning_task
task_specific_params tokenizer_class prefix bos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id mask_token_id
internal_version is_decoder use_flash_attn use_flash_attention flash_attention rope_ratio license model_max_length tf_legacy_loss
"""
_NO: tuple[Any, ...] = (False,)
_ONE: tuple[Any, ...] = (1,)
REFUSED: dict[str, tuple[Any, ...]] = {
    # factors and caps of Granite, MiniCPM, Cohere, Gemma, Grok, Falcon-H1 and others
    "attention_multiplier": (), "embedding_multiplier": _ONE, "residual_multiplier": _ONE, "logits_scaling": _ONE,
    "logit_scale": _ONE, "output_multiplier_scale": _ONE, "embedding_multiplier_scale": _ONE, "lm_head_multiplier": _ONE,
    "key_multiplier": _ONE, "mlp_multipliers": (), "attention_in_multiplier": _ONE, "attention_out_multiplier": _ONE,
    "scale_emb": _ONE, "scale_depth": (), "dim_model_base": (), "scale_embedding": _NO, "embedding_scale": _ONE,
    "query_pre_attn_scalar": (), "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "output_logit_soft_cap": (0,),
    "attention_logit_cap": (0,), "router_logit_softcapping": (0,), "clip_qkv": (), "attention_value_scale": _ONE,
    "mup_width_multiplier": _ONE, "logits_mup_width_multiplier": _ONE,
    # positions
    "llama_4_scaling_beta": (0,), "attn_temperature_tuning": (False, 0), "rope_local_base_freq": (), "local_rope_theta": (),
    "no_rope_layers": ([],), "no_rope_layer_interval": (0,), "rotary_pct": _ONE, "rotary_emb_base": (), "rotary_dim": (),
    "use_mrope": _NO, "alibi": _NO, "use_alibi": _NO, "attention_chunk_size": (), "attention_window_size": (), "index_topk": (),
    # other blocks
    "mlp_only_layers": ([],), "decoder_sparse_step": _ONE, "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
    "use_parallel_residual": _NO, "parallel_attn": _NO, "use_qk_norm": _NO, "qk_layernorm": _NO, "use_post_norm": _NO,
    "use_bias": _NO, "attention_bias": _NO, "mlp_bias": _NO, "qkv_bias": _NO, "add_bias_linear": _NO, "lm_head_bias": _NO,
    "is_encoder_decoder": _NO, "add_cross_attention": _NO,
    "cross_attention_hidden_size": (), "hidden_activation": ("silu",), "activation_function": ("silu",), "pruned_heads": ({},),
    "per_layer_config": ({},), "block_configs": ([],), "tie_encoder_decoder": _NO, "transformers_weights": (),
    "compression_config": ({},),
}  # fmt: skip

HARMLESS = f"{_OF_TRAINING} {_OF_A_LIBRARY} {' '.join(generation.FIELDS.harmless | generation.FIELDS.honoured)}"


def _table(family: Family) -> FieldTable:
    fields = f"{family.fields} {family.eps_field}"
    known = {*fields.split(), *family.harmless.split()}
    own = {family.activation_field: (family.activation,), **family.refused}
    refused = {name: nothing for name, nothing in REFUSED.items() if name not in known} | own
    return FieldTable.of(f"{_OF_ALL} {fields}", f"{HARMLESS} {family.harmless}", refused)


MODEL = {architecture: _table(family) for architecture, family in FAMILIES.items()}
"""Of config.json, by architecture. transformers 4 writes the defaults of requests there, too, which `generation` reads."""

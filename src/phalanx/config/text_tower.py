# SPDX-License-Identifier: Apache-2.0
"""The text models inside of multimodal ones (`*ForConditionalGeneration`): where config.json and the weights have them.

Phalanx serves text alone. The other towers are not loaded, which vLLM calls language_model_only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from phalanx.config.json_fields import FieldTable, JsonFields
from phalanx.config.mistral_format import OTHER_TOWERS
from phalanx.config.model_fields import HARMLESS, REFUSED
from phalanx.errors import ModelError, UnsupportedArchitecture

TEXT = "text_config"


class TextTower(NamedTuple):
    """The text model of a multimodal architecture.

    text: model_type of text_config -> the architecture that computes the same for text. The first is the default.
    towers: the beginnings of the names of tensors that are not loaded, "model." before them or not.
    defaults: of text_config, where they are not those of the text architecture.
    experts_transposed: a layer's experts are one tensor [experts, inputs, outputs] for gate and up, and one for down.
    by_modality: fields that may have a list of values, that of text first.
    """

    text: Mapping[str, str]
    towers: tuple[str, ...]
    defaults: Mapping[str, Any] = {}
    experts_transposed: bool = False
    by_modality: tuple[str, ...] = ()


_KIMI = TextTower({"kimi_k2": "DeepseekV3ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}, ("vision_tower.", "mm_projector."))
_ERNIE = TextTower(
    {"ernie4_5_vl_moe_text": "Ernie4_5_MoeForCausalLM"}, ("vision_model.", "vision_tower.", "resampler_model."),
    by_modality=(
        "moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index",
    ),
)  # fmt: skip

WRAPPERS = {
    "Mistral3ForConditionalGeneration": TextTower(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM"},
        ("vision_tower.", "multi_modal_projector.", *OTHER_TOWERS),
    ),
    "Llama4ForConditionalGeneration": TextTower(
        {"llama4_text": "Llama4ForCausalLM"}, ("vision_model.", "multi_modal_projector.")
    ),
    "Qwen2_5_VLForConditionalGeneration": TextTower(
        {"qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen2_5_vl": "Qwen2ForCausalLM"}, ("visual.",),
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_window_layers": 80},
    ),
    "Qwen3VLForConditionalGeneration": TextTower(
        {"qwen3_vl_text": "Qwen3ForCausalLM"}, ("visual.",), {"rope_theta": 500_000.0, "max_position_embeddings": 128000}
    ),
    "Qwen3VLMoeForConditionalGeneration": TextTower(
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"}, ("visual.",), {
            "rope_theta": 500_000.0, "max_position_embeddings": 128000, "num_key_value_heads": 16, "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4, "norm_topk_prob": True,
        }, experts_transposed=True,
    ),
    "Gemma3ForConditionalGeneration": TextTower(
        {"gemma3_text": "Gemma3ForCausalLM"}, ("vision_tower.", "multi_modal_projector."),
        {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
    ),
    "Gemma4ForConditionalGeneration": TextTower(
        {"gemma4_text": "Gemma4ForCausalLM"}, ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
    ),
    "Gemma4UnifiedForConditionalGeneration": TextTower(
        {"gemma4_unified_text": "Gemma4ForCausalLM"}, ("vision_embedder.", "embed_vision.", "embed_audio."),
        {"hidden_size_per_layer_input": 0},
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": _ERNIE,
    "Ernie4_5_VL_MoeForConditionalGeneration": _ERNIE,  # the name of earlier transformers
    "Exaone4_5_ForConditionalGeneration": TextTower(
        {"exaone4_5_text": "Exaone4ForCausalLM", "exaone4": "Exaone4ForCausalLM"}, ("visual.", "mtp.")
    ),
    "Qwen3_5ForConditionalGeneration": TextTower({"qwen3_5_text": "Qwen3_5ForCausalLM"}, ("visual.", "mtp.")),
    "Qwen3_5MoeForConditionalGeneration": TextTower({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, ("visual.", "mtp.")),
    "KimiK25ForConditionalGeneration": _KIMI,  # released files
    "Kimi_K25ForConditionalGeneration": _KIMI,  # transformers
}  # fmt: skip
"""By the architecture in config.json."""

PREFIXES = {
    "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
}  # fmt: skip
"""The beginning of a text tensor's name -> that in the text model: of transformers 5, of released files, of the base class."""

_EITHER = "dtype torch_dtype bos_token_id eos_token_id pad_token_id quantization_config tie_word_embeddings"
"""Fields that the file may state outside of text_config, too."""
_OUTSIDE_COUNTS = ("tie_word_embeddings", "dtype", "torch_dtype")
"""Those of them that transformers takes from there where both are stated."""
_OF_OTHER_TOWERS = """
vision_config audio_config image_token_index image_token_id video_token_id video_token_index vision_token_id vision_start_token_id
vision_end_token_id vision_feature_layer vision_feature_select_strategy projector_hidden_act projector_hidden_size
projection_hidden_size projection_layer_norm_eps multimodal_projector_bias spatial_merge_size spatial_patch_size
media_placeholder_token_id use_unified_vision_chunk video_placeholder ignore_index image_seq_length boi_token_index eoi_token_index
boi_token_id eoi_token_id boa_token_id eoa_token_id eoa_token_index audio_token_id vision_soft_tokens_per_image
mm_tokens_per_image language_model_only image_start_token_id image_end_token_id video_start_token_id video_end_token_id im_patch_id
pixel_hidden_size spatial_conv_size temporal_conv_size use_temporal_conv modality_detach mm_vocab_size max_text_id rope_3d
freq_allocation moe_use_hard_gate
"""
TABLE = FieldTable.of(f"architectures model_type generation_config {TEXT} {_EITHER}", f"{HARMLESS} {_OF_OTHER_TOWERS}", REFUSED)
"""Of what is beside text_config."""


def text_config(fields: JsonFields, architecture: str) -> dict[str, Any]:
    """The config.json that the text model alone would have. fields: of a file of a multimodal architecture.

    Fields beside text_config that it has, too, with the same values, say nothing more. A file without text_config (Qwen2.5-VL as
    released) has the text model's fields beside those of the other towers. Raises UnsupportedArchitecture for another text model,
    and ModelError where one field has two values.
    """
    wrapper = WRAPPERS[architecture]
    stated = fields.optional_mapping(TEXT)
    if stated is None:
        stated = {name: value for name, value in fields.values.items() if name not in (*_OF_OTHER_TOWERS.split(), "architectures")}
        stated["model_type"] = next(iter(wrapper.text))
    else:
        repeated = [name for name in TABLE.unknown(fields.values) if name in stated and stated[name] == fields.values[name]]
        fields = replace(fields, values={name: each for name, each in fields.values.items() if name not in repeated}).sorted_by(
            TABLE
        )
    kind = stated.get("model_type") or next(iter(wrapper.text))
    if kind not in wrapper.text:
        raise UnsupportedArchitecture(
            f"{fields.file} has {TEXT}.model_type={kind!r}, which is not supported",
            held=f"supported in {architecture} are: {', '.join(wrapper.text)}", next="use a checkpoint of one of these families",
        )  # fmt: skip
    outer = {name: fields.value(name) for name in _EITHER.split() if fields.values.get(name) is not None}
    _require_same(fields, outer, stated, "quantization_config")
    outside = [name for name in outer if name in _OUTSIDE_COUNTS]
    hidden = [*outside, *(("dtype", "torch_dtype") if "dtype" in outer or "torch_dtype" in outer else ())]
    inside = {name: value for name, value in stated.items() if name not in hidden and (value is not None or name not in outer)}
    for name in wrapper.by_modality:
        if isinstance(values := inside.get(name), list) and values:
            inside[name] = values[0]
    text = {**wrapper.defaults, **outer, **inside, "generation_config": fields.value("generation_config")}
    return {**text, "architectures": [wrapper.text[kind]], "model_type": None}


def _require_same(fields: JsonFields, outer: Mapping[str, Any], inner: Mapping[str, Any], name: str) -> None:
    if name in outer and inner.get(name) not in (None, outer[name]):
        raise ModelError(
            f"{fields.file} has two values of {name}: one in {TEXT}, and one beside it",
            next="correct the file: keep the one that the weights were made with",
        )  # fmt: skip

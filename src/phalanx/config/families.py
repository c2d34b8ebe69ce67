# SPDX-License-Identifier: Apache-2.0
"""The families of models, by architecture: the defaults of their config.json, its fields, and the traits that no file states.

A family that differs from others in traits alone is one entry of `FAMILIES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from phalanx.config import experts, mamba
from phalanx.config.experts import Experts
from phalanx.config.gated_delta import GatedDelta, read_gated_delta
from phalanx.config.gemma4 import HeadSizes, LayerInputs, SharedKv, gemma4_full_heads, read_layer_inputs, read_shared_kv
from phalanx.config.json_fields import JsonFields
from phalanx.config.latent import GLM5, Latent, LatentDefaults, read_latent, read_sparse_latent
from phalanx.config.mamba import Block, Mamba2, read_blocks
from phalanx.config.rope import BY_TYPE, PROPORTIONAL, Rope

Norms = Literal["before", "behind", "around", "parallel", "single"]
"""Where a layer has norms: before its blocks; behind them, before the residual is added (OLMo-2); both (Gemma-2); one before both
blocks, which run in parallel (Cohere); or one before its only block (Nemotron-H)."""


class Multipliers(NamedTuple):
    """What multiplies (Granite, Gemma): the embedding's vectors, what each block adds to the residual stream, and the logits.
    attention: the softmax's scale; None: 1 / sqrt(head_dim). attention_cap, logits_cap: c of c * tanh(x / c), which scores and
    logits become (soft caps, Gemma-2)."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None


NO_MULTIPLIERS = Multipliers()


def granite_multipliers(fields: JsonFields) -> Multipliers:
    """Granite's fields. attention_multiplier may be null, which torch's attention takes for 1 / sqrt(head_dim)."""
    embedding, residual = (fields.positive(f"{name}_multiplier", 1.0) for name in ("embedding", "residual"))
    attention = None
    if fields.values.get("attention_multiplier", 1.0) is not None:
        attention = fields.positive("attention_multiplier", 1.0)
    return Multipliers(embedding, residual, 1.0 / fields.positive("logits_scaling", 1.0), attention)


def gemma2_multipliers(fields: JsonFields) -> Multipliers:
    """Gemma-2's fields. null, and 0 as in vLLM, mean that there is no cap; a file without them has caps."""
    return _gemma_multipliers(fields, 50.0, 30.0)


def gemma3_multipliers(fields: JsonFields) -> Multipliers:
    """Gemma-3's fields: those of Gemma-2, without caps by default."""
    return _gemma_multipliers(fields, None, None)


def _gemma_multipliers(fields: JsonFields, attention: float | None, logits: float | None) -> Multipliers:
    caps = []
    for name, default in (("attn_logit_softcapping", attention), ("final_logit_softcapping", logits)):
        caps.append(fields.positive(name) if fields.value(name) else fields.values.get(name, default) or None)
    scale = fields.positive("query_pre_attn_scalar", 256) ** -0.5
    return Multipliers(fields.count("hidden_size") ** 0.5, attention=scale, attention_cap=caps[0], logits_cap=caps[1])


def gemma4_multipliers(fields: JsonFields) -> Multipliers:
    """Gemma 4's field; scores are multiplied by nothing, as its heads are normed."""
    cap = fields.positive("final_logit_softcapping") if fields.value("final_logit_softcapping") else None
    return Multipliers(fields.count("hidden_size") ** 0.5, attention=1.0, logits_cap=cap)


def cohere_multipliers(fields: JsonFields) -> Multipliers:
    """Cohere's field."""
    return Multipliers(logits=fields.positive("logit_scale", 0.0625))


@dataclass(frozen=True)
class Family:
    """What config.json does not state: the defaults of the architecture's reference implementation, and its fixed traits.

    max_positions, rms_norm_eps, rope_theta, dtype: of a file that has none. tied: tie_word_embeddings by default.
    kv_heads, head_dim: likewise; None if derived from the query heads.
    fields: that are read beside eps_field and those of all families (`model_fields`). harmless: further ones that change nothing.
    refused: see `FieldTable`, beside those of all families.
    model_type: of transformers, where it is not the architecture's name. model_types: further ones of the same model.
    window: the layers with a sliding window: "all" (if config.json has a sliding_window, or none at all), "stated" (if it is given
    and not null), "used" (with use_sliding_window), "chosen" (by use_sliding_window, max_window_layers or layer_types), "pattern"
    (by layer_types, or all but each window_pattern-th), "unrotated" (by layer_types, or the layers without RoPE) or "none".
    window_size: of a file that has no sliding_window; None: no layer has one then. full_last: the last layer has none, whatever
    the file says.
    qkv_bias: there is one, whatever the file says. attention_bias: the default of that field.
    input_bias, output_bias, mlp_bias: the fields that say whether q, k and v, o_proj and the MLP have biases; None: they have none.
    qk_norm, qk_norm_whole, qk_norm_plain: see `ModelShape`. Where it has none, the field use_qk_norm may say that there is one.
    v_norm: likewise.
    norms: see `Norms`. norm_offset: norms multiply by 1 + weight (Gemma). layer_norm: norms are LayerNorm, without bias. eps_field:
    the field of their epsilon.
    activation: of the MLP, as transformers names it; all but relu2 are of a gate. activation_field: the field that says so.
    sinks: each head's softmax has one more logit, without a value.
    experts, latent, multipliers, gated_delta, mamba, blocks, full_heads, layer_inputs, shared_kv: how their fields are read, in
    families that have them.
    prefixes: what names of layers may have on disk in the place of "model.".
    interleaved: see `Rope`. original_positions: original_max_position_embeddings by default. rope_types: that the family has;
    (): all that any has. yarn: the rope_parameters of a file that has none. temperature: they have the temperature of queries,
    too. rotary_portion: where partial_rotary_factor is read, its default. window_theta: where layers with a window have a RoPE
    of their own, the default of its theta; full_rope: the object of the others in a file that has none. nope_full: layers
    without a window have no RoPE; or ("with size") unless sliding_window is null. nope_interval: where no_rope_layers is read,
    its default: the last of each so many layers has no RoPE. mtp_layers: multi-token prediction layers behind the last one, by
    default.
    """

    max_positions: int
    fields: str = ""
    harmless: str = ""
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    model_type: str = ""
    model_types: tuple[str, ...] = ()
    kv_heads: int | None = None
    head_dim: int | None = None
    window: Literal["none", "all", "stated", "used", "chosen", "pattern", "unrotated"] = "none"
    window_pattern: int = 0
    window_size: int | None = 4096
    full_last: bool = False
    qkv_bias: bool = False
    attention_bias: bool = False
    input_bias: str | None = "attention_bias"
    output_bias: str | None = "attention_bias"
    mlp_bias: str | None = "mlp_bias"
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qk_norm_plain: bool = False
    v_norm: bool = False
    norms: Norms = "before"
    norm_offset: bool = False
    layer_norm: bool = False
    eps_field: str = "rms_norm_eps"
    activation: Literal["silu", "gelu_pytorch_tanh", "relu2"] = "silu"
    activation_field: str = "hidden_act"
    sinks: bool = False
    experts: Callable[[JsonFields], Experts | None] | None = None
    latent: Callable[[JsonFields, Rope], Latent] | None = None
    multipliers: Callable[[JsonFields], Multipliers] | None = None
    gated_delta: Callable[[JsonFields], GatedDelta] | None = None
    mamba: Callable[[JsonFields], Mamba2 | None] | None = None
    blocks: Callable[[JsonFields], tuple[Block, ...]] | None = None
    prefixes: tuple[str, ...] = ()
    full_heads: Callable[[JsonFields], HeadSizes] | None = None
    layer_inputs: Callable[[JsonFields], LayerInputs | None] | None = None
    shared_kv: Callable[[JsonFields], SharedKv | None] | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    interleaved: bool = False
    original_positions: int | None = None
    rope_types: tuple[str, ...] = ()
    yarn: Mapping[str, Any] | None = None
    temperature: bool = False
    window_theta: float | None = None
    full_rope: Mapping[str, Any] | None = None
    rotary_portion: float | None = None
    nope_full: bool | Literal["with size"] = False
    nope_interval: int | None = None
    mtp_layers: int = 0
    tied: bool = False
    dtype: str = "float32"


_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_MINISTRAL_YARN = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MISTRAL4_YARN = {**_MINISTRAL_YARN, "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
_WINDOW_OF_SOME = "sliding_window use_sliding_window"
_EXPERTS = "num_local_experts num_experts num_experts_per_tok"
_LATENT_EXPERTS = """
kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave n_routed_experts n_shared_experts
norm_topk_prob routed_scaling_factor num_experts_per_tok moe_intermediate_size
"""
_DEEPSEEK = f"{_LATENT_EXPERTS} n_group topk_group moe_layer_freq first_k_dense_replace num_nextn_predict_layers"
_INDEXER = f"{_DEEPSEEK} mlp_layer_types num_local_experts index_n_heads index_head_dim index_topk indexer_rope_interleave"
_SHARED_INDEXER = f"{_INDEXER} indexer_types index_topk_pattern index_topk_freq index_skip_topk_offset"
_GLM5_LATENT = partial(read_sparse_latent, sizes=GLM5, heads=32, interleaved=True)
_GLM_LATENT = partial(read_latent, sizes=LatentDefaults(768, nope=192, v=256))
_MISTRAL4_LATENT = partial(read_latent, sizes=LatentDefaults(1024, 256, nope=64))
_GEMMA = "head_dim attention_bias query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"
_COHERE = "attention_bias logit_scale"
_COHERE_IS: dict[str, tuple[Any, ...]] = {
    "use_parallel_block": (True,), "use_gated_activation": (True,), "use_embedding_sharing": (True,),
    "use_parallel_embedding": (False,), "position_embedding_type": ("rope_gptj",),
    "order_of_interleaved_layers": ("local_attn_first",), "layer_switch": (4,),
}  # fmt: skip
_CAUSAL: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False,)}

_GATED_DELTA = """
head_dim attention_bias layer_types full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
linear_num_key_heads linear_num_value_heads
"""
_GATED_DELTA_IS: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",), "output_gate_type": ("swish",),
}  # fmt: skip
_SHARED_EXPERT = "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size"
_QWEN3_NEXT = Family(
    32768, f"{_GATED_DELTA} {_SHARED_EXPERT} norm_topk_prob decoder_sparse_step mlp_only_layers",
    "mtp_num_hidden_layers mtp_use_dedicated_embeddings", _GATED_DELTA_IS, kv_heads=2, head_dim=256, qk_norm=True, norm_offset=True,
    rotary_portion=0.25, gated_delta=read_gated_delta, experts=experts.read_qwen3_next,
)  # fmt: skip

_NO_LIMIT: tuple[Any, ...] = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""In JSON as Python reads it, and as transformers 5 writes it."""
_MAMBA_IS = {"mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "time_step_limit": _NO_LIMIT}

FAMILIES = {
    "LlamaForCausalLM": Family(2048, "head_dim attention_bias mlp_bias"),
    "MistralForCausalLM": Family(131072, "head_dim sliding_window", kv_heads=8, window="all"),
    "Llama4ForCausalLM": Family(
        131072, """
        head_dim attention_bias use_qk_norm no_rope_layers no_rope_layer_interval layer_types attention_chunk_size
        attn_temperature_tuning attn_scale floor_scale intermediate_size_mlp moe_layers interleave_moe_layer_step num_local_experts
        num_experts_per_tok
        """, "for_llm_compressor", model_type="llama4_text", kv_heads=8, head_dim=128, mlp_bias=None, qk_norm_plain=True,
        experts=experts.read_llama4, rms_norm_eps=1e-5, rope_theta=500_000.0, interleaved=True, nope_interval=4,
    ),
    "Ministral3ForCausalLM": Family(
        262144, "head_dim sliding_window rope_interleave", model_type="ministral3", kv_heads=8, head_dim=128, window="stated",
        rms_norm_eps=1e-5, yarn=_MINISTRAL_YARN, temperature=True,
    ),
    "Qwen2ForCausalLM": Family(
        32768, f"head_dim {_WINDOW_OF_SOME} max_window_layers layer_types", "attention_bias", kv_heads=32, window="chosen",
        qkv_bias=True,
    ),
    "Qwen3ForCausalLM": Family(
        32768, f"head_dim attention_bias {_WINDOW_OF_SOME} max_window_layers layer_types", kv_heads=32, head_dim=128,
        refused={"use_qk_norm": (True,)}, window="chosen", qk_norm=True,
    ),
    "MixtralForCausalLM": Family(
        131072, f"head_dim sliding_window {_EXPERTS}", kv_heads=8, window="stated", experts=experts.read_mixtral, rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    ),
    "Qwen3MoeForCausalLM": Family(
        32768, f"""
        head_dim attention_bias {_WINDOW_OF_SOME} {_EXPERTS} moe_intermediate_size norm_topk_prob decoder_sparse_step
        mlp_only_layers
        """, "max_window_layers", {"use_qk_norm": (True,)}, kv_heads=4, window="used", qk_norm=True, experts=experts.read_qwen3_moe,
    ),
    "GptOssForCausalLM": Family(
        131072, f"head_dim attention_bias sliding_window layer_types swiglu_alpha swiglu_limit {_EXPERTS}",
        "experts_per_token initial_context_length", kv_heads=8, head_dim=64, window="pattern", window_pattern=2, window_size=128,
        attention_bias=True, sinks=True, experts=experts.read_gpt_oss, rms_norm_eps=1e-5, rope_theta=150_000.0, yarn=_GPT_OSS_YARN,
        dtype="bfloat16",
    ),
    "DeepseekV2ForCausalLM": Family(
        2048, f"{_DEEPSEEK} topk_method num_experts", "head_dim qk_head_dim", {"scoring_func": ("softmax",)},
        experts=experts.read_deepseek_v2, latent=read_latent,
    ),
    "DeepseekV3ForCausalLM": Family(
        4096, f"{_DEEPSEEK} num_local_experts num_mtp_layers", "head_dim qk_head_dim",
        {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}, model_types=("kimi_k2",),
        experts=experts.read_deepseek_v3, latent=read_latent, mtp_layers=1,
    ),
    "DeepseekV32ForCausalLM": Family(
        163840, _INDEXER, "head_dim qk_head_dim layer_types", {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        experts=experts.read_deepseek_v32, latent=read_sparse_latent, mtp_layers=1,
    ),
    "GlmMoeDsaForCausalLM": Family(
        202752, _SHARED_INDEXER, "head_dim qk_head_dim layer_types index_share_for_mtp_iteration",
        {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        experts=experts.read_glm_moe_dsa, latent=_GLM5_LATENT, rms_norm_eps=1e-5, mtp_layers=1,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        202752, f"{_LATENT_EXPERTS} n_group topk_group mlp_layer_types num_local_experts num_nextn_predict_layers num_mtp_layers",
        "head_dim qk_head_dim", {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "first_k_dense_replace": (1,)},
        experts=experts.read_glm4_moe_lite, latent=_GLM_LATENT, rms_norm_eps=1e-5, mtp_layers=1,
    ),
    "Mistral4ForCausalLM": Family(
        1_048_576, f"{_LATENT_EXPERTS} first_k_dense_replace num_local_experts", "head_dim qk_head_dim",
        {"scoring_func": ("softmax",), "topk_method": ("greedy",), "n_group": (1,), "topk_group": (1,)}, model_type="mistral4",
        experts=experts.read_mistral4, latent=_MISTRAL4_LATENT, rotary_portion=1.0, yarn=_MISTRAL4_YARN, temperature=True,
    ),
    "SeedOssForCausalLM": Family(
        524288, "head_dim attention_bias attention_out_bias mlp_bias", kv_heads=8, head_dim=128, attention_bias=True,
        output_bias="attention_out_bias",
    ),
    "SmolLM3ForCausalLM": Family(
        32768, f"""
        head_dim attention_bias mlp_bias {_WINDOW_OF_SOME} layer_types no_rope_layers no_rope_layer_interval
        """, model_type="smollm3", kv_heads=4, window="unrotated", window_size=None, rope_theta=2_000_000.0, nope_interval=4,
        tied=True,
    ),
    "GraniteForCausalLM": Family(
        2048, """
        head_dim attention_bias mlp_bias embedding_multiplier residual_multiplier attention_multiplier logits_scaling
        """, multipliers=granite_multipliers,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        2048, """
        head_dim attention_bias embedding_multiplier residual_multiplier attention_multiplier logits_scaling position_embedding_type
        layer_types layers_block_type num_local_experts num_experts_per_tok shared_intermediate_size mamba_n_heads mamba_n_groups
        mamba_d_head mamba_d_state mamba_d_conv mamba_expand
        """, "mamba_chunk_size init_method", {**_MAMBA_IS, "normalization_function": ("rmsnorm",)}, model_type="granitemoehybrid",
        mlp_bias=None, multipliers=granite_multipliers, mamba=mamba.read_granite_hybrid, experts=experts.read_granite_hybrid,
    ),
    "NemotronHForCausalLM": Family(
        4096, """
        head_dim hybrid_override_pattern layers_block_type layer_types n_routed_experts num_local_experts num_experts_per_tok
        moe_intermediate_size moe_shared_expert_intermediate_size n_group topk_group norm_topk_prob routed_scaling_factor
        mamba_num_heads mamba_head_dim n_groups mamba_n_groups ssm_state_size conv_kernel mamba_d_conv
        """, """
        chunk_size mamba_chunk_size expand mamba_expand n_shared_experts moe_shared_expert_overlap time_step_min time_step_max
        time_step_floor mamba_ssm_cache_dtype use_mamba_kernels num_logits_to_keep rescale_prenorm_residual norm_eps
        num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern
        """, {
            **_MAMBA_IS, "use_conv_bias": (True,), "mamba_hidden_act": ("silu",), "residual_in_fp32": (False,),
            "moe_latent_size": (), "sliding_window": (), "attention_head_dim": (128,),
        }, kv_heads=8, head_dim=128, input_bias=None, output_bias=None, mlp_bias=None, norms="single",
        eps_field="layer_norm_epsilon", activation="relu2", activation_field="mlp_hidden_act", mamba=mamba.read_nemotron_h,
        blocks=read_blocks, experts=experts.read_nemotron_h, rms_norm_eps=1e-5, nope_full=True,
        prefixes=("backbone.",),
    ),
    "Glm4MoeForCausalLM": Family(
        131072, """
        head_dim attention_bias use_qk_norm n_routed_experts num_local_experts n_shared_experts n_group topk_group norm_topk_prob
        routed_scaling_factor num_experts_per_tok moe_intermediate_size first_k_dense_replace num_nextn_predict_layers
        num_mtp_layers
        """, kv_heads=8, output_bias=None, experts=experts.read_glm4_moe, rms_norm_eps=1e-5, rotary_portion=0.5, mtp_layers=1,
    ),
    "MiniMaxM2ForCausalLM": Family(
        196608, f"head_dim rotary_dim {_EXPERTS} attn_type_list", "use_mtp mtp_transformer_layers num_mtp_modules",
        {"scoring_func": ("sigmoid",), "use_routing_bias": (True,), "use_qk_norm": (True,), "qk_norm_type": ("per_layer",)},
        model_type="minimax_m2", kv_heads=8, head_dim=128, qk_norm=True, qk_norm_whole=True, experts=experts.read_minimax_m2,
        rope_theta=5_000_000.0, rotary_portion=1.0,
    ),
    "Phi3ForCausalLM": Family(
        4096, "head_dim sliding_window", window="stated", rms_norm_eps=1e-5, original_positions=4096,
        rope_types=("default", "longrope"), rotary_portion=1.0,
    ),
    "Olmo2ForCausalLM": Family(
        2048, "head_dim attention_bias", qk_norm=True, qk_norm_whole=True, norms="behind", rms_norm_eps=1e-5
    ),
    "Olmo3ForCausalLM": Family(
        2048, "head_dim attention_bias sliding_window layer_types", qk_norm=True, qk_norm_whole=True, norms="behind",
        window="pattern", window_pattern=4, rms_norm_eps=1e-5, rope_theta=500_000.0, window_theta=500_000.0,
    ),
    "Exaone4ForCausalLM": Family(
        2048, "head_dim sliding_window sliding_window_pattern layer_types",
        "num_nextn_predict_layers mtp_loss_scaling_factor mtp_share_layers", model_type="exaone4", input_bias=None,
        output_bias=None, mlp_bias=None, qk_norm=True, norms="behind", window="pattern", window_pattern=4, rms_norm_eps=1e-5,
        nope_full="with size",
    ),
    "Ernie4_5ForCausalLM": Family(
        131072, "head_dim use_bias", kv_heads=2, head_dim=128, input_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias",
        rms_norm_eps=1e-5, rope_theta=500_000.0, interleaved=True, tied=True,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        131072, """
        head_dim moe_num_experts num_experts moe_k num_experts_per_tok moe_num_shared_experts moe_intermediate_size
        moe_layer_start_index moe_layer_end_index moe_layer_interval moe_norm_min num_nextn_predict_layers mlp_layer_types
        """, "moe_capacity moe_multimodal_dispatch_use_allgather moe_group moe_orthogonal_loss_lambda",
        {"moe_gate": ("topk",), "moe_use_aux_free": (True,)}, model_type="ernie4_5_moe", kv_heads=4, input_bias=None,
        output_bias=None, mlp_bias=None, experts=experts.read_ernie_moe, rms_norm_eps=1e-5, rope_theta=500_000.0, interleaved=True,
        tied=True,
    ),
    "HYV3ForCausalLM": Family(
        131072, """
        head_dim attention_bias num_experts num_local_experts num_experts_per_tok num_shared_experts moe_intermediate_size
        router_scaling_factor mlp_layer_types num_nextn_predict_layers num_mtp_layers
        """, "enable_moe_fp32_combine", model_type="hy_v3", kv_heads=8, head_dim=128, qk_norm=True, experts=experts.read_hy_v3,
        rms_norm_eps=1e-5, rope_theta=11_158_840.0, mtp_layers=1,
    ),
    "CohereForCausalLM": Family(
        8192, f"head_dim use_qk_norm {_COHERE}", refused=_COHERE_IS, norms="parallel", layer_norm=True, eps_field="layer_norm_eps",
        multipliers=cohere_multipliers, rms_norm_eps=1e-5, rope_theta=500_000.0, interleaved=True, tied=True,
    ),
    "Cohere2ForCausalLM": Family(
        8192, f"head_dim {_COHERE} sliding_window sliding_window_pattern layer_types", refused=_COHERE_IS, window="pattern",
        window_pattern=4, norms="parallel", layer_norm=True, eps_field="layer_norm_eps", multipliers=cohere_multipliers,
        rms_norm_eps=1e-5, interleaved=True, nope_full=True, tied=True,
    ),
    "Gemma2ForCausalLM": Family(
        8192, f"{_GEMMA} sliding_window layer_types", "hidden_act sliding_window_size", _CAUSAL, kv_heads=4, head_dim=256,
        window="pattern", window_pattern=2, norms="around", norm_offset=True, activation="gelu_pytorch_tanh",
        activation_field="hidden_activation", multipliers=gemma2_multipliers, tied=True,
    ),
    "Gemma3ForCausalLM": Family(
        131072, f"{_GEMMA} sliding_window sliding_window_pattern layer_types rope_local_base_freq", "hidden_act", _CAUSAL,
        "gemma3_text", kv_heads=4, head_dim=256, window="pattern", window_pattern=6, qk_norm=True, norms="around",
        norm_offset=True, activation="gelu_pytorch_tanh", activation_field="hidden_activation", multipliers=gemma3_multipliers,
        rope_theta=1_000_000.0, window_theta=10_000.0, tied=True,
    ),
    "Gemma4ForCausalLM": Family(
        131072, """
        head_dim attention_bias final_logit_softcapping sliding_window layer_types global_head_dim num_global_key_value_heads
        attention_k_eq_v hidden_size_per_layer_input vocab_size_per_layer_input per_layer_config num_kv_shared_layers
        use_double_wide_mlp enable_moe_block num_experts top_k_experts moe_intermediate_size
        """, "hidden_act", {
            "use_bidirectional_attention": (False, "vision"), "rope_scaling": (), "rope_theta": (), "partial_rotary_factor": (),
        }, "gemma4_text", kv_heads=4, head_dim=256, window="pattern", window_pattern=6, window_size=512, full_last=True,
        qk_norm=True, v_norm=True, norms="around", activation="gelu_pytorch_tanh",
        activation_field="hidden_activation", multipliers=gemma4_multipliers, full_heads=gemma4_full_heads,
        layer_inputs=read_layer_inputs, shared_kv=read_shared_kv, experts=experts.read_gemma4,
        rope_types=(*BY_TYPE, PROPORTIONAL), rope_theta=1_000_000.0, window_theta=10_000.0,
        full_rope={"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25}, tied=True,
    ),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": replace(_QWEN3_NEXT, fields=_GATED_DELTA, model_type="qwen3_5_text", kv_heads=4, experts=None),
    "Qwen3_5MoeForCausalLM": replace(
        _QWEN3_NEXT, fields=f"{_GATED_DELTA} {_SHARED_EXPERT}", model_type="qwen3_5_moe_text", experts=experts.read_qwen3_5_moe
    ),
}  # fmt: skip
"""By the architecture in config.json."""


def model_type(architecture: str) -> str:
    """The model_type of an architecture in transformers: "Qwen3MoeForCausalLM" -> "qwen3_moe"."""
    family = FAMILIES.get(architecture)
    stem = architecture.removesuffix("ForCausalLM")
    return family.model_type if family and family.model_type else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()

# SPDX-License-Identifier: Apache-2.0
"""The sizes and traits of a model, as its config.json gives them: `ModelShape`. No weights, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config.dtypes import DTYPES
from phalanx.config.experts import (
    Experts,
    read_deepseek_v2,
    read_deepseek_v3,
    read_gpt_oss,
    read_mixtral,
    read_qwen3_moe,
)
from phalanx.config.json_fields import JsonFields
from phalanx.config.latent import Latent, read_latent
from phalanx.config.quantization import Quantization, from_modelopt, read_quantization
from phalanx.config.rope import Rope, read_rope
from phalanx.errors import ModelError, UnsupportedArchitecture
from phalanx.log import get_logger

log = get_logger(__name__)

CONFIG, GENERATION, MODELOPT = "config.json", "generation_config.json", "hf_quant_config.json"

_DTYPES = {dtype.long_name: dtype.name for dtype in DTYPES.values()}


@dataclass(frozen=True)
class Family:
    """What config.json does not state: the defaults of the architecture's reference implementation, and its fixed traits.

    kv_heads, head_dim: None if derived from the query heads. window: the layers with a sliding window: "all" (if config.json has a
    sliding_window, or none at all), "stated" (if it is given and not null), "used" (with use_sliding_window), "chosen" (by
    use_sliding_window, max_window_layers or layer_types), "alternating" (every second, from the first on, without layer_types) or
    "none". experts: how their fields are read, in a mixture of experts. sinks: each head's softmax has one more logit, without a
    value. attention_bias: where reads_attention_bias, the default. yarn: the factor and the original context of a config.json that
    says nothing of RoPE's scaling. dtype: of one that has none. latent: how latent attention is read, in families that have it.
    mtp_layers: multi-token prediction layers behind the last one, by default.
    """

    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    window: str = "none"
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    experts: Callable[[JsonFields], Experts] | None = None
    attention_bias: bool = False
    sinks: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    yarn: tuple[float, int] | None = None
    dtype: str = "float32"
    latent: Callable[[JsonFields, Rope], Latent] | None = None
    mtp_layers: int = 0


FAMILIES = {
    "LlamaForCausalLM": Family(2048, reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(131072, kv_heads=8, window="all"),
    "Qwen2ForCausalLM": Family(32768, kv_heads=32, window="chosen", qkv_bias=True),
    "Qwen3ForCausalLM": Family(32768, kv_heads=32, head_dim=128, window="chosen", reads_attention_bias=True, qk_norm=True),
    "MixtralForCausalLM": Family(131072, kv_heads=8, window="stated", experts=read_mixtral),
    "Qwen3MoeForCausalLM": Family(
        32768, kv_heads=4, window="used", reads_attention_bias=True, qk_norm=True, experts=read_qwen3_moe
    ),
    "GptOssForCausalLM": Family(
        131072, kv_heads=8, head_dim=64, window="alternating", reads_attention_bias=True, attention_bias=True, sinks=True,
        experts=read_gpt_oss, rms_norm_eps=1e-5, rope_theta=150_000.0, yarn=(32.0, 4096), dtype="bfloat16",
    ),
    "DeepseekV2ForCausalLM": Family(2048, experts=read_deepseek_v2, latent=read_latent),
    "DeepseekV3ForCausalLM": Family(4096, experts=read_deepseek_v3, latent=read_latent, mtp_layers=1),
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """One model's sizes and traits. Lengths in tokens; `dtype` is the checkpoint's: "fp32", "fp16" or "bf16".

    windows: per layer, the number of tokens that a query attends to, itself included; None: all before it. eos_token_ids: those
    of generation_config.json first, then those of config.json. sinks: see `Family`. latent: of models with latent attention, whose
    head_dim is that of queries and keys. mtp_layers: multi-token prediction layers, which a checkpoint may have behind the last
    layer, and which are not loaded.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    experts: Experts | None = None
    quantization: Quantization | None = None
    dtype: str = "fp32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sinks: bool = False
    latent: Latent | None = None
    mtp_layers: int = 0

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that RoPE rotates."""
        return self.head_dim if self.latent is None else self.latent.rope

    @property
    def window(self) -> int | None:
        """Tokens after which no layer needs a KV cache block any more; None if some layer attends to everything."""
        return max((size for size in self.windows if size), default=None) if all(self.windows) else None

    def experts_in(self, layer: int) -> Experts | None:
        """The experts of a layer; None where its MLP is dense."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @classmethod
    def from_folder(cls, folder: Path) -> ModelShape:
        """Read the folder of a checkpoint. Raises as `load_config` and `from_config`."""
        return cls.from_config(load_config(folder), file=str(folder / CONFIG))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, file: str = CONFIG) -> ModelShape:
        """Build the shape from the result of `load_config`, in either spelling of transformers: `dtype` and `rope_parameters`
        (version 5 and later), or `torch_dtype`, `rope_theta` and `rope_scaling` (before).

        Raises UnsupportedArchitecture, or ModelError naming file and field.
        """
        fields = JsonFields(config, file=file)
        architecture = _architecture(fields)
        family = FAMILIES[architecture]
        _refuse_unsupported(fields)
        heads = fields.count("num_attention_heads")
        kv_heads = fields.count("num_key_value_heads", family.kv_heads or heads)
        if heads % kv_heads:
            raise ModelError(f"{file}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}", why=_NO_GROUPS)
        num_layers = fields.count("num_hidden_layers")
        max_positions = fields.count("max_position_embeddings", family.max_positions)
        rope = read_rope(_with_rope(fields, family), max_positions, family.rope_theta)
        attention_bias = family.reads_attention_bias and fields.flag("attention_bias", family.attention_bias)
        experts = None if family.experts is None else family.experts(fields)
        latent = None if family.latent is None else family.latent(fields, rope)
        bos, vocab_size = fields.ids("bos_token_id"), fields.count("vocab_size")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(fields, heads, family) if latent is None else latent.nope + latent.rope,
            max_positions=max(max_positions, int(rope.original_max_positions * rope.factor) if rope.kind == "yarn" else 0),
            rms_norm_eps=fields.positive("rms_norm_eps", family.rms_norm_eps),
            rope=rope,
            windows=_windows(fields, family, num_layers),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family.reads_mlp_bias and fields.flag("mlp_bias", False),
            qk_norm=family.qk_norm,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            experts=experts,
            quantization=None if experts is not None and experts.mxfp4 else read_quantization(fields),
            dtype=_dtype(fields, family.dtype),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=_eos(fields, vocab_size),
            sinks=family.sinks,
            latent=latent,
            mtp_layers=int(fields.number("num_nextn_predict_layers", family.mtp_layers)),
        )


_NO_GROUPS = "each KV head must serve the same number of query heads"


def load_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a folder.

    The content of generation_config.json, if there is one, is added as "generation_config"; that of hf_quant_config.json as
    "quantization_config" if config.json has none. Raises ModelError if config.json is missing, or any of them is not a JSON object.
    """
    config = _read_json(folder / CONFIG)
    if config.get("quantization_config") is None and (folder / MODELOPT).exists():
        config["quantization_config"] = from_modelopt(_read_json(folder / MODELOPT))
    generation = folder / GENERATION
    config["generation_config"] = _read_json(generation) if generation.exists() else {}
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON", why=str(error), next="download the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is a JSON {type(content).__name__}", why="it must be an object")
    return content


def _architecture(fields: JsonFields) -> str:
    names = fields.optional_texts("architectures") or []
    for name in names:
        if name in FAMILIES:
            return name
    raise UnsupportedArchitecture(
        f"{fields.file} has architectures={names}, none of which is supported", held=f"supported are: {', '.join(FAMILIES)}",
        next="use a checkpoint of one of these families",
    )  # fmt: skip


def _refuse_unsupported(fields: JsonFields) -> None:
    """Raise ModelError for fields whose values are not supported."""
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{fields.file} has hidden_act={activation!r}", why="only 'silu' is supported")


def _head_dim(fields: JsonFields, heads: int, family: Family) -> int:
    hidden = fields.count("hidden_size")
    if fields.values.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ModelError(
            f"{fields.file}: num_attention_heads={heads} does not divide hidden_size={hidden}", why="there is no head_dim either",
        )  # fmt: skip
    head_dim = fields.count("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise ModelError(f"{fields.file} gives head_dim={head_dim}, which is odd", why="RoPE rotates pairs of values")
    return head_dim


def _with_rope(fields: JsonFields, family: Family) -> JsonFields:
    """The fields with the family's YaRN where they say nothing of RoPE's scaling."""
    if family.yarn is None or any(fields.values.get(name) is not None for name in ("rope_parameters", "rope_scaling")):
        return fields
    factor, original = family.yarn
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, "truncate": False}
    return JsonFields({**fields.values, "rope_scaling": scaling}, fields.file)


def _windows(fields: JsonFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    no_windows: tuple[int | None, ...] = (None,) * num_layers
    if family.window == "none" or (family.window == "stated" and fields.values.get("sliding_window") is None):
        return no_windows
    # In the reference implementations, a missing sliding_window is 4096 (128 in gpt-oss), and null means no window.
    default = 128 if family.window == "alternating" else 4096
    size = fields.count("sliding_window", default) if fields.values.get("sliding_window", default) is not None else None
    if family.window in ("all", "stated"):
        return (size,) * num_layers
    kinds = fields.optional_texts("layer_types")
    if family.window == "alternating":
        chosen = tuple(("sliding", "full")[layer % 2] + "_attention" for layer in range(num_layers)) if kinds is None else kinds
        return _by_kind(fields, chosen, size, num_layers)
    if size is None or not fields.flag("use_sliding_window", False):
        return no_windows
    if family.window == "used":
        return (size,) * num_layers
    if kinds is None:
        first = int(fields.number("max_window_layers", 28))
        return tuple(size if layer >= first else None for layer in range(num_layers))
    return _by_kind(fields, kinds, size, num_layers)


def _by_kind(fields: JsonFields, kinds: Sequence[str], size: int | None, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window by its layer_types."""
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != num_layers:
        raise ModelError(
            f"{fields.file} has {len(kinds)} layer_types" + (f" with {', '.join(unknown)}" if unknown else ""),
            why=f"there must be num_hidden_layers={num_layers}, each sliding_attention or full_attention",
        )  # fmt: skip
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _dtype(fields: JsonFields, default: str) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", default)).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"{fields.file} has dtype={name!r}", held=f"supported are: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _eos(fields: JsonFields, vocab_size: int) -> tuple[int, ...]:
    generation = JsonFields(fields.optional_mapping("generation_config") or {}, file=GENERATION)
    ids = tuple(dict.fromkeys(generation.ids("eos_token_id") + fields.ids("eos_token_id")))
    return known_eos_ids(ids, vocab_size, f"{GENERATION} or {fields.file}")


def known_eos_ids(eos_token_ids: Iterable[int], vocab_size: int, source: str) -> tuple[int, ...]:
    """The ids that a model with so many tokens can sample. The others are dropped, with a warning that names `source`: every
    request that lists one as a stop token would be rejected."""
    ids = tuple(eos_token_ids)
    unknown = [token for token in ids if not 0 <= token < vocab_size]
    if unknown:
        log.warning("eos ids %s of %s are dropped: the model has tokens 0..%d", unknown, source, vocab_size - 1)
    return tuple(token for token in ids if token not in unknown)

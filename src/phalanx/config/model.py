# SPDX-License-Identifier: Apache-2.0
"""The sizes and traits of a model, as its config.json gives them: `ModelShape`. No weights, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.config.dtypes import DTYPE_SPELLINGS
from phalanx.config.experts import SHARED_WIDTH, Experts
from phalanx.config.families import FAMILIES, NO_MULTIPLIERS, Family, Multipliers, Norms, model_type
from phalanx.config.gated_delta import GatedDelta
from phalanx.config.gemma4 import HeadSizes, LayerInputs, SharedKv
from phalanx.config.generation import FIELDS as GENERATION_FIELDS
from phalanx.config.generation import GENERATION, read_sampling_defaults
from phalanx.config.json_fields import JsonFields
from phalanx.config.latent import Indexer, Latent
from phalanx.config.mamba import Block, Mamba2
from phalanx.config.mistral_format import PARAMS, as_config
from phalanx.config.model_fields import MODEL
from phalanx.config.quantization import Quantization
from phalanx.config.quantization_config import from_modelopt, read_quantization
from phalanx.config.rope import (
    BY_TYPE,
    CHUNKED,
    FULL,
    NOPE,
    PROPORTIONAL,
    ROPE_TYPES,
    SLIDING,
    Rope,
    RopeDefaults,
    Temperature,
    read_rope,
    read_ropes_by_type,
)
from phalanx.config.text_tower import PREFIXES, TEXT, WRAPPERS, text_config
from phalanx.errors import ModelError, UnsupportedArchitecture
from phalanx.log import get_logger

log = get_logger(__name__)

CONFIG, MODELOPT = "config.json", "hf_quant_config.json"


_FIXED = ("sinks", "qk_norm_whole", "qk_norm_plain", "v_norm", "norms", "norm_offset", "layer_norm", "activation")
"""Traits that no file states, by their names in `Family` and `ModelShape`."""
_READ = ("gated_delta", "mamba", "blocks", "full_heads", "layer_inputs", "shared_kv")
"""Traits of fields, likewise; in `Family` is what reads them."""


class LayerRotary(NamedTuple):
    """RoPE of a layer: of a head's `head_dim` elements (of its rotated part with latent attention) it rotates `rotated`. Kernels
    rotate all, some of them by nothing."""

    rope: Rope
    rotated: int
    head_dim: int


@dataclass(frozen=True)
class ModelShape:
    """One model's sizes and traits. Lengths in tokens; `dtype` is the checkpoint's: "fp32", "fp16" or "bf16".

    windows: per layer, the number of tokens that a query attends to, itself included; None: all before it. eos_token_ids: those
    of generation_config.json first, then those of config.json. sampling_defaults: see `generation`. sinks: see `Family`. latent: of
    models with latent attention, whose head_dim is that of queries and keys. mtp_layers: multi-token prediction layers, which a
    checkpoint may have behind the last layer, and which are not loaded. wrapper: the multimodal architecture of which the model is
    the text tower (`text_tower.WRAPPERS`). layer_ropes: of each layer, where they differ from `rope`. multipliers: see
    `Multipliers`. qk_norm: queries and keys are normed before RoPE, each head alone or, with qk_norm_whole, all heads of a token as
    one vector; with qk_norm_plain the heads that are rotated, without weights. chunks: per layer, the tokens of a run, of
    which a query sees its own alone (Llama-4); None: it sees all before it. v_norm: values are normed, each head alone, without
    weights. full_heads: sizes of the layers without a window, where they differ. layer_inputs: see `LayerInputs`. shared_kv: see
    `SharedKv`. norms, norm_offset, layer_norm, activation: see `Family`. gated_delta: of models with layers of the gated delta
    rule, whose attention has a gate of its output. mamba: of models with layers of Mamba-2. blocks: the only one of each layer;
    none: each has two, attention, or what stands for it, and a feed-forward block.
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
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: tuple[tuple[str, int | float], ...] = ()
    sinks: bool = False
    latent: Latent | None = None
    mtp_layers: int = 0
    wrapper: str | None = None
    layer_ropes: tuple[Rope, ...] = ()
    multipliers: Multipliers = NO_MULTIPLIERS
    qk_norm_whole: bool = False
    qk_norm_plain: bool = False
    chunks: tuple[int | None, ...] = ()
    norms: Norms = "before"
    norm_offset: bool = False
    layer_norm: bool = False
    activation: str = "silu"
    v_norm: bool = False
    full_heads: HeadSizes | None = None
    layer_inputs: LayerInputs | None = None
    shared_kv: SharedKv | None = None
    gated_delta: GatedDelta | None = None
    mamba: Mamba2 | None = None
    blocks: tuple[Block, ...] = ()

    @property
    def recurrent(self) -> GatedDelta | Mamba2 | None:
        """The layers that keep a state of one size for each request."""
        return self.gated_delta or self.mamba

    def rope_in(self, layer: int) -> Rope:
        """RoPE of a layer."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def heads_in(self, layer: int) -> HeadSizes:
        """Sizes of a layer's keys and values."""
        of_window = self.full_heads is None or self.windows[layer] is not None
        sizes = HeadSizes(self.num_kv_heads, self.head_dim) if of_window else self.full_heads
        assert sizes is not None
        return sizes._replace(shared=self.kv_layer(layer) != layer)

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to: itself, unless it shares those of an earlier one."""
        first = self.num_layers - (0 if self.shared_kv is None else self.shared_kv.layers)
        if layer < first:
            return layer
        return max(each for each in range(first) if self.windows[each] == self.windows[layer])

    def intermediate_in(self, layer: int) -> int:
        """Width of a layer's MLP."""
        factor = 1 if self.shared_kv is None or self.kv_layer(layer) == layer else self.shared_kv.mlp_factor
        return factor * self.intermediate_size

    def may_begin_stage(self, layer: int) -> bool:
        """Whether a pipeline stage may begin with a layer: no layer from it on needs what one before it has in memory."""
        if self.latent is not None and not self.latent.may_begin_stage(layer):
            return False
        return all(self.kv_layer(each) >= layer for each in range(layer, self.num_layers))

    @property
    def indexer(self) -> Indexer | None:
        """What chooses the tokens that a query attends to; None: all."""
        return None if self.latent is None else self.latent.indexer

    @property
    def mean_head_dim(self) -> float:
        """Over the layers."""
        return sum(self.heads_in(layer).head_dim for layer in range(self.num_layers)) / self.num_layers

    @property
    def is_capped(self) -> bool:
        """Whether scores have a soft cap."""
        return self.multipliers.attention_cap is not None

    @property
    def attends_by_torch(self) -> bool:
        """Whether torch alone computes its attention, also on GPUs: inside of chunks, and where heads are of several sizes."""
        return any(self.chunks) or self.full_heads is not None

    def rotary_in(self, layer: int) -> LayerRotary:
        """RoPE of a layer, and what it rotates."""
        rope, head_dim = self.rope_in(layer), self.heads_in(layer).head_dim
        if self.latent is not None:
            return LayerRotary(rope, self.latent.rope, self.latent.rope)
        return LayerRotary(rope, head_dim if rope.kind == PROPORTIONAL else int(head_dim * rope.portion), head_dim)

    def within(self, max_seq_len: int) -> ModelShape:
        """The model for contexts of up to max_seq_len tokens: see `Rope.within`."""
        layer_ropes = tuple(rope.within(max_seq_len) for rope in self.layer_ropes)
        return replace(self, rope=self.rope.within(max_seq_len), layer_ropes=layer_ropes)

    def with_drafts(self, drafts: int) -> ModelShape:
        """The model where a row of a step verifies up to so many drafts."""
        gated, mamba = self.gated_delta, self.mamba
        return replace(
            self, gated_delta=None if gated is None else replace(gated, drafts=drafts),
            mamba=None if mamba is None else replace(mamba, drafts=drafts),
        )  # fmt: skip

    def experts_in(self, layer: int) -> Experts | None:
        """The experts of a layer; None where its MLP is dense."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @classmethod
    def from_folder(cls, folder: Path, *, quiet: bool = False) -> ModelShape:
        """Read the folder of a checkpoint. Raises as `load_config` and `from_config`."""
        return cls.from_config(load_config(folder), file=str(config_file(folder)), quiet=quiet)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, file: str = CONFIG, quiet: bool = False) -> ModelShape:
        """Build the shape from the result of `load_config`, in either spelling of transformers: `dtype` and `rope_parameters`
        (version 5 and later), or `torch_dtype`, `rope_theta` and `rope_scaling` (before).

        A field that is in none of the tables (`model_fields`) is named by a warning; quiet: another process has logged it. Raises
        UnsupportedArchitecture, or ModelError naming file and field.
        """
        fields = JsonFields(config, file=file)
        architecture, wrapper = _architecture(fields), None
        if architecture in WRAPPERS:
            config, wrapper = text_config(fields, architecture), architecture
            fields = JsonFields(config, file=f"{TEXT} of {file}", additions=fields.additions)
            architecture = _architecture(fields)
        family, fields = FAMILIES[architecture], _with_layers(fields.sorted_by(MODEL[architecture]), FAMILIES[architecture])
        _check_model_type(fields, architecture)
        heads, kv_heads = _heads(fields, family)
        num_layers = fields.count("num_hidden_layers")
        max_positions = fields.count("max_position_embeddings", family.max_positions)
        head_dim = _head_dim(fields, heads, family) if family.latent is None else 0
        nope_layers = _nope_layers(fields, family, num_layers)
        windows = _windows(fields, family, num_layers, nope_layers)
        rope, layer_ropes = _ropes(fields, family, max_positions, head_dim, nope_layers, windows)
        experts = None if family.experts is None else family.experts(fields)
        latent = None if family.latent is None else family.latent(fields, rope)
        vocab_size, generation = fields.count("vocab_size"), _generation(fields)
        shape = cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=fields.count("hidden_size"),
            intermediate_size=_intermediate_size(fields, experts),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim if latent is None else latent.nope + latent.rope,
            max_positions=rope.extended(max_positions) if family.window_theta is None else max_positions,
            rms_norm_eps=fields.positive(family.eps_field, family.rms_norm_eps),
            rope=rope,
            windows=windows,
            chunks=_chunks(fields, num_layers, nope_layers),
            qkv_bias=family.qkv_bias or _has_bias(fields, family, family.input_bias),
            output_bias=_has_bias(fields, family, family.output_bias),
            mlp_bias=_has_bias(fields, family, family.mlp_bias),
            qk_norm=family.qk_norm or (fields.reads("use_qk_norm") and fields.flag("use_qk_norm", family.qk_norm_plain)),
            tie_word_embeddings=fields.flag("tie_word_embeddings", family.tied),
            experts=experts,
            quantization=_quantization(fields, family, wrapper, stacked_experts=experts is not None and experts.biases),
            dtype=_dtype(fields, family.dtype),
            eos_token_ids=_eos(fields, generation, vocab_size, quiet),
            sampling_defaults=tuple(read_sampling_defaults(generation, config).items()),
            latent=latent,
            mtp_layers=_mtp_layers(fields, family),
            wrapper=wrapper,
            layer_ropes=layer_ropes,
            multipliers=NO_MULTIPLIERS if family.multipliers is None else family.multipliers(fields),
            **{name: getattr(family, name)(fields) for name in _READ if getattr(family, name) is not None},
            **{name: getattr(family, name) for name in _FIXED},
        )
        if not quiet:
            _log(shape, fields, file)
        return shape


def _log(shape: ModelShape, fields: JsonFields, file: str) -> None:
    if shape.wrapper is not None:
        log.info("%s: of %s the text model (%s) is served, and no images", file, shape.wrapper, shape.architecture)
    if fields.additions:
        log.warning("%s: Phalanx knows nothing of %s: not used", file, ", ".join(fields.additions))


def load_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a folder; or params.json, where that alone is there (`mistral_format`).

    The content of generation_config.json, if there is one, is added as "generation_config"; that of hf_quant_config.json as
    "quantization_config" if config.json has none. Raises ModelError if config.json is missing, or any of them is not a JSON object.
    """
    file = config_file(folder)
    config = _read_json(file) if file.name == CONFIG else as_config(_read_json(file), str(file))
    if not config.get("quantization_config") and (folder / MODELOPT).exists():
        config["quantization_config"] = from_modelopt(_read_json(folder / MODELOPT))
    generation = folder / GENERATION
    config["generation_config"] = _read_json(generation) if generation.exists() else {}
    return config


def config_file(folder: Path) -> Path:
    """config.json of a folder; params.json where that alone is there."""
    return next((path for path in (folder / CONFIG, folder / PARAMS) if path.exists()), folder / CONFIG)


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
        if name in FAMILIES or name in WRAPPERS:
            return name
    failure = f"{fields.file} has architectures={names}, none of which is supported"
    if any(name.endswith("ForSequenceClassification") for name in names):
        raise UnsupportedArchitecture(
            failure, why="heads that classify are not computed",
            next="use the checkpoint that it was made from; Qwen/Qwen3-Reranker, which answers yes or no, has the same scores",
        )  # fmt: skip
    raise UnsupportedArchitecture(
        failure, held=f"supported are: {', '.join([*FAMILIES, *WRAPPERS])}", next="use a checkpoint of one of these families"
    )


def _check_model_type(fields: JsonFields, architecture: str) -> None:
    """Raise ModelError for a model_type of another family."""
    kind = fields.text("model_type", model_type(architecture))
    if kind in map(model_type, FAMILIES) and kind != model_type(architecture):
        raise ModelError(
            f"{fields.file} has architectures={[architecture]} and model_type={kind!r}",
            why="transformers goes by model_type, and the two are different models", next="correct the one that is wrong",
        )  # fmt: skip
    if kind not in (model_type(architecture), *FAMILIES[architecture].model_types):
        fields.additions.append(f"model_type={kind!r}")


def _with_layers(fields: JsonFields, family: Family) -> JsonFields:
    """The fields with the number of layers, which a file that has a block for each need not state."""
    if family.blocks is None:
        return fields
    return replace(fields, values={**fields.values, "num_hidden_layers": len(family.blocks(fields))})


def _quantization(fields: JsonFields, family: Family, wrapper: str | None, *, stacked_experts: bool) -> Quantization | None:
    quantization = read_quantization(fields, stacked_experts=stacked_experts)
    prefixes = family.prefixes
    if wrapper is not None:
        prefixes += tuple(prefix for prefix, own in PREFIXES.items() if own == "model.")
    if quantization is None or not prefixes:
        return quantization
    others = tuple(replace(group, prefixes=prefixes) for group in quantization.others)
    return replace(quantization, prefixes=prefixes, others=others)


def _intermediate_size(fields: JsonFields, experts: Experts | None) -> int:
    """Of the dense layers. A file of a family without any need not state it. Granite 4's MLP is what its experts share, or all."""
    if fields.reads("intermediate_size_mlp"):
        return fields.count("intermediate_size_mlp", 16384)
    if experts is None and fields.reads("shared_intermediate_size"):
        return fields.count("shared_intermediate_size", SHARED_WIDTH)
    if experts is None or experts.dense_layers or fields.value("intermediate_size") is not None:
        return fields.count("intermediate_size")
    return experts.intermediate


def _generation(fields: JsonFields) -> JsonFields:
    values = fields.optional_mapping("generation_config") or {}
    return JsonFields(values, GENERATION, f"{GENERATION}: ", additions=fields.additions).sorted_by(GENERATION_FIELDS)


def _heads(fields: JsonFields, family: Family) -> tuple[int, int]:
    """Query heads and KV heads."""
    heads = fields.count("num_attention_heads")
    # null means one for each head; a file without the field means the default of the reference implementation.
    stated = "num_key_value_heads" in fields.values
    kv_heads = fields.count("num_key_value_heads", heads if stated else family.kv_heads or heads)
    if heads % kv_heads:
        raise ModelError(
            f"{fields.file}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}",
            why="each KV head must serve the same number of query heads",
        )  # fmt: skip
    return heads, kv_heads


def _head_dim(fields: JsonFields, heads: int, family: Family) -> int:
    hidden = fields.count("hidden_size")
    if fields.value("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ModelError(
            f"{fields.file}: num_attention_heads={heads} does not divide hidden_size={hidden}", why="there is no head_dim either",
        )  # fmt: skip
    # null means hidden_size / num_attention_heads; a file without the field means the default of the reference implementation.
    head_dim = fields.count("head_dim", (None if "head_dim" in fields.values else family.head_dim) or hidden // heads)
    if head_dim % 2:
        raise ModelError(f"{fields.file} gives head_dim={head_dim}, which is odd", why="RoPE rotates pairs of values")
    return head_dim


def _has_bias(fields: JsonFields, family: Family, name: str | None) -> bool:
    """Whether projections have biases by field `name`."""
    default = family.attention_bias and name == "attention_bias"
    return name is not None and fields.reads(name) and fields.flag(name, default)


def _nope_layers(fields: JsonFields, family: Family, num_layers: int) -> tuple[int, ...]:
    """The layers without RoPE: those with 0 in no_rope_layers, which says where there is RoPE."""
    if family.nope_interval is None:
        return ()
    interval, stated = fields.count("no_rope_layer_interval", family.nope_interval), fields.value("no_rope_layers")
    if not stated:
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(stated, list) or len(stated) < num_layers or not all(each in (0, 1) for each in stated):
        raise ModelError(
            f"{fields.file} has no_rope_layers={stated!r}",
            why=f"it must have 1 (RoPE) or 0 (none) for each of num_hidden_layers={num_layers}",
        )  # fmt: skip
    return tuple(layer for layer in range(num_layers) if not stated[layer])


def _windows(fields: JsonFields, family: Family, num_layers: int, nope_layers: tuple[int, ...]) -> tuple[int | None, ...]:
    kind, layers = family.window, range(num_layers)
    size: int | None = None
    default = None if kind == "stated" else family.window_size
    if kind != "none" and fields.values.get("sliding_window", default) is not None:
        size = fields.count("sliding_window", default or 1)
    types = _layer_types(fields, family, num_layers) if kind in ("pattern", "chosen", "unrotated") else None
    if kind in ("used", "chosen", "unrotated") and (size is None or not fields.flag("use_sliding_window", False)):
        size = None
    elif types is not None:
        return tuple(size if each == SLIDING else None for each in types)
    elif kind == "unrotated":
        return tuple(size if layer in nope_layers else None for layer in layers)
    elif kind == "chosen":
        first = int(fields.number("max_window_layers", 28))
        return tuple(size if layer >= first else None for layer in layers)
    return (size,) * num_layers


def _chunks(fields: JsonFields, num_layers: int, nope_layers: tuple[int, ...]) -> tuple[int | None, ...]:
    """Of the layers with RoPE, or by layer_types."""
    name = "attention_chunk_size"
    if not fields.reads(name):
        return ()
    kinds = fields.by_layer("layer_types", (CHUNKED, FULL))
    if fields.values.get(name, 1) is None:
        if kinds is not None and CHUNKED in kinds:
            raise ModelError(f"{fields.file} has {name}=null", why=f"layer_types has layers of {CHUNKED}")
        return ()
    size = fields.count(name, 8192)
    chunked = [layer not in nope_layers for layer in range(num_layers)] if kinds is None else [kind == CHUNKED for kind in kinds]
    return tuple(size if each else None for each in chunked)


def _layer_types(fields: JsonFields, family: Family, num_layers: int) -> list[str] | None:
    """Each layer's type, by layer_types or by the family's pattern; None where neither says."""
    pattern, kinds = family.window_pattern, fields.by_layer("layer_types", (SLIDING, FULL))
    if kinds is None and fields.reads("sliding_window_pattern"):
        pattern = fields.count("sliding_window_pattern", pattern)
    if kinds is None and pattern:
        kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    return [*kinds[:-1], FULL] if kinds and family.full_last else kinds


def _ropes(
    fields: JsonFields, family: Family, max_positions: int, head_dim: int, nope_layers: tuple[int, ...],
    windows: tuple[int | None, ...],
) -> tuple[Rope, tuple[Rope, ...]]:  # fmt: skip
    """RoPE of the model, and of each layer where they differ."""
    if family.window_theta is not None:
        kinds = family.rope_types or BY_TYPE
        full = RopeDefaults(family.rope_theta, parameters=family.full_rope, kinds=kinds)
        rope, local = read_ropes_by_type(fields, max_positions, full, family.window_theta)
        if fields.values.get("sliding_window", family.window_size) is None:
            raise ModelError(f"{fields.file} has sliding_window=null", why="the layers with a window have a RoPE of their own")
        return rope, tuple(rope if window is None else local for window in windows)
    portion = family.rotary_portion
    if fields.reads("rotary_dim"):
        portion = fields.count("rotary_dim", head_dim) / head_dim
    defaults = RopeDefaults(
        family.rope_theta, portion, family.yarn, family.original_positions, family.rope_types or ROPE_TYPES, family.temperature
    )  # fmt: skip
    neighbours = family.latent is None and fields.reads("rope_interleave") and fields.flag("rope_interleave", False)
    rope = replace(read_rope(fields, max_positions, defaults, head_dim), interleaved=family.interleaved or neighbours)
    has_size = fields.values.get("sliding_window", family.window_size) is not None
    if family.nope_full is True or (family.nope_full == "with size" and has_size) or not _has_rope(fields):
        nope_layers = tuple(layer for layer, window in enumerate(windows) if window is None)
    nope = NOPE
    if fields.reads("attn_temperature_tuning") and fields.value("attn_temperature_tuning") not in (False, 0):
        beta, interval = fields.positive("attn_scale", 0.1), fields.count("floor_scale", 8192)
        nope = replace(NOPE, temperature=Temperature(beta, interval, shift=1))
    if len(nope_layers) == len(windows):
        return nope, ()
    return rope, tuple(nope if layer in nope_layers else rope for layer in range(len(windows))) if nope_layers else ()


def _has_rope(fields: JsonFields) -> bool:
    """Whether any layer has RoPE, by position_embedding_type where the family reads that."""
    if not fields.reads("position_embedding_type"):
        return True
    kind = fields.text("position_embedding_type", "nope")
    if kind not in ("nope", "rope"):
        raise ModelError(f"{fields.file} has position_embedding_type={kind!r}", held="supported are: nope, rope")
    return kind == "rope"


def _dtype(fields: JsonFields, default: str) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", default))
    known = DTYPE_SPELLINGS.get(name.removeprefix("torch."))
    if known is None:
        raise ModelError(f"{fields.file} has dtype={name!r}", held=f"supported are: {', '.join(DTYPE_SPELLINGS)}")
    return known


def _mtp_layers(fields: JsonFields, family: Family) -> int:
    names = [name for name in ("num_nextn_predict_layers", "num_mtp_layers") if fields.reads(name)]
    return int(fields.number(fields.either(*names), family.mtp_layers)) if names else 0


def _eos(fields: JsonFields, generation: JsonFields, vocab_size: int, quiet: bool) -> tuple[int, ...]:
    ids = tuple(dict.fromkeys(generation.ids("eos_token_id") + fields.ids("eos_token_id")))
    return known_eos_ids(ids, vocab_size, None if quiet else f"{GENERATION} or {fields.file}")


def known_eos_ids(eos_token_ids: Iterable[int], vocab_size: int, source: str | None) -> tuple[int, ...]:
    """The ids that a model with so many tokens can sample. The others are dropped, with a warning that names `source`, if there is
    one: every request that lists one as a stop token would be rejected."""
    ids = tuple(eos_token_ids)
    unknown = [token for token in ids if not 0 <= token < vocab_size]
    if unknown and source is not None:
        log.warning("eos ids %s of %s are dropped: the model has tokens 0..%d", unknown, source, vocab_size - 1)
    return tuple(token for token in ids if token not in unknown)

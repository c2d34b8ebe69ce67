# SPDX-License-Identifier: Apache-2.0
"""The quantization that a checkpoint's files declare, as a `Quantization`. No torch.

FP8 is read as ModelOpt (hf_quant_config.json, or the same in config.json), compressed-tensors and "fp8" declare it (block-scaled as
in DeepSeek's checkpoints, or one scale per tensor); NVFP4 as the first two do; 4-bit integers as compressed-tensors, AWQ and GPTQ
do; experts in MXFP4 as gpt-oss does.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from phalanx.config.json_fields import FieldTable, JsonFields
from phalanx.config.quantization import GROUP_UNIT, MXFP4, Activations, Int4, Quantization, Weights
from phalanx.errors import ModelError

SUPPORTED = (
    "supported are: modelopt (quant_algo FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, W4A16_NVFP4, or MIXED_PRECISION of these), "
    "compressed-tensors (format float-quantized: 8-bit float weights per tensor, channel or block; activations none, dynamic, or "
    "static per tensor; format pack-quantized: integer weights of 4 or 8 bits per group or channel; formats nvfp4-pack-quantized "
    "and mxfp4-pack-quantized; format int-quantized: 8-bit integers, symmetric, of weights per tensor or channel and of "
    "activations), fp8 (weight_block_size, or one scale per tensor), awq (version gemm, 4 bit), gptq (4 or 8 bit), mxfp4 (the "
    "experts of gpt-oss)"
)

TABLES = {
    "modelopt": FieldTable.of(
        "quant_method quant_algo kv_cache_quant_algo kv_cache_scheme exclude_modules ignore producer quantization quantized_layers"
        " group_size",
        "config_groups version format",
        {"has_zero_point": (False,), "pre_quant_scale": (False,)},
    ),
    "compressed-tensors": FieldTable.of(
        "quant_method format config_groups ignore kv_cache_scheme sparsity_config",
        "quantization_status global_compression_ratio version producer provider",
        {"transform_config": ({},)},
    ),
    "fp8": FieldTable.of(
        "quant_method activation_scheme fmt modules_to_not_convert ignored_layers kv_cache_scheme weight_block_size",
        "dequantize scale_fmt producer provider",
        {"modules_to_convert": ([],), "expert_dtype": ("fp8",), "is_checkpoint_fp8_serialized": (True,)},
    ),
    "awq": FieldTable.of(
        "quant_method bits w_bit group_size q_group_size zero_point version modules_to_not_convert",
        "backend do_fuse fuse_max_seq_len exllama_config format checkpoint_format",
        {"modules_to_fuse": ({},), "desc_act": (False,)},
    ),
    "gptq": FieldTable.of(
        "quant_method bits group_size sym desc_act dynamic checkpoint_format format lm_head",
        "damp_percent static_groups true_sequential meta model_name_or_path model_file_base_name quantizer backend dataset"
        " tokenizer exllama_config use_exllama disable_exllama max_input_length cache_block_outputs model_seqlen use_cuda_fp16"
        " batch_size pad_token_id block_name_to_quantize module_name_preceding_first_block act_group_aware mse adapter pack_impl"
        " damp_auto_increment offload_to_disk offload_to_disk_path gptaq",
        {"is_marlin_format": (False,), "pack_dtype": ("int32",), "modules_in_block_to_quantize": ()},
    ),
    "mxfp4": FieldTable.of("quant_method", "modules_to_not_convert dequantize swizzle"),
}
"""Of quantization_config, by quant_method. scale_fmt says how scales are stored, which the file itself shows."""

_MODELOPT: dict[str, tuple[Weights, Activations]] = {
    "FP8": ("tensor", "static"), "FP8_PER_CHANNEL_PER_TOKEN": ("channel", "token"), "NVFP4": ("nvfp4", "none"),
    "W4A16_NVFP4": ("nvfp4", "none"),
}  # fmt: skip
"""quant_algo -> weights and activations. NVFP4 is run with activations in 16 bit."""
_BITS = "integer weights with activations in 16 bit are read in 4 and 8 bits"
_HEAD: tuple[str, ...] = (r"lm_head\Z",)
"""What the tools of AWQ, and of GPTQ and FP8 where nothing is said of it, leave in 16 bit."""
_GROUP_FORMATS = ("float-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "int-quantized")
_GROUP = FieldTable.of("targets weights input_activations format", "", {"output_activations": ()})
_SCHEME = FieldTable.of(
    "type num_bits symmetric strategy dynamic block_structure", "observer observer_kwargs zp_dtype scale_dtype",
    {"group_size": (), "actorder": (False,)},
)  # fmt: skip
_GROUPED_SCHEME = FieldTable.of(f"{' '.join(_SCHEME.honoured)} group_size", " ".join(_SCHEME.harmless), {"actorder": (False,)})
"""Of activations, which may have a scale for each token and group of columns."""
_MODELOPT_LAYER = FieldTable.of("quant_algo group_size", "", {"has_zero_point": (False,), "pre_quant_scale": (False,)})
_INT4_SCHEME = FieldTable.of(
    "type num_bits symmetric strategy group_size actorder dynamic", "observer observer_kwargs zp_dtype scale_dtype",
    {"block_structure": ()},
)  # fmt: skip


def read_quantization(fields: JsonFields, *, stacked_experts: bool = False) -> Quantization | None:
    """Read quantization_config of config.json (where `load_config` also puts hf_quant_config.json); None if there is none, or an
    empty one. stacked_experts: the family has the experts of a layer in one tensor, as MXFP4 is read.

    Raises ModelError naming the field, and what is supported, for any other quantization.
    """
    values = fields.optional_mapping("quantization_config")
    if not values:
        return None
    config = fields.inner("quantization_config", _flat(fields.file, values))
    method = config.text("quant_method", _producer(config)).lower()
    if method not in READERS or (method == "mxfp4" and not stacked_experts):
        raise _unsupported(config, "quant_method")
    return READERS[method](config.sorted_by(TABLES[method]))


def _flat(file: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """ModelOpt has its fields in an object "quantization", or beside it. Raises ModelError where the two differ."""
    nested = values.get("quantization")
    if not isinstance(nested, Mapping):
        return values
    for name in values.keys() & nested.keys():
        if None not in (values[name], nested[name]) and values[name] != nested[name]:
            raise ModelError(
                f"{file} has two values of quantization_config.{name}: {values[name]!r}, and {nested[name]!r} in its quantization",
                next="correct the file: keep the one that the weights were made with",
            )  # fmt: skip
    return {**values, **{name: value for name, value in nested.items() if value is not None or name not in values}}


def _producer(config: JsonFields) -> str:
    """The method of a file that states none: that of the tool that wrote it."""
    producer = config.optional_mapping("producer") or {}
    return "modelopt" if str(producer.get("name", "")).lower() == "modelopt" else ""


def _unsupported(config: JsonFields, name: str, why: str = "") -> ModelError:
    return ModelError(
        f"{config.file} has {config.prefix}{name}={config.values.get(name)!r}, which is not supported", held=SUPPORTED, why=why,
        next="use the model's checkpoint in AWQ, GPTQ, compressed-tensors, NVFP4 or FP8, or the 16-bit one with dtype='fp8' or"
        " dtype='int4'",
    )  # fmt: skip


def _modelopt(config: JsonFields) -> Quantization:
    cache = config.text("kv_cache_quant_algo", "").upper()
    if cache not in ("", "FP8"):
        raise _unsupported(config, "kv_cache_quant_algo", "a KV cache is in 16 bit or FP8")
    excluded = [name for each in ("exclude_modules", "ignore") for name in config.optional_texts(each) or []]
    # As ModelOpt's readers have it: a pattern is of a whole name, or of one of its parts.
    ignore = tuple(expression for name in excluded for expression in (fnmatch.translate(name), _of_a_part(name)))
    plain = Quantization("modelopt", "tensor", "static", kv=cache == "FP8" or _kv_scheme(config), ignore=ignore)
    if config.text("quant_algo", "").upper() != "MIXED_PRECISION":
        return _of_algorithm(config, plain)
    names: dict[Quantization, list[str]] = {}
    for name, fields in (config.optional_mapping("quantized_layers") or {}).items():
        own = config.inner(f"quantized_layers.{name}", _mapping(config, "quantized_layers", fields)).sorted_by(_MODELOPT_LAYER)
        names.setdefault(_of_algorithm(own, plain), []).append(name)
    if not names:
        raise _unsupported(config, "quantized_layers", "with MIXED_PRECISION it names the layers and their algorithms")
    first, *others = (replace(scheme, names=frozenset(own)) for scheme, own in names.items())
    return replace(first, others=tuple(others))


def _of_algorithm(config: JsonFields, plain: Quantization) -> Quantization:
    """plain, with the weights and activations of ModelOpt's quant_algo."""
    algorithm = config.text("quant_algo", "").upper()
    if algorithm not in _MODELOPT:
        raise _unsupported(config, "quant_algo")
    weights, activations = _MODELOPT[algorithm]
    size = config.value("group_size")
    if size is not None and (weights != "nvfp4" or size != 16):
        raise _unsupported(config, "group_size", "groups are of 16 columns, in NVFP4")
    return replace(plain, weights=weights, activations=activations)


def _of_a_part(pattern: str) -> str:
    """A regular expression for names of which a part, between two dots, matches a pattern with "*"."""
    part = re.escape(pattern).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
    return rf"(.*\.)?{part}(\..*)?\Z"


def _fp8(config: JsonFields) -> Quantization:
    scheme = config.text("activation_scheme", "dynamic").lower()
    if scheme not in ("dynamic", "static"):
        raise _unsupported(config, "activation_scheme")
    if config.text("fmt", "e4m3").lower() not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(config, "fmt", "only e4m3 is supported")
    lists = ("modules_to_not_convert", "ignored_layers")
    ignore = tuple(_module(config, each, name) for each in lists for name in config.optional_texts(each) or [])
    ignore += _HEAD
    kv = _kv_scheme(config)
    if config.value("weight_block_size") is None:
        activations: Activations = "static" if scheme == "static" else "token"
        return Quantization("fp8", "tensor", activations, kv=kv, ignore=ignore)
    if scheme == "static":
        raise _unsupported(config, "activation_scheme", "with weight_block_size it must be dynamic")
    block = _block(config, "weight_block_size")
    return Quantization("fp8", "block", "token", block=block, scale_name="weight_scale_inv", kv=kv, ignore=ignore)


def _module(config: JsonFields, field: str, name: str) -> str:
    """A regular expression for a module and all in it, which a skip-list names by a run of its name's parts ("mlp.gate"), with "*"
    for any characters, or, as transformers reads it, by a regular expression for its beginning."""
    if not set(name) & set("\\^$+|()[]{}?"):
        return rf"(.*\.)?{re.escape(name).replace(re.escape('*'), '.*')}(\..*)?\Z"
    return _regex(config, field, rf"(?:{name})((?<=\.)|(?=\.|\Z))")


def _regex(config: JsonFields, field: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise _unsupported(config, field, f"{pattern!r} is no regular expression: {error}") from None
    return pattern


def _block(config: JsonFields, name: str) -> tuple[int, int]:
    sizes = config.value(name)
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes)):
        raise _unsupported(config, name, "it must be two sizes, rows and columns")
    return sizes[0], sizes[1]


def _compressed_tensors(config: JsonFields) -> Quantization:
    default = config.text("format", "")
    if default not in (*_GROUP_FORMATS, "mixed-precision"):
        raise _unsupported(config, "format")
    if (config.optional_mapping("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _unsupported(config, "sparsity_config", "weights must be dense")
    groups = config.optional_mapping("config_groups")
    if not groups:
        raise _unsupported(config, "config_groups", "it must name at least one group")
    # As in targets, "Linear" is the class of all.
    ignore = tuple("" if name == "Linear" else _pattern(config, "ignore", name) for name in config.optional_texts("ignore") or [])
    plain = Quantization("compressed-tensors", "tensor", "none", kv=_kv_scheme(config), ignore=ignore)
    targets: dict[Quantization, list[str]] = {}
    for name in groups:
        group = config.inner(f"config_groups.{name}", _mapping(config, "config_groups", groups[name])).sorted_by(_GROUP)
        targets.setdefault(_scheme(group, default, plain), []).extend(group.optional_texts("targets") or [])
    if len(targets) > 1 and not all(targets.values()):
        raise _unsupported(config, "config_groups", "of several groups, each must have targets")
    ranked: list[tuple[int, Quantization]] = []
    for scheme, names in targets.items():
        if len(targets) == 1 or "Linear" in names:
            patterns = () if "Linear" in names else tuple(_pattern(config, "config_groups", target) for target in names)
            ranked.append((2, replace(scheme, targets=patterns)))
        for rank, is_regex in enumerate((False, True)):
            chosen = [name for name in names if name != "Linear" and name.startswith("re:") == is_regex]
            if chosen and len(targets) > 1:
                patterns = tuple(_pattern(config, "config_groups", target) for target in chosen)
                ranked.append((rank, replace(scheme, targets=patterns)))
    # A layer is of the group that names it, else of one with a pattern for it, else of that for all linear layers.
    first, *others = (scheme for _, scheme in sorted(ranked, key=lambda each: each[0]))
    return replace(first, others=tuple(others))


def _scheme(group: JsonFields, default: str, plain: Quantization) -> Quantization:
    """plain, with the scheme of one of config_groups. default: the format of groups that state none."""
    form = group.text("format", default)
    if form == "pack-quantized":
        if group.optional_mapping("input_activations") is not None:
            raise _unsupported(group, "input_activations", "with such weights, activations must be in 16 bit")
        return replace(plain, weights="int4", int4=_packed_int4(group))
    if form in _E2M1:
        stored, expected = _E2M1[form]
        for name in ("weights", "input_activations"):
            if name == "weights" or group.optional_mapping(name) is not None:
                _require(_scheme_of(group, name, _INT4_SCHEME), type="float", num_bits=4, symmetric=True, **expected)
        return replace(plain, weights=stored)
    if form not in ("float-quantized", "int-quantized"):
        raise _unsupported(group, "format")
    kind = form.removesuffix("-quantized")
    weights, block = _weights_of(group, kind)
    activations = _activations_of(group, kind, block)
    if kind == "int":
        if activations == "none" or weights == "block":
            name = "input_activations" if activations == "none" else "weights"
            raise _unsupported(group, name, "int8 weights have a scale for each tensor or channel, and activations in int8")
        return replace(plain, weights="int8", activations=activations)
    if weights == "block" and activations == "static":
        raise _unsupported(group, "input_activations", "with block-scaled weights, activations must be dynamic or in 16 bit")
    return replace(plain, weights=weights, block=block, activations=activations)


def _scheme_of(group: JsonFields, name: str, table: FieldTable) -> JsonFields:
    return group.inner(name, group.optional_mapping(name) or {}).sorted_by(table)


_BY_DEFAULT = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
"""As compressed-tensors has it."""
_E2M1: dict[str, tuple[Weights, dict[str, Any]]] = {
    "nvfp4-pack-quantized": ("nvfp4", {"strategy": "tensor_group", "group_size": 16}),
    "mxfp4-pack-quantized": ("mxfp4_packed", {"strategy": "group", "group_size": 32}),
}


def _require(scheme: JsonFields, why: str = "", **expected: Any) -> None:
    """Raise ModelError for the first of these fields that has another value."""
    for name, value in expected.items():
        stated = scheme.values.get(name)
        if (_BY_DEFAULT.get(name, value) if stated is None else stated) != value:
            raise _unsupported(scheme, name, why or f"it must be {value!r} here")


def _packed_int4(group: JsonFields) -> Int4:
    weights = _scheme_of(group, "weights", _INT4_SCHEME)
    bits = weights.value("num_bits")
    _require(weights, _BITS, num_bits=8 if bits in (None, 8) else 4, type="int", dynamic=False)
    size = weights.value("group_size")
    strategy = weights.text("strategy", "tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in ("group", "channel"):
        raise _unsupported(weights, "strategy", "integers have a scale for each group or channel")
    order = weights.value("actorder")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise _unsupported(weights, "actorder")
    columns = 0 if strategy == "channel" else _columns(weights, "group_size")
    by_index = bool(columns) and order in (True, "group", "dynamic")
    return Int4("packed", columns, not weights.flag("symmetric", True), by_index, bits=4 if bits == 4 else 8)


def _awq(config: JsonFields) -> Quantization:
    bits, size = config.either("bits", "w_bit"), config.either("group_size", "q_group_size")
    if config.count(bits, 4) != 4:
        raise _unsupported(config, bits, "AWQ is read in 4 bits")
    if config.text("version", "gemm").lower() != "gemm":
        raise _unsupported(config, "version")
    if not config.flag("zero_point", True):
        raise _unsupported(config, "zero_point", "files of version gemm have zeros")
    # As AutoAWQ and vLLM read it: an entry is any part of a layer's name.
    ignore = tuple(f".*{re.escape(name)}" for name in config.optional_texts("modules_to_not_convert") or []) + _HEAD
    int4 = Int4("awq", _columns(config, size, 128), zeros=True)
    return Quantization("awq", "int4", "none", ignore=ignore, int4=int4)


def _gptq(config: JsonFields) -> Quantization:
    form = config.text(config.either("checkpoint_format", "format"), "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise _unsupported(config, config.either("checkpoint_format", "format"))
    groups, skipped = [], tuple[str, ...]() if config.flag("lm_head", False) else _HEAD
    for pattern, changed in (config.optional_mapping("dynamic") or {}).items():
        expression = _regex(config, "dynamic", pattern.removeprefix("+:").removeprefix("-:"))
        if pattern.startswith("-:"):
            skipped += (expression,)
        else:  # the first pattern that a layer's name begins with counts
            fields = config.inner(f"dynamic.{pattern}", {**config.values, **_mapping(config, "dynamic", changed)})
            inner = _gptq_int4(fields.sorted_by(TABLES["gptq"]), form)
            groups.append(Quantization("gptq", "int4", "none", targets=(expression,), ignore=skipped, int4=inner))
    groups.append(Quantization("gptq", "int4", "none", ignore=skipped, int4=_gptq_int4(config, form)))
    return replace(groups[0], others=tuple(groups[1:]))


def _gptq_int4(config: JsonFields, form: str) -> Int4:
    bits = config.count("bits")
    if bits not in (4, 8):
        raise _unsupported(config, "bits", _BITS)
    columns = _columns(config, "group_size", 128)
    # The zeros of a symmetric file are 8, in whichever form it has them: some say "gptq" and mean "gptq_v2".
    zeros, offset = not config.flag("sym", True), 1 if form == "gptq" else 0
    return Int4("gptq", columns, zeros, bool(columns) and config.flag("desc_act", False), offset if zeros else 0, bits)


def _columns(config: JsonFields, name: str, default: int | None = None) -> int:
    """The columns of a group; 0 for -1, which stands for all of a row."""
    size = default if config.value(name) is None else config.value(name)
    if size == -1:
        return 0
    if not (isinstance(size, int) and size >= GROUP_UNIT and (size in (GROUP_UNIT, 64) or size % 128 == 0)):
        raise _unsupported(config, name, "groups have 32, 64, or a multiple of 128 columns, or all of a row (-1)")
    return size


def _mapping(config: JsonFields, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unsupported(config, name, "each group must be an object")
    return value


def _pattern(config: JsonFields, field: str, name: str) -> str:
    """A regular expression for a layer name of compressed-tensors: a plain name, or "re:" and a pattern for its beginning."""
    return _regex(config, field, name[3:]) if name.startswith("re:") else rf"{re.escape(name)}\Z"


def _weights_of(group: JsonFields, kind: str) -> tuple[Weights, tuple[int, int] | None]:
    weights = _scheme_of(group, "weights", _SCHEME)
    _require(weights, type=kind, num_bits=8, symmetric=True)
    strategy = weights.text("strategy", "tensor")
    if strategy == "block":
        return "block", _block(weights, "block_structure")
    _require(weights, dynamic=False, strategy=strategy if strategy == "channel" else "tensor")
    return ("tensor", None) if strategy == "tensor" else ("channel", None)


def _activations_of(group: JsonFields, kind: str, block: tuple[int, int] | None) -> Activations:
    if group.optional_mapping("input_activations") is None:
        return "none"
    activations = _scheme_of(group, "input_activations", _GROUPED_SCHEME)
    _require(activations, type=kind, num_bits=8, symmetric=True)
    size, columns = activations.value("group_size"), None if block is None else block[1]
    if size != (columns if activations.value("strategy") == "group" else None):
        raise _unsupported(activations, "group_size", f"groups of columns are those of block_structure, {columns}")
    if activations.value("dynamic") is True:
        return "token"
    _require(activations, "static activations must have one scale per tensor", strategy="tensor")
    return "static"


def _kv_scheme(config: JsonFields) -> bool:
    word = config.value("kv_cache_scheme")
    if isinstance(word, str):  # the form of AutoFP8 and Quark, with "fp8", and of ModelOpt
        if word.lower() not in ("static", "fp8"):
            raise _unsupported(config, "kv_cache_scheme", "the scales of a KV cache must be static")
        return True
    if config.optional_mapping("kv_cache_scheme") is None:
        return False
    scheme = _scheme_of(config, "kv_cache_scheme", _SCHEME)
    _require(scheme, "a KV cache is in 16 bit or FP8", type="float", num_bits=8)
    _require(
        scheme,
        "a KV cache must have two static scales per layer, one for keys and one for values",
        strategy="tensor",
        dynamic=False,
    )
    return True


READERS: dict[str, Callable[[JsonFields], Quantization]] = {
    "modelopt": _modelopt, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "awq": _awq, "gptq": _gptq,
    "mxfp4": lambda _: MXFP4,
}  # fmt: skip
"""How quantization_config is read, by quant_method."""


def from_modelopt(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of hf_quant_config.json as a quantization_config."""
    return {"quant_method": "modelopt", **content}

# SPDX-License-Identifier: Apache-2.0
"""The FP8 quantization of a checkpoint's linear layers, as its files declare it: `Quantization`. No torch.

The declarations of three families of tools are supported: ModelOpt (hf_quant_config.json, or the same in config.json),
compressed-tensors, and "fp8" (block-scaled as in DeepSeek's checkpoints, or one scale per tensor).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.config.json_fields import JsonFields
from phalanx.errors import ModelError

SUPPORTED = (
    "supported are: modelopt (quant_algo FP8 or FP8_PER_CHANNEL_PER_TOKEN), compressed-tensors (format float-quantized; 8-bit "
    "float weights per tensor, channel or block; activations none, dynamic, or static per tensor), fp8 (weight_block_size, or one "
    "scale per tensor)"
)

Weights = Literal["load", "tensor", "channel", "block"]
Activations = Literal["none", "token", "static"]


@dataclass(frozen=True)
class Quantization:
    """Linear layers in e4m3: value = stored * scale.

    weights: one scale per "tensor", per output "channel", or per "block" of rows x columns; or "load": the checkpoint is not
    quantized, and gets one scale per output channel while it is loaded. activations: one scale per "token", computed at run time;
    "static": a scale of the checkpoint; "none": activations stay in 16 bit. kv: the checkpoint is meant for an FP8 KV cache; scales
    of the cache are read wherever there are any. targets, ignore: regular expressions of layer names; no targets mean all layers.
    """

    method: str
    weights: Weights
    activations: Activations
    block: tuple[int, int] | None = None
    scale_name: str = "weight_scale"
    kv: bool = False
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def covers(self, layer: str) -> bool:
        """Whether the linear layer of this name ("model.layers.0.mlp.up_proj") is in FP8."""
        if self.targets and not any(re.fullmatch(pattern, layer) for pattern in self.targets):
            return False
        return not any(re.fullmatch(pattern, layer) for pattern in self.ignore)


ON_LOAD = Quantization("fp8 on load", "load", "token")
"""The quantization of a 16-bit checkpoint that is loaded with dtype="fp8"."""


def read_quantization(fields: JsonFields) -> Quantization | None:
    """Read quantization_config of config.json (where `load_config` also puts hf_quant_config.json); None if there is none.

    Raises ModelError naming the field, and what is supported, for any other quantization.
    """
    values = fields.optional_mapping("quantization_config")
    if values is None:
        return None
    config = JsonFields(values, fields.file, "quantization_config.")
    method = config.text("quant_method", "")
    readers = {"modelopt": _modelopt, "compressed-tensors": _compressed_tensors, "fp8": _fp8}
    if method not in readers:
        raise _unsupported(config, "quant_method")
    return readers[method](config)


def _unsupported(config: JsonFields, name: str, why: str = "") -> ModelError:
    return ModelError(
        f"{config.file} has {config.prefix}{name}={config.values.get(name)!r}, which is not supported", held=SUPPORTED, why=why,
        next="use a checkpoint in one of these forms, or the 16-bit one with dtype='fp8'",
    )  # fmt: skip


def _modelopt(config: JsonFields) -> Quantization:
    algorithm = config.text("quant_algo", "")
    kinds: dict[str, tuple[Weights, Activations]] = {"FP8": ("tensor", "static"), "FP8_PER_CHANNEL_PER_TOKEN": ("channel", "token")}
    if algorithm not in kinds:
        raise _unsupported(config, "quant_algo")
    cache = config.values.get("kv_cache_quant_algo")
    if cache not in (None, "FP8"):
        raise _unsupported(config, "kv_cache_quant_algo", "a KV cache is in 16 bit or FP8")
    excluded = config.optional_texts("exclude_modules") or config.optional_texts("ignore") or []
    kv = cache == "FP8" or _kv_scheme(config)
    return Quantization("modelopt", *kinds[algorithm], kv=kv, ignore=tuple(fnmatch.translate(name) for name in excluded))


def _fp8(config: JsonFields) -> Quantization:
    scheme = config.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _unsupported(config, "activation_scheme")
    if config.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(config, "fmt", "only e4m3 is supported")
    skipped = [*(config.optional_texts("modules_to_not_convert") or []), *(config.optional_texts("ignored_layers") or [])]
    ignore = tuple(rf"(.*\.)?{re.escape(name)}(\..*)?" for name in [*skipped, "lm_head"])
    kv = _kv_scheme(config)
    if config.values.get("weight_block_size") is None:
        activations: Activations = "static" if scheme == "static" else "token"
        return Quantization("fp8", "tensor", activations, kv=kv, ignore=ignore)
    if scheme == "static":
        raise _unsupported(config, "activation_scheme", "with weight_block_size it must be dynamic")
    block = _block(config, "weight_block_size")
    return Quantization("fp8", "block", "token", block=block, scale_name="weight_scale_inv", kv=kv, ignore=ignore)


def _block(config: JsonFields, name: str) -> tuple[int, int]:
    sizes = config.values.get(name)
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes)):
        raise _unsupported(config, name, "it must be two sizes, rows and columns")
    return sizes[0], sizes[1]


def _compressed_tensors(config: JsonFields) -> Quantization:
    if config.text("format", "") != "float-quantized":
        raise _unsupported(config, "format")
    groups = config.optional_mapping("config_groups")
    if not groups:
        raise _unsupported(config, "config_groups", "it must name at least one group")
    schemes = []
    targets: list[str] = []
    for name in groups:
        group = JsonFields(_mapping(config, "config_groups", groups[name]), config.file, f"{config.prefix}config_groups.{name}.")
        schemes.append((*_weights_of(group), _activations_of(group)))
        targets += group.optional_texts("targets") or []
    if len(set(schemes)) > 1:
        raise _unsupported(config, "config_groups", "its groups differ from each other")
    weights, block, activations = schemes[0]
    if weights == "block" and activations == "static":
        raise _unsupported(config, "config_groups", "with block-scaled weights, activations must be dynamic or in 16 bit")
    chosen = () if "Linear" in targets else tuple(_pattern(target) for target in targets)
    ignore = tuple(_pattern(name) for name in config.optional_texts("ignore") or [])
    return Quantization(
        "compressed-tensors", weights, activations, block=block, kv=_kv_scheme(config), targets=chosen, ignore=ignore
    )


def _mapping(config: JsonFields, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unsupported(config, name, "each group must be an object")
    return value


def _pattern(name: str) -> str:
    """A regular expression for a layer name of compressed-tensors: a plain name, or "re:" and a pattern for its beginning."""
    return name[3:] + ".*" if name.startswith("re:") else re.escape(name)


def _weights_of(group: JsonFields) -> tuple[Weights, tuple[int, int] | None]:
    values = group.optional_mapping("weights") or {}
    weights = JsonFields(values, group.file, f"{group.prefix}weights.")
    _require_float8(weights)
    strategy = weights.text("strategy", "tensor")
    if strategy == "block":
        return "block", _block(weights, "block_structure")
    if strategy not in ("tensor", "channel") or values.get("dynamic"):
        raise _unsupported(weights, "strategy" if not values.get("dynamic") else "dynamic")
    return ("tensor", None) if strategy == "tensor" else ("channel", None)


def _activations_of(group: JsonFields) -> Activations:
    values = group.optional_mapping("input_activations")
    if values is None:
        return "none"
    activations = JsonFields(values, group.file, f"{group.prefix}input_activations.")
    _require_float8(activations)
    if values.get("dynamic") is True:
        return "token"
    if activations.text("strategy", "tensor") != "tensor":
        raise _unsupported(activations, "strategy", "static activations must have one scale per tensor")
    return "static"


def _require_float8(scheme: JsonFields) -> None:
    for name, expected in (("type", "float"), ("num_bits", 8), ("symmetric", True)):
        if scheme.values.get(name, True if name == "symmetric" else None) != expected:
            raise _unsupported(scheme, name)


def _kv_scheme(config: JsonFields) -> bool:
    word = config.values.get("kv_cache_scheme")
    if isinstance(word, str):  # the form of AutoFP8 and Quark, with "fp8"
        if word != "static":
            raise _unsupported(config, "kv_cache_scheme", "the scales of a KV cache must be static")
        return True
    values = config.optional_mapping("kv_cache_scheme")
    if values is None:
        return False
    scheme = JsonFields(values, config.file, f"{config.prefix}kv_cache_scheme.")
    for name, expected in (("type", "float"), ("num_bits", 8)):
        if scheme.values.get(name) != expected:
            raise _unsupported(scheme, name, "a KV cache is in 16 bit or FP8")
    if scheme.values.get("dynamic") or scheme.text("strategy", "tensor") != "tensor":
        raise _unsupported(scheme, "strategy", "a KV cache must have two static scales per layer, one for keys and one for values")
    return True


def from_modelopt(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of hf_quant_config.json as a quantization_config."""
    values = content.get("quantization")
    return {"quant_method": "modelopt", **(values if isinstance(values, Mapping) else {})}


def require_uniform(quantization: Quantization, layers: Sequence[str]) -> bool:
    """Whether the layers of one fused GEMM are in FP8. Raises ModelError if some are and some are not."""
    covered = [layer for layer in layers if quantization.covers(layer)]
    if covered and len(covered) < len(layers):
        plain = [layer for layer in layers if layer not in covered]
        raise ModelError(
            f"{covered[0]} is in FP8 and {plain[0]} is not", held=f"by the checkpoint's {quantization.method} configuration",
            why="they run as one GEMM", next="use a checkpoint that quantizes both or neither",
        )  # fmt: skip
    return bool(covered)

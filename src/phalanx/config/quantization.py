# SPDX-License-Identifier: Apache-2.0
"""The quantization of a checkpoint's linear layers: `Quantization`, which `quantization_config` reads. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.errors import ModelError

Weights = Literal["load", "tensor", "channel", "block", "int4", "mxfp4", "mxfp4_packed", "nvfp4", "int8"]
Activations = Literal["none", "token", "static"]
Int4Form = Literal["load", "packed", "awq", "gptq"]
GROUP_UNIT = 32
"""Columns of the smallest group of 4-bit integers that kernels scale, and of each block of MXFP4."""


@dataclass(frozen=True)
class Int4:
    """Weights of 4-bit integers: value = (stored - zero) * scale; or of 8 bits, which are run as two of 4.

    form: how a checkpoint has them: "packed" (compressed-tensors), "awq", "gptq"; "load": it has 16 bit.
    group: columns that share a scale; 0: all of a row.
    zeros: each scale has a zero beside it; else every zero is 8, or 128.
    by_index: a list says which group a column is of (act order, g_idx); else groups are of neighbours.
    zero_offset: what is added to a stored zero, modulo 2 ** bits.
    """

    form: Int4Form
    group: int
    zeros: bool = False
    by_index: bool = False
    zero_offset: int = 0
    bits: int = 4

    @property
    def tensors(self) -> tuple[str, ...]:
        """The ends of the names of a layer's tensors."""
        more = (("weight_zero_point",) if self.zeros else ()) + (("weight_g_idx",) if self.by_index else ())
        return {
            "load": ("weight",), "packed": ("weight_packed", "weight_scale", "weight_shape", *more),
            "awq": ("qweight", "qzeros", "scales"), "gptq": ("qweight", "qzeros", "scales", "g_idx"),
        }[self.form]  # fmt: skip


@dataclass(frozen=True)
class Quantization:
    """Linear layers in e4m3: value = stored * scale; or in 4-bit integers, see `Int4`; or in NVFP4; or experts in MXFP4.

    weights: one scale per "tensor", per output "channel", or per "block" of rows x columns; or "load": the checkpoint is not
    quantized, and gets one scale per output channel while it is loaded. activations: one scale per "token", computed at run time;
    "static": a scale of the checkpoint; "none": activations stay in 16 bit. kv: the checkpoint is meant for an FP8 KV cache; scales
    of the cache are read wherever there are any. targets, ignore: regular expressions for the beginning of a layer's name, and
    names: of layers; neither targets nor names mean all layers. prefixes: what they may have in the place of a name's "model.".
    others: further groups of layers, each with a scheme of its own. copied: the checkpoint's scheme, where layers hold a copy of it
    in FP8.
    """

    method: str
    weights: Weights
    activations: Activations
    block: tuple[int, int] | None = None
    scale_name: str = "weight_scale"
    kv: bool = False
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    int4: Int4 | None = None
    others: tuple[Quantization, ...] = ()
    names: frozenset[str] = frozenset()
    copied: Quantization | None = None

    @property
    def linear_method(self) -> str | None:
        """What multiplies with such weights of a linear layer, as a dotted path; None: only experts have them."""
        return _IN_LINEAR.get(self.weights) if self.copied is None else f"{_LINEAR}.fp8_copy:Fp8Copy"

    @property
    def expert_method(self) -> str | None:
        """The same of experts; None: only other layers have them."""
        return _IN_EXPERTS.get(self.weights)

    @property
    def on_load(self) -> bool:
        """Whether the checkpoint has 16 bit."""
        return (self.weights == "load" and self.copied is None) or (self.int4 is not None and self.int4.form == "load")

    @property
    def stored(self) -> str:
        """What holds a weight: "FP8", "INT4", "INT8", "W8A16" (integers, with activations in 16 bit), "MXFP4", or "NVFP4", as
        packed MXFP4 is held, too."""
        if self.int4 is not None and self.int4.bits == 8:
            return "W8A16"
        return "FP8" if self.weights in _FP8 else "NVFP4" if self.weights == "mxfp4_packed" else self.weights.upper()

    @property
    def head(self) -> Quantization | None:
        """The scheme of the output head; None where it is not quantized, as with a load in FP8 or int4. A tied head has none."""
        scheme = self.of("lm_head")
        return None if scheme is None or scheme.on_load or scheme.linear_method is None else scheme

    @property
    def beside_weight(self) -> tuple[str, ...]:
        """The ends of the names of the tensors that a checkpoint may have of a layer, beside its weight or in place of it."""
        if self.weights == "nvfp4":
            of_modelopt = self.method == "modelopt"
            return ("weight_scale", *(("weight_scale_2", "input_scale") if of_modelopt else _COMPRESSED_NVFP4))
        if self.weights == "mxfp4_packed":
            return "weight_scale", "weight_packed"
        return (self.scale_name, "input_scale") if self.int4 is None else self.int4.tensors

    def of(self, layer: str) -> Quantization | None:
        """The scheme of the linear layer of this name ("model.layers.0.mlp.up_proj"): that of the first group with the layer. None
        where it is not quantized. Experts and the output head are never copied."""
        scheme = next((group for group in (self, *self.others) if group._has(layer)), None)
        if scheme is not None and scheme.copied is not None and (".experts." in layer or layer == "lm_head"):
            return scheme.copied
        return scheme

    @property
    def in_fp8(self) -> Quantization:
        """With dense layers in 4 bits copied to FP8 while they are read: a scale for each row and for each token."""

        def copy(scheme: Quantization) -> Quantization:
            if scheme.weights not in ("int4", "nvfp4", "mxfp4_packed") or scheme.on_load:
                return scheme
            return replace(scheme, weights="load", activations="token", int4=None, copied=replace(scheme, others=()))

        return replace(copy(replace(self, others=())), others=tuple(copy(other) for other in self.others))

    def unit(self, layer: str) -> int:
        """Columns of a layer that ranks do not part, since they share a scale that is stored; 0: there are none."""
        scheme = self.of(layer)
        if scheme is None or scheme.int4 is None or scheme.on_load:
            return GROUP_UNIT if scheme is not None and scheme.weights in ("mxfp4", "mxfp4_packed", "nvfp4") else 0
        return scheme.int4.group

    def _has(self, layer: str) -> bool:
        """Whether the layer is in this group. A pattern may also name the GEMM of which the layer is a part
        ("model.layers.0.mlp.gate_up_proj")."""
        names = [layer, *(layer.removesuffix(part) + fused for part, fused in _FUSED.items() if layer.endswith(part))]
        names += [prefix + name.removeprefix("model.") for prefix in self.prefixes for name in names]

        def matched(patterns: Sequence[str]) -> bool:
            return any(re.match(pattern, name) for pattern in patterns for name in names)

        named = any(name in self.names for name in names) or matched(self.targets)
        return (named or not (self.targets or self.names)) and not matched(self.ignore)


_FP8 = ("load", "tensor", "channel", "block")
_LINEAR, _EXPERTS = "phalanx.models.layers.linear_methods", "phalanx.models.layers.expert_methods"
_IN_LINEAR = {
    **dict.fromkeys(_FP8, f"{_LINEAR}.fp8:Fp8"), "block": f"{_LINEAR}.fp8_block:Fp8Block", "int4": f"{_LINEAR}.int4:Int4Linear",
    "nvfp4": f"{_LINEAR}.nvfp4:Nvfp4Linear", "mxfp4_packed": f"{_LINEAR}.nvfp4:Mxfp4PackedLinear", "int8": f"{_LINEAR}.int8:Int8",
}  # fmt: skip
_IN_EXPERTS = {
    **dict.fromkeys((*_FP8, "int8"), f"{_EXPERTS}.grouped:GroupedExperts"), "mxfp4": f"{_EXPERTS}.mxfp4:Mxfp4Experts",
    **dict.fromkeys(("int4", "nvfp4", "mxfp4_packed"), f"{_EXPERTS}.packed:PackedExperts"),
}  # fmt: skip
"""`Weights` -> the method."""
_COMPRESSED_NVFP4 = ("weight_packed", "weight_global_scale", "input_global_scale")
_FUSED = {
    ".q_proj": ".qkv_proj", ".k_proj": ".qkv_proj", ".v_proj": ".qkv_proj", ".gate_proj": ".gate_up_proj",
    ".up_proj": ".gate_up_proj", ".q_a_proj": ".fused_qkv_a_proj", ".kv_a_proj_with_mqa": ".fused_qkv_a_proj",
}  # fmt: skip
"""Ends of the names of layers, and of the GEMM that vLLM and TensorRT-LLM make of them."""

ON_LOAD = Quantization("fp8 on load", "load", "token")
"""The quantization of a 16-bit checkpoint that is loaded with dtype="fp8"."""
INT4_ON_LOAD = Quantization("int4 on load", "int4", "none", int4=Int4("load", 128))
"""With dtype="int4": rounded to nearest, in groups of 128."""
MXFP4 = Quantization("mxfp4", "mxfp4", "none", targets=(r".*\.experts\.",))
"""The quantization of gpt-oss: 32 values of e2m1 share a power of 2 (OCP Microscaling formats 1.0)."""


def on_load(dtype: str) -> Quantization | None:
    """The quantization of a 16-bit checkpoint that is loaded with this dtype."""
    return {"fp8": ON_LOAD, "int4": INT4_ON_LOAD}.get(dtype)


def loaded_as(stored: Quantization | None, loading: Quantization | None) -> Quantization | None:
    """What layers hold of a checkpoint in `stored` (None: 16 bit) that is loaded by `loading`, see `on_load`: what the checkpoint
    holds, but for a copy in FP8 of what is in 4 bits."""
    if stored is None or loading is None:
        return stored or loading
    return stored.in_fp8 if loading == ON_LOAD else stored


def require_uniform(quantization: Quantization, layers: Sequence[str]) -> Quantization | None:
    """The scheme of the layers of one fused GEMM; None where they are not quantized. Raises ModelError where they differ in it."""
    schemes = [quantization.of(layer) for layer in layers]
    for layer, scheme in zip(layers, schemes, strict=True):
        if scheme != schemes[0]:
            first, second = (f"in {each.stored}" if each is not None else "not quantized" for each in (schemes[0], scheme))
            raise ModelError(
                f"{layers[0]} is {first} and {layer} is {second}" + (" of another scheme" if first == second else ""),
                held=f"by the checkpoint's {quantization.method} configuration", why="they run as one GEMM",
                next="use a checkpoint that quantizes both alike or neither",
            )  # fmt: skip
    return schemes[0]

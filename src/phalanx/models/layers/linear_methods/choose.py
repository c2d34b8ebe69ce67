# SPDX-License-Identifier: Apache-2.0
"""Which method a linear layer has: by the quantization of the checkpoint, or of the load, and by the names of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.config import dotted_path
from phalanx.config.quantization import Quantization, require_uniform
from phalanx.models.layers.linear_methods.method import LinearMethod
from phalanx.models.layers.linear_methods.unquantized import Unquantized
from phalanx.models.slices import LayerContext, WeightPart


def linear_method(parts: Sequence[WeightPart], context: LayerContext) -> LinearMethod:
    """The method of a layer with these parts, its weight uninitialized. Raises ModelError where they differ in quantization."""
    scheme = None if context.quantization is None else require_uniform(context.quantization, [part.name for part in parts])
    return Unquantized(parts, context) if scheme is None else _named_by(scheme)(parts, replace(context, quantization=scheme))


def describe(context: LayerContext) -> str | None:
    """What the log says of the quantization."""
    if context.quantization is None:
        return None
    schemes = [each for each in (context.quantization, *context.quantization.others) if each.linear_method is not None]
    lines = [_named_by(scheme).describe(replace(context, quantization=scheme)) for scheme in schemes]
    return "; ".join(dict.fromkeys(line for line in lines if line is not None)) or None


def _named_by(quantization: Quantization) -> type[LinearMethod]:
    assert quantization.linear_method is not None, quantization
    method: type[LinearMethod] = dotted_path.load(quantization.linear_method, option="linear_method")
    return method

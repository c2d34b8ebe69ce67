# SPDX-License-Identifier: Apache-2.0
"""A linear layer and a token, as the kernels take them that do a product and what follows it at once."""

from __future__ import annotations

from phalanx.kernels.scaled_tensors import GemvArgs
from phalanx.models.layers.fp8 import Activation
from phalanx.models.layers.linear import ColumnParallelLinear


def factors(x: Activation, layer: ColumnParallelLinear) -> GemvArgs | None:
    """x [1, in] and what the layer holds; None for more tokens, and for a layer that widens its weight for each product."""
    if x.shape[0] != 1:
        return None
    fp8 = layer.fp8
    if fp8 is None:
        return GemvArgs.of(x, layer.weight, layer.bias, layer.weight.dtype)
    if not fp8.products:
        return None
    return GemvArgs.of(x, layer.weight, layer.bias, fp8.dtype, fp8.weight_scale, fp8.input_scale)

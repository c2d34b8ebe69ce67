# SPDX-License-Identifier: Apache-2.0
"""Layers of sizes of their own, filled with given tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from phalanx.layout.families import WeightTensor
from phalanx.models import weights
from phalanx.models.layers.linear import ColumnParallelLinear
from phalanx.models.slices import LayerContext, Sliced, WeightPart


def fill(layer: Sliced, tensors: dict[str, torch.Tensor]) -> None:
    for part in weights.slices(layer):
        assert part.shape == tuple(tensors[part.name].shape)
        part.target.copy_(tensors[part.name].narrow(part.dim, part.begin, part.target.shape[part.dim]))


def columns_of(name: str, inputs: int, out: int, local: range) -> WeightPart:
    """These columns of a weight [out, inputs]."""
    return WeightPart(name, (out, inputs), range(out), local)


def rows_of(name: str, inputs: int, out: int, local: range) -> WeightPart:
    """These rows of a weight [out, inputs]."""
    return WeightPart(name, (out, inputs), local, range(inputs))


def declared(context: LayerContext, *tensors: WeightTensor) -> LayerContext:
    """For layers of a model with these tensors."""
    return replace(context, declared={tensor.name: tensor for tensor in tensors})


def merged(context: LayerContext, inputs: int = 32, *, bias: bool = False) -> ColumnParallelLinear:
    """gate_proj and up_proj, 64 features each."""
    kinds = {"weight": (64, inputs), **({"bias": (64,)} if bias else {})}
    tensors = (
        WeightTensor(f"{name}.{kind}", shape, "column", "mlp") for name in ("gate_proj", "up_proj") for kind, shape in kinds.items()
    )
    return ColumnParallelLinear.of("gate_proj", "up_proj", context=declared(context, *tensors))

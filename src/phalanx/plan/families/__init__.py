# SPDX-License-Identifier: Apache-2.0
"""Model families as plain data: how config.json is read, and which tensors a checkpoint has, by name, shape and split. No torch."""

from phalanx.plan.families.declare import Split, Tensor
from phalanx.plan.families.registry import known, layer_tensors, outer_tensors, shape_of

__all__ = ["Split", "Tensor", "known", "layer_tensors", "outer_tensors", "shape_of"]

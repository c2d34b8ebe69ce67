# SPDX-License-Identifier: Apache-2.0
"""Model families as plain data: how config.json is read, and which tensors a checkpoint has, by name, shape and split. No torch."""

from phalanx.layout.families.declare import Split, WeightTensor
from phalanx.layout.families.registry import known, layer_cache, layer_tensors, model_cache, outer_tensors

__all__ = ["Split", "WeightTensor", "known", "layer_cache", "layer_tensors", "model_cache", "outer_tensors"]

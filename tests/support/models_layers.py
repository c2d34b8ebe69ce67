# SPDX-License-Identifier: Apache-2.0
"""Layers filled with given tensors."""

from __future__ import annotations

import torch

from phalanx.models.slices import Sliced


def fill(layer: Sliced, tensors: dict[str, torch.Tensor]) -> None:
    for part in layer.slices():
        assert part.shape == tuple(tensors[part.name].shape)
        part.target.copy_(tensors[part.name].narrow(part.dim, part.begin, part.target.shape[part.dim]))

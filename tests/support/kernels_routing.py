# SPDX-License-Identifier: Apache-2.0
"""Tokens routed to experts in ways that tests of their GEMMs need."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.moe.tensors import Routing


def routing_of(ids: Tensor) -> Routing:
    weights = torch.rand(ids.shape, device=ids.device) + 0.1
    return Routing(weights / weights.sum(-1, keepdim=True), ids.to(torch.int32))


def routings(tokens: int, count: int, top_k: int) -> list[Routing]:
    """Drawn; all to the first experts; the last expert with one token only; and one with experts of other ranks."""
    drawn = torch.rand(tokens, count).argsort(1)[:, :top_k]
    same = torch.arange(top_k).expand(tokens, top_k).clone()
    one = same.clone()
    one[0, 0] = count - 1
    elsewhere = drawn + 2
    elsewhere[-1] = -1
    return [routing_of(ids) for ids in (drawn, same, one, elsewhere)]

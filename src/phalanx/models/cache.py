# SPDX-License-Identifier: Apache-2.0
"""The tensors that layers keep between steps, allocated as their family declares them (`layout.cache`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.dtypes import TORCH_DTYPES
from phalanx.layout.cache import Cache, group_of, sharing

CACHE_DTYPES = {**TORCH_DTYPES, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer: its tensors by name.

    A token's tensor is [num_blocks, block_size, *shape], with the block's tokens in the place that the declaration names; a
    request's state is [slots, *shape], and behind the slots of requests those of prefixes. Whoever computes a request's first token
    begins with a state of zeros. states: the names of the tensors of states. group: of the layer; layers of several groups may have
    the same tensors of tokens.
    """

    tensors: dict[str, Tensor]
    states: frozenset[str] = frozenset()
    group: int = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def key(self) -> Tensor:
        """Keys [num_blocks, block_size, kv_heads, head_dim]."""
        return self.tensors["key"]

    @property
    def value(self) -> Tensor:
        """Values, as keys."""
        return self.tensors["value"]

    @property
    def token_scales(self) -> Tensor | None:
        """Of a cache in int8: of each key and its value, [num_blocks, kv_heads, block_size, 2] bf16."""
        return self.tensors.get("token_scales")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def copy_state(self, source: int, target: int) -> None:
        """Copy the state in slot source to slot target."""
        for name in self.states:
            self.tensors[name][target].copy_(self.tensors[name][source])


def empty_caches(
    declared: Sequence[Cache], blocks: int, block_size: int, device: torch.device, *, slots: int = 1,
    states: Sequence[LayerCache] | None = None,
) -> list[LayerCache]:  # fmt: skip
    """Caches of zeros, one for each layer. declared: on this rank. states: caches whose requests' state is taken over."""
    caches: list[LayerCache] = []
    for number, (cache, owner) in enumerate(zip(declared, sharing(declared), strict=True)):
        tensors = {}
        for tensor in cache:
            if states is not None and tensor.per == "request":
                tensors[tensor.name] = states[number][tensor.name]
                continue
            if owner != number and tensor.per == "token":
                tensors[tensor.name] = caches[owner][tensor.name]
                continue
            shape = tensor.allocated(blocks, block_size, slots)
            tensors[tensor.name] = torch.zeros(shape, dtype=CACHE_DTYPES[tensor.dtype], device=device)
        caches.append(LayerCache(tensors, frozenset(tensor.name for tensor in cache if tensor.per == "request"), group_of(cache)))
    return caches

# SPDX-License-Identifier: Apache-2.0
"""What layers keep between steps: a list of `CacheTensor` for each layer, which its family declares. Memory, planner, worker,
attention back ends and scheduler read this list and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import phalanx.layout.shard as shard
from phalanx.config.dtypes import DTYPES
from phalanx.config.quantization import on_load

_ITEMSIZES = {**{name: dtype.itemsize for name, dtype in DTYPES.items()}, "fp8": 1, "int8": 1}


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a layer's cache.

    shape: of one token, or of one request.
    dtype: a name of `DTYPES`, "fp8" (e4m3) or "int8".
    per: "token": in blocks, [blocks, block_size, *shape]; "request": in the slots of requests, [slots, *shape].
    window: of a token's tensor: how many tokens attention covers; None: all.
    heads: query heads that dim 0, of KV heads, serves: ranks split it by them; 0: each rank holds all of the tensor.
    token_dim: in which place among the dims of a token's shape a block has its tokens.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    per: Literal["token", "request"] = "token"
    window: int | None = None
    heads: int = 0
    token_dim: int = 0

    def local(self, tp: int) -> CacheTensor:
        """What each of tp ranks holds: all hold as much. Raises LayoutError where tp does not divide the heads."""
        if not self.heads:
            return self
        return replace(self, shape=(len(shard.heads(self.heads, self.shape[0], tp, 0).kv), *self.shape[1:]))

    @property
    def nbytes(self) -> int:
        """Of one token, or of one request."""
        return math.prod(self.shape) * _ITEMSIZES[self.dtype]

    def allocated(self, blocks: int, block_size: int, slots: int) -> tuple[int, ...]:
        """Its shape for so many blocks, or for so many slots."""
        if self.per == "request":
            return (slots, *self.shape)
        return (blocks, *self.shape[: self.token_dim], block_size, *self.shape[self.token_dim :])


Cache = tuple[CacheTensor, ...]
"""The tensors of one layer."""


def kv_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """The dtype of cached keys and values. kv_cache_dtype: "fp8", "int8", or "model" for that of activations. dtype: the
    engine's."""
    activations = "bf16" if on_load(dtype) else dtype
    return activations if kv_cache_dtype == "model" else kv_cache_dtype


def token_bytes(caches: Iterable[Cache]) -> int:
    """Bytes of one token in all these layers."""
    return sum(tensor.nbytes for cache in caches for tensor in cache if tensor.per == "token")


def request_bytes(caches: Iterable[Cache]) -> int:
    """Bytes of one request's state in all these layers, however long the request is."""
    return sum(tensor.nbytes for cache in caches for tensor in cache if tensor.per == "request")


def default_snapshots(slots: int) -> int:
    """Prefixes whose state is kept beside those of so many requests, unless the option state_snapshots says another number."""
    return -(-slots // 2)


def window_of(cache: Iterable[CacheTensor]) -> int | None:
    """How many tokens are needed of all these tensors, the most; None: all."""
    windows = [tensor.window for tensor in cache if tensor.per == "token"]
    bounded = [window for window in windows if window is not None]
    return max(bounded) if bounded and len(bounded) == len(windows) else None


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose tokens share block ids: a block holds the same tokens in each of them. window: tokens after which none of them
    needs a block any more; None: never."""

    layers: tuple[int, ...]
    window: int | None


def group_of(caches: Sequence[Cache]) -> CacheGroup:
    """All layers of a model that keep tokens: today they are one group."""
    layers = tuple(layer for layer, cache in enumerate(caches) if token_bytes([cache]))
    return CacheGroup(layers, window_of(tensor for cache in caches for tensor in cache))

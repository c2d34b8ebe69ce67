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
    group: of a token's tensor: of the model's layers that share block ids (see `layer_groups`).
    divided: a token's tensor that no rank splits by heads, so that the tokens of a block may be divided over ranks instead.
    ranks: over which they are: of every run of so many tokens each rank has one, in rank order. A block has a multiple of them.
    revocable: of a request's tensor: tokens that a later step rejects can be taken out of it.
    shared: of layers with the same name here the first one stores the tensor, and the others read it; "": the layer has it alone.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    per: Literal["token", "request"] = "token"
    window: int | None = None
    heads: int = 0
    token_dim: int = 0
    group: int = 0
    divided: bool = False
    ranks: int = 1
    revocable: bool = False
    shared: str = ""

    def local(self, tp: int, dcp: int = 1) -> CacheTensor:
        """What each of tp ranks holds, where dcp of them divide tokens: all hold as much. Raises LayoutError where tp does not
        divide the heads."""
        if self.divided:
            return replace(self, ranks=dcp)
        if not self.heads:
            return self
        return replace(self, shape=(len(shard.heads(self.heads, self.shape[0], tp, 0).kv), *self.shape[1:]))

    @property
    def nbytes(self) -> int:
        """Of one token, or of one request."""
        return math.prod(self.shape) * _ITEMSIZES[self.dtype]

    def block_bytes(self, block_size: int) -> int:
        """Of a rank's part of one block of so many tokens."""
        return block_size // self.ranks * self.nbytes

    def allocated(self, blocks: int, block_size: int, slots: int) -> tuple[int, ...]:
        """Its shape on a rank for so many blocks, or for so many slots."""
        if self.per == "request":
            return (slots, *self.shape)
        return (blocks, *self.shape[: self.token_dim], block_size // self.ranks, *self.shape[self.token_dim :])


Cache = tuple[CacheTensor, ...]
"""The tensors of one layer."""


def kv_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """The dtype of cached keys and values. kv_cache_dtype: "fp8", "int8", or "model" for that of activations. dtype: the
    engine's."""
    activations = "bf16" if on_load(dtype) else dtype
    return activations if kv_cache_dtype == "model" else kv_cache_dtype


def token_bytes(caches: Iterable[Cache]) -> int:
    """Bytes of one token in all these layers, on a rank that has it."""
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


MOST_GROUPS = 8
"""Each group has a block table for each request, which the host extends."""


def layer_groups(caches: Sequence[Cache]) -> tuple[int, ...]:
    """The group of each layer of a model, in order. A request has a block table for each group, and all groups take their blocks
    from one pool: block b is block b of layer i of every group, and is in use by one group at a time. So the blocks of a group with
    a window can be freed behind it, and are of use to any other. Layers that share a tensor are in the group of the one that stores
    it.

    A group has layers of one window; those without come first, in group 0. All groups have about as many layers: as many that the
    layers without a window are padded least, then all of them, then with the fewest groups. The layers of a kind go round its
    groups, so that a pipeline stage has as many of each. One group where the cached tokens of layers differ in more than the
    window: their blocks would differ in bytes.
    """
    kinds: dict[int | None, list[int]] = {}
    owners = _storing(caches)
    for layer, cache in enumerate(caches):
        if token_bytes([cache]) and owners[layer] == layer:
            kinds.setdefault(window_of(cache), []).append(layer)
    numbers = [0] * len(caches)
    if len(kinds) < 2 or len({_content(caches[layers[0]]) for layers in kinds.values()}) > 1:
        return tuple(numbers)
    ordered = sorted(kinds.items(), key=lambda item: -(item[0] or _ALL))
    counts = [len(layers) for _, layers in ordered]

    def padded(size: int) -> tuple[int, int, int]:
        groups = [-(-count // size) for count in counts]
        return groups[0] * size, sum(groups) * size, sum(groups)

    size = min((size for size in range(1, max(counts) + 1) if padded(size)[2] <= MOST_GROUPS), key=padded)
    first = 0
    for _, layers in ordered:
        groups = -(-len(layers) // size)
        for number, layer in enumerate(layers):
            numbers[layer] = first + number % groups
        first += groups
    return tuple(numbers[owner] for owner in owners)


_ALL = 1 << 62
"""As a window, of a layer without one."""


def group_windows(caches: Iterable[Cache]) -> tuple[int | None, ...]:
    """Of each group: how many tokens are needed of all its layers, the most; None: all. One group at least."""
    groups: dict[int, list[CacheTensor]] = {0: []}
    for tensor in (tensor for cache in caches for tensor in cache if tensor.per == "token"):
        groups.setdefault(tensor.group, []).append(tensor)
    return tuple(window_of(groups.get(group, [])) for group in range(max(groups) + 1))


def in_group(cache: Cache, group: int) -> Cache:
    """The same tensors, in another group."""
    return tuple(replace(tensor, group=group) if tensor.per == "token" else tensor for tensor in cache)


def group_of(cache: Cache) -> int:
    """The group of one layer; 0 where it keeps no token."""
    return next((tensor.group for tensor in cache if tensor.per == "token"), 0)


def sharing(caches: Sequence[Cache]) -> list[int]:
    """Of each layer that one rank has, the layer in whose tensors its blocks are: itself, or an earlier one of another group, or
    that which stores what it reads."""
    groups, storing = len(group_windows(caches)), _storing(caches)
    owners: list[int] = []
    free: dict[tuple[int, Cache], list[int]] = {}  # owners of this content that the group has not used
    for layer, cache in enumerate(caches):
        if storing[layer] != layer:
            owners.append(owners[storing[layer]])
            continue
        group, content = group_of(cache), _content(cache)
        unused = free.setdefault((group, content), [])
        if content and unused:
            owners.append(unused.pop(0))
            continue
        owners.append(layer)
        for other in range(groups):
            if other != group:
                free.setdefault((other, content), []).append(layer)
    return owners


def _storing(caches: Sequence[Cache]) -> list[int]:
    """Of each layer the one that stores its tokens: itself, or the first with the same `CacheTensor.shared`."""
    first: dict[str, int] = {}
    shared = [next((tensor.shared for tensor in cache if tensor.per == "token"), "") for cache in caches]
    return [first.setdefault(name, layer) if name else layer for layer, name in enumerate(shared)]


def _content(cache: Cache) -> Cache:
    """What a block has of a layer, whatever its window and group."""
    return tuple(replace(tensor, window=None, group=0, shared="") for tensor in cache if tensor.per == "token")

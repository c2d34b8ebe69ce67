# SPDX-License-Identifier: Apache-2.0
"""Bytes per rank: the size of a KV block, and how many blocks fit a budget.

The engine and the planner both size the KV cache with these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.errors import CapacityError


class KvFormat(NamedTuple):
    """How the KV cache stores keys and values. itemsize: bytes of one of their elements; scale_bytes: of the scale that each key,
    and each value, of a head and token has beside them."""

    itemsize: int
    scale_bytes: int = 0


INT8_KV = KvFormat(1, 2)
"""A scale is in bf16: see `kernels.reference.quantize_int8`."""


@dataclass(frozen=True)
class KvSpec:
    """The KV cache of one layer per token, as a model declares it for one rank of its tensor-parallel group.

    heads: KV heads on this rank, replicas included. head_dim: elements. window: tokens that attention covers, None for all.
    latent_rank: None where a layer stores keys and values; else it stores one tensor of `head_dim`, of which so many elements are
    the latent, and the rest the rotated key. itemsize, scale_bytes: see `KvFormat`. bytes_per_token: all of it.
    """

    heads: int
    head_dim: int
    itemsize: int
    window: int | None = None
    latent_rank: int | None = None
    scale_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        return (2 if self.latent_rank is None else 1) * self.heads * (self.head_dim * self.itemsize + self.scale_bytes)


def block_bytes(specs: Sequence[KvSpec], block_size: int) -> int:
    """Bytes of one KV block over the layers of one stage. specs: one per layer."""
    return block_size * sum(spec.bytes_per_token for spec in specs)


def blocks_in(budget: int, specs: Sequence[KvSpec], block_size: int, *, what: str) -> int:
    """How many KV blocks fit a rank's budget in bytes. what: the name of the budget, for the error.

    Raises CapacityError when none fits, with the bytes of one block.
    """
    one = block_bytes(specs, block_size)
    count = budget // one
    if count < 1:
        raise CapacityError(
            "not a single KV block fits",
            held=f"{what} gives the KV cache {budget:,} bytes; one block of {block_size} tokens takes {one:,} bytes",
            next=f"give at least {one:,} bytes, a larger tensor_parallel_size, or a smaller kv_block_size",
        )  # fmt: skip
    return count


GRAPH_BYTES = 8 << 20
"""Reserved for each CUDA graph, beside the memory that all share, which a trial capture of the largest of each kind measures."""


def kv_budget(fraction: float, free: int, activations: int, graphs: int) -> int:
    """Bytes of the KV cache: the fraction of the memory that is free after loading weights, less what activations and graphs take.

    The engine passes what it measured, the planner what `plan.footprint` predicts.
    """
    return int(fraction * (free - activations - graphs))

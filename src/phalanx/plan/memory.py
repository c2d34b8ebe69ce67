# SPDX-License-Identifier: Apache-2.0
"""Bytes per rank: what a KV block costs, and how many blocks a budget holds.

The engine sizes its cache with these functions, and so does the planner: what it promises is what the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import CapacityError


@dataclass(frozen=True)
class KvSpec:
    """What one layer keeps per token, as a model declares it for one rank of its tensor-parallel group.

    heads: KV heads on this rank (replicas counted). head_dim: elements. window: tokens that attention looks back over, None for
    all. bytes_per_token: keys and values together.
    """

    heads: int
    head_dim: int
    itemsize: int
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.heads * self.head_dim * self.itemsize


def block_bytes(specs: Sequence[KvSpec], block_size: int) -> int:
    """Bytes of one KV block over the layers of one stage. `specs`: one per layer."""
    return block_size * sum(spec.bytes_per_token for spec in specs)


def blocks_in(budget: int, specs: Sequence[KvSpec], block_size: int, *, what: str) -> int:
    """How many KV blocks a rank's budget in bytes holds. `what` names the budget in the error.

    Raises CapacityError when it holds none, with the bytes of one block.
    """
    one = block_bytes(specs, block_size)
    count = budget // one
    if count < 1:
        raise CapacityError(
            f"{what} gives the KV cache {budget:,} bytes", held=f"one block of {block_size} tokens takes {one:,} bytes",
            why="not a single block fits",
            next=f"give at least {one:,} bytes, a larger tensor_parallel_size, or a smaller kv_block_size",
        )  # fmt: skip
    return count


GRAPH_BYTES = 8 << 20
"""Set aside for each CUDA graph beside the memory that all share, which the capture of the largest of each kind measures."""


def kv_budget(fraction: float, free: int, activations: int, graphs: int) -> int:
    """Bytes of the KV cache: the fraction of what is free once weights are there, less what activations and graphs will take of it.

    The engine gives what it measured, the planner what `plan.footprint` says that it will measure.
    """
    return int(fraction * (free - activations - graphs))

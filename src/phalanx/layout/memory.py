# SPDX-License-Identifier: Apache-2.0
"""Bytes per rank: the size of a KV block, and how many blocks fit a budget.

The engine and the planner both size the KV cache with these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

from phalanx.config.model import ModelShape
from phalanx.errors import CapacityError
from phalanx.layout.cache import Cache, request_bytes, sharing
from phalanx.layout.families import layer_cache
from phalanx.layout.layout import Layout
from phalanx.layout.weights import stage_layers


@cache
def stage_caches(shape: ModelShape, kv: str, dtype: str, layout: Layout) -> tuple[tuple[Cache, ...], ...]:
    """What the layers of each stage keep between steps on one rank. kv: the dtype of keys and values."""
    return tuple(
        tuple(layer_cache(shape, layer, kv, layout.tp, layout.dcp) for layer in layers)
        for layers in stage_layers(shape, dtype, layout.pp)
    )  # fmt: skip


def block_bytes(caches: Sequence[Cache], block_size: int) -> int:
    """Bytes of one KV block over the layers of one stage, on one rank. caches: one per layer."""
    owners = [caches[owner] for owner in set(sharing(caches))]
    return sum(tensor.block_bytes(block_size) for cache in owners for tensor in cache if tensor.per == "token")


def blocks_in(budget: int, caches: Sequence[Cache], block_size: int, *, states: int, usable: int, what: str) -> int:
    """How many KV blocks fit a rank's budget in bytes, beside so many states of requests and of prefixes.

    usable: blocks that these requests can use at most; so many where no layer of the stage keeps tokens. what: the name of the
    budget, for the error. Raises CapacityError when none fits, with the bytes of one block.
    """
    one, state = block_bytes(caches, block_size), states * request_bytes(caches)
    count = (budget - state) // one if one else usable if budget >= state else 0
    if count < 1:
        beside = f", beside {state:,} bytes of {states} states of requests and prefixes" if state else ""
        raise CapacityError(
            "not a single KV block fits",
            held=f"{what} gives the KV cache {budget:,} bytes; one block of {block_size} tokens takes {one:,} bytes{beside}",
            next=f"give at least {one + state:,} bytes, a larger tensor_parallel_size, or a smaller "
            f"{'max_batch_size' if state else 'kv_block_size'}",
        )  # fmt: skip
    return count


HostMemory = int | Literal["auto"]
"""The option kv_host_memory: bytes of one host, or half of what is free there."""


STAGING_BYTES = 64 << 20
"""Of each of a rank's four staging buffers: two for each direction between KV cache and host memory, which are used in turn."""


def copied_blocks(block: int) -> int:
    """KV blocks that come back from host memory in one step, at most, while requests run, and that go there: what the buffers of a
    direction hold, so that the step does not wait for the bus. Over PCIe 5 (some 50 GB/s) they take 2.7 ms, beside it. block: bytes
    of one on a rank, above 0."""
    return 2 * max(STAGING_BYTES // block, 1)


COPIED_STATES = 2
"""States that come back in one step, at most, while requests run: a direction has as many buffers, of one state each."""


def staging_bytes(block: int) -> int:
    """Bytes of all staging buffers of KV blocks, on the device: each takes whole ones, at least one. block: bytes of one on the
    rank."""
    return 4 * block * max(STAGING_BYTES // block, 1) if block else 0


def state_staging_bytes(state: int) -> int:
    """As `staging_bytes`, of states: each buffer takes one."""
    return 2 * COPIED_STATES * state


MOST_OF_FREE = 0.9
"""What part of a host's free memory KV blocks may have: it is pinned, and other processes grow."""


STATE_TOKENS = 4096
"""Tokens of KV blocks for which host memory has one state of a prefix: a turn of a conversation needs one, however long it is."""


class HostCounts(NamedTuple):
    """What a host's memory holds for each of its ranks: KV blocks, and states of prefixes."""

    blocks: int
    states: int


def host_budget(memory: HostMemory, free: int, host: str) -> int:
    """Bytes of a host for KV blocks and states. free: its bytes that nobody uses. host: its name, for errors. Raises CapacityError
    where the memory is not there."""
    budget = free // 2 if memory == "auto" else memory
    if budget > MOST_OF_FREE * free:
        raise CapacityError(
            f"kv_host_memory={budget:,} does not fit the memory of {host}",
            held=f"{free:,} bytes are available there, by its own count and that of control groups",
            why=f"of what is available at most {MOST_OF_FREE:.0%} may be used",
            next=f"give at most {int(MOST_OF_FREE * free):,}, or 'auto', which is half of what is available",
        )  # fmt: skip
    return budget


def host_counts(
    memory: HostMemory, block: int, free: int, *, state: int = 0, block_size: int = 16, host: str
) -> HostCounts:  # fmt: skip
    """What a host's memory holds for its ranks. block, state: bytes of one on all of them; state is 0 where no layer has one. free:
    bytes of the host. host: its name, for errors. Raises CapacityError where the memory is not there, or holds no block, or not the
    state that a hit needs."""
    if not memory:
        return HostCounts(0, 0)
    budget = host_budget(memory, free, host)
    if budget < block + state:
        what, and_state = ("a single KV block and a state", f" and a state {state:,}") if state else ("a single KV block", "")
        raise CapacityError(
            f"kv_host_memory={memory} holds not {what}", held=f"{budget:,} bytes of {host}",
            why=f"a block takes {block:,}{and_state} bytes on the ranks of a host together",
            next=f"give at least {block + state:,}, or 0",
        )  # fmt: skip
    if not state:
        return HostCounts(budget // block, 0)
    with_a_state = -(-STATE_TOKENS // block_size)  # blocks
    states = max(budget // (state + with_a_state * block), 1)
    return HostCounts((budget - states * state) // block if block else states * with_a_state, states)


def fewest(hosts: Sequence[HostCounts]) -> HostCounts:
    """What each of these hosts holds. Hosts whose layers have no state hold none, whatever the others do."""
    return HostCounts(min(each.blocks for each in hosts), min((each.states for each in hosts if each.states), default=0))


UNBOUNDED = 1 << 40
"""As a number of positions: no number of blocks bounds it."""


def window_blocks(window: int, block_size: int) -> int:
    """The most KV blocks that a decode of a request needs in a group of layers with this window, in tokens. Blocks before the
    window are released while the request runs: what is left are those that the window touches, and one for the next token."""
    return window // block_size + 2


def blocks_of_request(windows: Sequence[int | None], positions: int, block_size: int) -> int:
    """How many KV blocks a request with so many positions has in all groups, while it decodes. windows: of each group."""
    columns = -(-positions // block_size)
    return sum(columns if window is None else min(columns, window_blocks(window, block_size)) for window in windows)


def most_positions(windows: Sequence[int | None], blocks: int, block_size: int) -> int:
    """How many positions a request alone may have in so many blocks; UNBOUNDED where every group frees what is behind its window,
    and the blocks of all windows are there."""
    if blocks_of_request(windows, UNBOUNDED * block_size, block_size) <= blocks:
        return UNBOUNDED
    few, many = 0, blocks + 1  # columns: too many is not far, as each group has a block for each of the first ones
    while many - few > 1:
        middle = (few + many) // 2
        if blocks_of_request(windows, middle * block_size, block_size) <= blocks:
            few = middle
        else:
            many = middle
    return few * block_size


def tokens_kept(windows: Sequence[int | None], blocks: int, block_size: int, length: int) -> int:
    """How many tokens so many blocks hold of requests of this length."""
    if windows == (None,):
        return blocks * block_size
    return blocks * length // blocks_of_request(windows, length, block_size)


GRAPH_BYTES = 8 << 20
"""Reserved for each CUDA graph, beside the memory that all share, which a trial capture of the largest of each kind measures."""


def kv_budget(fraction: float, free: int, activations: int, graphs: int) -> int:
    """Bytes of the KV cache: the fraction of the memory that is free after loading weights, less what activations and graphs take.

    The engine passes what it measured, the planner what `planner.footprint` predicts.
    """
    return int(fraction * (free - activations - graphs))

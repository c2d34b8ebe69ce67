# SPDX-License-Identifier: Apache-2.0
"""The KV blocks of requests: `RequestBlocks` is what they hold, share through the prefix cache, and give back; `KvForecast` tells
whether there are enough for what they will need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.engine.blocks import BlockPool
from phalanx.engine.host_blocks import HostBlocks
from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.messages import Stats
from phalanx.engine.prefix import extend_keys, group_key, longest_hit
from phalanx.engine.request import Request
from phalanx.engine.state_snapshots import StateSnapshots
from phalanx.layout.memory import COPIED_STATES, window_blocks


class RequestBlocks:
    """Of one dp index."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.pool = BlockPool(options.num_blocks, HostBlocks(options.host_blocks, options.copied_blocks))
        self.options, self.groups = options, len(options.windows)
        self.states = StateSnapshots(options.max_batch_size, options.state_snapshots, HostBlocks(options.host_states))

    def blocks_for(self, positions: int) -> int:
        """How many blocks of each group hold so many positions."""
        return -(-positions // self.options.block_size)

    def may_split(self, request: Request) -> bool:
        """Without chunked prefill a prompt stays whole; what a preempted request recomputes may be split all the same."""
        return self.options.chunked_prefill or len(request.tokens) > request.prompt_length

    def may_hit(self, request: Request) -> bool:
        """Whether the prefix cache is asked for its beginning."""
        every_position = request.prompt_logprobs is not None or request.params.pooling == "mean"
        return self.options.prefix_caching and not every_position

    def prefix_hit(self, request: Request) -> list[int]:
        """Blocks of the prefix cache for its beginning, as `Request.blocks`. The last token is always computed: its logits are
        needed."""
        if not self.may_hit(request):
            return []
        size = self.options.block_size
        full = (len(request.tokens) - 1) // size
        extend_keys(request.keys, request.tokens, size, full, root=request.root_key)
        longest = self.states.longest if self.options.state_snapshots else longest_hit
        return longest(self.pool, request.keys[:full], size, self.options.windows)

    def positions_of(self, hit: list[int]) -> int:
        """How many positions these blocks are for."""
        return len(hit) // self.groups * self.options.block_size

    def peak_new_blocks(self, request: Request, shared: int) -> int:
        """How many blocks the request takes before it gives any back, beyond those of its first `shared` positions."""
        needed = self.blocks_for(len(request.tokens)) - self.blocks_for(shared)
        if not self.may_split(request):
            return needed * self.groups
        return sum(
            needed if window is None else min(needed, self.blocks_for(window + self.options.max_num_tokens) + 1)
            for window in self.options.windows
        )

    def unreferenced(self, hit: list[int]) -> int:
        """How many of the blocks that `available` counts the hit takes: those without a reference, and those for what is in host
        memory."""
        return sum(block < -1 or (block >= 0 and self.pool.idle(block)) for block in hit)

    def loads_at_once(self, request: Request, hit: list[int]) -> bool:
        """Whether the next step may load all of the hit that is in host memory: the requests that run wait for no longer copies
        than of `copied_blocks`, and of COPIED_STATES."""
        on_host = len(self._on_host(hit))
        if on_host and on_host > self.options.copied_blocks - self.pool.host.loading:
            return False
        return self.states.host.loading < COPIED_STATES or not self.states.only_on_host(self._last_key(request, hit))

    def _last_key(self, request: Request, hit: list[int]) -> bytes:
        """Of the prefix that the hit is; of no prefix without a hit."""
        return request.keys[len(hit) // self.groups - 1] if hit else b""

    def load_part(self, request: Request, hit: list[int]) -> None:
        """Bring a part of a hit that does not load at once into the prefix cache with the next step, and keep what is there."""
        on_host, room = self._on_host(hit), self.options.copied_blocks - self.pool.host.loading
        self.pool.host.touch(self._keys(request, reversed(on_host)))  # and not the place of what is to come behind it
        self.states.host.touch([self._last_key(request, hit)])
        own = [block for block in hit if block >= 0]
        for block in own:
            self.pool.share(block)  # what comes shall not take its place
        own += self._load(request, hit, on_host[: max(room, 0)])
        self.pool.release(reversed(own))

    def _on_host(self, hit: list[int]) -> list[int]:
        """Which of its entries are slots of host memory."""
        return [number for number, block in enumerate(hit) if block < -1]

    def _load(self, request: Request, hit: list[int], numbers: list[int]) -> list[int]:
        """Blocks that get the contents of these entries before the next step."""
        self.pool.host.allow(len(numbers))  # for what gives way to them
        return self.pool.take_loaded([hit[number] for number in numbers], self._keys(request, numbers))

    def _keys(self, request: Request, numbers: Iterable[int]) -> list[bytes]:
        """The keys of these entries of a hit."""
        return [group_key(request.keys[number // self.groups], number % self.groups) for number in numbers]

    def share(self, request: Request, hit: list[int]) -> int:
        """Give a request that takes a slot the blocks of its prefix hit. Of what is in host memory, it gets blocks that the copies
        of the next step fill. Returns for how many positions some of its blocks came from there, and were not hit since; all where
        its state does."""
        for block in hit:
            if block >= 0:
                self.pool.share(block)
        on_host = self._on_host(hit)
        for number, block in zip(on_host, self._load(request, hit, on_host), strict=True):
            hit[number] = block
        columns = len(hit) // self.groups
        request.blocks, request.sent, request.registered = hit, 0, columns
        request.capacity = request.shared = columns * self.options.block_size
        request.first_live = [hit[group :: self.groups].count(-1) for group in range(self.groups)]
        request.kept_at = self._kept_at(request, columns)
        brought = {number // self.groups for number, block in enumerate(hit) if self.pool.first_hit(block)}
        state_loads = bool(hit and self.options.state_snapshots) and self.states.restore(request.keys[columns - 1], request.slot)
        return (columns if state_loads else len(brought)) * self.options.block_size

    def _kept_at(self, request: Request, hit: int) -> list[int]:
        """Where the request's prompt is to end a step, so that its state can be kept: behind its last full block, and, since others
        have begun like it, behind the last block that the cache has without the state. hit: blocks whose state it has."""
        if not self.options.state_snapshots or not self.may_hit(request) or not self.may_split(request):
            return []
        size, kept, last = self.options.block_size, [], hit * self.options.block_size
        full = (len(request.tokens) - 1) // size
        known = longest_hit(self.pool, request.keys[:full], size, self.options.windows)
        for position in (self.positions_of(known), full * size):
            if position - last >= self.options.least_kept:
                kept.append(position)
                last = position
        return kept

    def until_kept(self, request: Request, count: int) -> int:
        """Of the next `count` positions, those up to where the request's state is to be kept."""
        return min([count, *(position - request.submitted for position in request.kept_at if position > request.submitted)])

    def keep_state(self, request: Request) -> None:
        """Keep the state behind the step that is being made, if it ends where `share` said."""
        if request.submitted in request.kept_at:
            self.states.keep(request.slot, request.keys[request.submitted // self.options.block_size - 1])

    def take(self, request: Request, count: int) -> list[int]:
        """Take so many blocks of each group. Returns those that the ranks' block tables of the slot still lack."""
        blocks = request.blocks
        blocks += self.pool.take(count * self.groups)
        request.capacity += count * self.options.block_size
        unsent = [max(block, 0) for block in blocks[request.sent :]]  # any id will do where the window never reaches
        request.sent = len(blocks)
        return unsent

    def take_ahead(self, request: Request, positions: int, wanted: int, *, kept: int) -> list[int]:
        """As `take`: the blocks of its first `positions` positions, and those up to `wanted` as far as others find `kept`."""
        owned = request.capacity // self.options.block_size
        needed = max(0, self.blocks_for(positions) - owned)
        spare = max(0, self.pool.available // self.groups - needed - kept)
        more = max(0, self.blocks_for(wanted) - owned - needed)
        if not request.decoding:  # to compute a prompt takes longer than to copy what gives way to it
            self.pool.host.allow(needed * self.groups)
        return self.take(request, needed + min(more, spare))

    def register(self, request: Request) -> None:
        """Offer the blocks that its steps have filled, as far as their tokens are known, to the prefix cache."""
        if not self.options.prefix_caching:
            return
        # A row of a request that has ended, which the engine did not know yet, may have no blocks.
        full = min(request.submitted, len(request.tokens), request.capacity) // self.options.block_size
        if full > request.registered:
            extend_keys(request.keys, request.tokens, self.options.block_size, full, root=request.root_key)
            for group in range(self.groups):
                for index in range(request.registered, full):
                    block = request.blocks[index * self.groups + group]
                    if block >= 0:
                        self.pool.register(block, group_key(request.keys[index], group))
            request.registered = full

    def release_out_of_window(self, request: Request) -> None:
        """Release the blocks that lie entirely before the window, of their group, of its next position."""
        for group, window in enumerate(self.options.windows):
            if window is None:
                continue
            live = max(0, request.submitted - window) // self.options.block_size
            for index in range(request.first_live[group], live):
                self.pool.release((request.blocks[index * self.groups + group],))
                request.blocks[index * self.groups + group] = -1
            request.first_live[group] = max(request.first_live[group], live)

    def write(self, stats: Stats) -> None:
        """What is in host memory."""
        self.pool.host.write(stats)
        self.states.write(stats)

    def check(self, running: Iterable[Request]) -> None:
        """Verify the accounting. running: all requests with blocks. Raises EngineError."""
        self.pool.check(request.blocks for request in running)
        self.states.check()

    def forget_prefixes(self) -> None:
        """See `StepScheduler`."""
        self.pool.forget()
        self.states.forget()

    def release(self, request: Request) -> None:
        """Give all its blocks back."""
        self.register(request)
        self.pool.release(block for block in reversed(request.blocks) if block >= 0)
        request.blocks, request.capacity = [], 0


class KvForecast:
    """The KV tokens that requests will hold, if each grows by one token per step to its limit and then leaves.

    capacity: tokens that they may hold together. block_size: what one may hold beyond its tokens, since blocks are whole. windows:
    of the groups of layers, of which at least one keeps all tokens, and by the number of these tokens are counted: what a request
    has in the windows of the others is so many more.
    """

    def __init__(self, capacity: int, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self._growing = windows.count(None)
        self._block_size, self._bounded = block_size, [window for window in windows if window is not None]
        self._capacity = capacity // self._growing
        self._requests: list[tuple[int, int]] = []  # (-tokens to go, tokens now, and what it holds beside)
        self._upper_bound = 0  # what they would hold if all ended at once: at least the peak

    def add(self, tokens: int, to_go: int | None) -> None:
        """Add a request with `tokens` now and `to_go` more to its limit. None: it may end at any time, so nothing is reserved for
        its growth, and nothing is expected back from its end."""
        tokens += self._beside(tokens + (to_go or 0))
        if to_go is None:
            self._capacity -= tokens
        else:
            self._requests.append((-to_go, tokens))
            self._upper_bound += tokens + to_go

    def _beside(self, length: int) -> int:
        """What a request of this length holds beside its tokens."""
        size = self._block_size
        beside = sum(size * min(length // size + 1, window_blocks(window, size)) for window in self._bounded)
        return size + -(-beside // self._growing)

    def add_if_fits(self, tokens: int, to_go: int | None, *, shared: int = 0, force: bool = False) -> bool:
        """Whether all requests and this one would have their blocks to the end. If so, or with `force`, it is added. shared: blocks
        that it would have beside, of all groups, which nobody references yet."""
        tokens += shared * self._block_size // self._growing
        before = self._capacity, self._upper_bound
        self.add(tokens, to_go)
        if force or self._upper_bound <= self._capacity or self._peak() <= self._capacity:
            return True
        self._capacity, self._upper_bound = before
        if to_go is not None:
            self._requests.remove((-to_go, tokens + self._beside(tokens + to_go)))
        return False

    def _peak(self) -> int:
        """When a request leaves, those that stay have grown by as many tokens as it has."""
        self._requests.sort()
        peak = total = 0
        for count, (minus_to_go, tokens) in enumerate(self._requests, start=1):
            total += tokens
            peak = max(peak, total - count * minus_to_go)
        return peak


def forecast_of(running: Sequence[Request], available: int, options: SchedulerOptions) -> KvForecast | None:
    """The forecast for the running requests. available: blocks without a reference. None where each group of layers has a sliding
    window: blocks come back all the time.

    A request that only its limit ends is admitted only if there will be blocks for all of it: preemption means to compute
    everything again, which costs more than a smaller batch. For other requests nothing is reserved.
    """
    if None not in options.windows:
        return None
    size = options.block_size
    own = 0
    for group, window in enumerate(options.windows):
        if window is None:
            own += sum(request.capacity - request.shared for request in running)
        else:
            own += sum(request.capacity - max(request.shared, request.first_live[group] * size) for request in running)
    forecast = KvForecast(available * size + own, size, options.windows)
    for request in running:
        forecast.add(len(request.tokens) + request.pending - request.shared, request.to_go)
    return forecast

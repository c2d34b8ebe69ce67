# SPDX-License-Identifier: Apache-2.0
"""`KvForecast`: whether the KV cache has enough blocks for what the running requests will need."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.request import Request


class KvForecast:
    """The KV tokens that requests will hold, if each grows by one token per step to its limit and then leaves.

    capacity: tokens that they may hold together. slack: what one may hold beyond its tokens, since blocks are whole.
    """

    def __init__(self, capacity: int, slack: int) -> None:
        self._capacity, self._slack = capacity, slack
        self._requests: list[tuple[int, int]] = []  # (-tokens to go, tokens now)
        self._upper_bound = 0  # what they would hold if all ended at once: at least the peak

    def add(self, tokens: int, to_go: int | None) -> None:
        """Add a request with `tokens` now and `to_go` more to its limit. None: it may end at any time, so nothing is reserved for
        its growth, and nothing is expected back from its end."""
        if to_go is None:
            self._capacity -= tokens + self._slack
        else:
            self._requests.append((-to_go, tokens))
            self._upper_bound += tokens + to_go + self._slack

    def add_if_fits(self, tokens: int, to_go: int | None, *, force: bool = False) -> bool:
        """Whether all requests and this one would have their blocks to the end. If so, or with `force`, it is added."""
        before = self._capacity, self._upper_bound
        self.add(tokens, to_go)
        if force or self._upper_bound <= self._capacity or self._peak() <= self._capacity:
            return True
        self._capacity, self._upper_bound = before
        if to_go is not None:
            self._requests.remove((-to_go, tokens))
        return False

    def _peak(self) -> int:
        """When a request leaves, those that stay have grown by as many tokens as it has."""
        self._requests.sort()
        peak = total = 0
        for count, (minus_to_go, tokens) in enumerate(self._requests, start=1):
            total += tokens
            peak = max(peak, total + count * (self._slack - minus_to_go))
        return peak


def forecast_of(running: Sequence[Request], available: int, options: SchedulerOptions) -> KvForecast | None:
    """The forecast for the running requests. available: blocks without a reference. None with a sliding window, where blocks come
    back all the time.

    A request that only its limit ends is admitted only if there will be blocks for all of it: preemption means to compute
    everything again, which costs more than a smaller batch. For other requests nothing is reserved.
    """
    if options.window is not None:
        return None
    block_size = options.block_size
    own_blocks = sum(len(request.blocks) - request.shared for request in running)
    forecast = KvForecast((available + own_blocks) * block_size, block_size)
    for request in running:
        forecast.add(len(request.tokens) + request.pending - request.shared * block_size, request.to_go)
    return forecast

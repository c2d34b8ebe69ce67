# SPDX-License-Identifier: Apache-2.0
"""A number of equal requests at once on one replica, step by step but not token by token: what a plan's figures are made of.

The policy is the scheduler's: decodes first, then prompts in order of arrival up to max_num_tokens, as many requests as slots and
KV tokens allow. `bench.prediction.simulate` runs the scheduler itself; this takes milliseconds for any number of tokens.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import cache

from phalanx.layout.graphs import graph_sizes
from phalanx.layout.layout import max_chunk
from phalanx.planner.cost import Costs, Work
from phalanx.planner.footprint import requests_held


@dataclass(frozen=True)
class Limits:
    """Of the engine: requests at once, tokens of a step, KV tokens of one replica in requests of the load's length."""

    max_batch_size: int
    max_num_tokens: int
    kv_tokens: int


@dataclass(frozen=True)
class Outcome:
    """Seconds and rates of one replica. ttft: the median request's; ms_per_token: mean over decode steps, of one request; running:
    the most requests at once."""

    seconds: float
    ttft_s: float
    ms_per_token: float
    output_tokens_per_second: float
    running: int


@cache
def _decode_sizes(rows: int) -> tuple[int, ...]:
    return tuple(size.tokens for size in graph_sizes(rows, 0)[0])


@cache
def _mixed_sizes(most: int) -> tuple[int, ...]:
    return tuple(size.tokens for size in graph_sizes(1, most)[1])


def computed_rows(costs: Costs, rows: int, most: int) -> int:
    """Rows that a step of so many decode rows computes: those of the graph that replays it, where graphs are. most: rows of
    the largest graph."""
    return next((size for size in _decode_sizes(most) if size >= rows), rows) if costs.machine.replays_graphs else rows


def computed_tokens(costs: Costs, tokens: int, pairs: float) -> tuple[int, bool]:
    """Tokens that a step with prompts computes, and whether its kernels are launched one by one: as many as the mixed graph that
    replays it has, or its own where none does. pairs: as of `Work`."""
    if not costs.machine.replays_graphs or tokens > costs.graph_tokens or pairs > costs.graph_pairs:
        return tokens, True
    return next(size for size in _mixed_sizes(costs.graph_tokens) if size >= tokens), False


def decode_round(costs: Costs, requests: int, context: float, most: int = 512) -> float:
    """Seconds in which each of so many requests gets one token, at a mean context in tokens.

    A pipeline shares the requests out among as many steps as stages; a step follows another one through the slowest stage."""
    steps = min(costs.layout.pp, requests)
    rows = -(-requests // steps)
    stages = costs.step_seconds(Work(computed_rows(costs, rows, max(most, rows)), rows, rows * context, longest=context))
    return max(steps * max(stages), sum(stages))


def run(costs: Costs, requests: int, isl: int, osl: int, limits: Limits) -> Outcome:
    """All requests at once: prompts of isl tokens, osl tokens each.

    Steps that compute prompts are taken one by one, those that only decode until the next request ends are taken together."""
    room = max(requests_held(limits.kv_tokens, costs.layout.dp, isl + osl), 1)
    most, pp = min(requests, limits.max_batch_size, room), costs.layout.pp
    clock, done, waiting, decode_s, decode_tokens = 0.0, 0, requests, 0.0, 0.0
    left = 0.0  # when the last step left the pipeline, with prompts in it
    first: list[tuple[float, int]] = []
    ends: list[tuple[float, int]] = []  # (decode round in which they end, how many)
    rounds, decoding, partial, contexts = 0.0, 0, 0, 0.0  # partial: prompt tokens of the first waiting request that are done
    while done < requests:
        if (waiting and decoding + bool(partial) < most) or partial:
            # A step of a pipeline holds a share of the decodes, and of all requests: of those that wait, one chunk each.
            singles = -(-decoding // pp)
            budget = limits.max_num_tokens - min(singles, limits.max_num_tokens - 1)
            prompts = min(waiting, most - decoding)
            tokens = min(budget, prompts * isl - partial)
            if pp > 1:
                chunks = -(-isl // max_chunk(isl, pp))
                share = -(-min(requests, limits.max_batch_size) // pp)
                tokens = min(tokens, -(-max(share - singles, 1) * isl // chunks))
            finished, rest = divmod(partial + tokens, isl)
            pairs = tokens * (isl / 2 if tokens + partial > isl else partial + tokens / 2)
            stages = prompt_stages(costs, tokens, singles, finished, contexts * singles / max(decoding, 1), pairs)
            # A step passes the last stage after the one before it. The next one follows through the slowest stage; behind the last
            # prompt nothing follows before it has left.
            left = max(clock + sum(stages), left + stages[-1])
            more = waiting * isl - partial > tokens
            took = max(stages) if more else left - clock
            clock, partial, waiting = clock + took, rest, waiting - finished
            if decoding:
                rounds += 1 / pp
                decode_s, decode_tokens = decode_s + took * decoding, decode_tokens + decoding / pp
                contexts += decoding / pp
            if finished:
                first.append((left, finished))
                heapq.heappush(ends, (rounds + osl - 1, finished))
            decoding, contexts = decoding + finished, contexts + finished * isl
        else:
            steps = max(math.ceil(ends[0][0] - rounds), 1)
            middle = contexts / decoding + (steps - 1) / 2
            took = steps * decode_round(costs, decoding, middle, limits.max_batch_size)
            clock, rounds = clock + took, rounds + steps
            decode_s, decode_tokens, contexts = (
                decode_s + took * decoding,
                decode_tokens + steps * decoding,
                contexts + steps * decoding,
            )
        while ends and ends[0][0] <= rounds + 1e-9:
            _, count = heapq.heappop(ends)
            done, decoding, contexts = done + count, decoding - count, max(contexts - count * (isl + osl - 1), 0.0)
    per_token = 1e3 * decode_s / decode_tokens if decode_tokens else 0.0
    return Outcome(clock, _at(first, requests / 2), per_token, requests * osl / clock, most)


def prompt_stages(costs: Costs, tokens: int, singles: int, finished: int, kv: float, pairs: float) -> tuple[float, ...]:
    """Seconds that each stage takes for a step with prompts and `singles` decodes."""
    total, eager = computed_tokens(costs, tokens + singles, pairs)
    return costs.step_seconds(Work(total, singles + finished, kv, pairs, eager, kv / max(singles, 1)))


def _at(first: list[tuple[float, int]], wanted: float) -> float:
    """When the wanted-th request had its first token."""
    reached = 0
    for clock, count in first:
        reached += count
        if reached >= math.ceil(wanted):
            return clock
    return first[-1][0]

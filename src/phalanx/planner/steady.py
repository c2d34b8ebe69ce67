# SPDX-License-Identifier: Apache-2.0
"""A steady load on one replica: equal requests that come one by one, as many as keep a number of them running.

`burst` prices the same number when all come at once, which is what a load test does and few users do. `simulate` runs the scheduler
itself on such arrivals (`phalanx plan simulate poisson:RATE`); this takes microseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.planner.burst import Limits, computed_rows, decode_round, prompt_stages
from phalanx.planner.cost import Costs, Work
from phalanx.planner.footprint import requests_held


@dataclass(frozen=True)
class SteadyLoad:
    """Of one replica. ttft_s: the mean request's; inf where prompts come faster than steps take them."""

    ttft_s: float
    ms_per_token: float
    requests_per_second: float


def run(costs: Costs, requests: int, isl: int, osl: int, limits: Limits) -> SteadyLoad:
    """So many requests at once, isl tokens in and osl out each, whose prompts come at random times.

    A step that computes prompts takes longer, and delays the tokens of all other requests. A prompt waits for the rest of the step
    that runs, for one that is queued behind it, and for the prompts before it (as in a queue with random arrivals and equal
    services). How many prompts come in a step depends on how long they all take: two more rounds find it.
    """
    pp, room = costs.layout.pp, requests_held(limits.kv_tokens, costs.layout.dp, isl + osl)
    running = min(requests, limits.max_batch_size, max(room, 1))
    rows, others = -(-running // pp), (running - 1) / running  # of what goes on beside a request
    budget, context = max(limits.max_num_tokens - rows, 1), isl + osl / 2
    graph_rows = computed_rows(costs, rows, max(limits.max_batch_size, rows))
    plain = max(costs.step_seconds(Work(graph_rows, rows, rows * context, longest=context)))
    full = max(prompt_stages(costs, budget, rows, max(budget // isl, 1), rows * context, budget * min(isl, budget) / 2))
    round_seconds = decode_round(costs, running, context, limits.max_batch_size)
    prompts, ttft, around = running / osl / pp, 0.0, round_seconds  # prompts: of one step
    for _ in range(3):
        together = prompts / -math.expm1(-prompts)  # in a step that has any
        tokens = min(budget, round(min(isl, budget) * together))
        stages = prompt_stages(costs, tokens, rows, max(round(tokens / isl), 1), rows * context, tokens * isl / 2)
        mixed, part = max(stages), min(prompts * isl / tokens, 1.0)  # part: of the steps, with prompts
        around = round_seconds + others * part * pp * (mixed - plain)
        step, before = around / pp, (math.ceil(isl / budget) - 1) * mixed  # before: the last chunk of a prompt
        rest = ((1 - part) * plain**2 + part * mixed**2) / step / 2
        load = prompts * isl / budget * full / step
        if load >= 1 and running > 1:
            return SteadyLoad(math.inf, around * 1e3, 0.0)
        queue = load / (2 * (1 - load)) * (before + mixed) if running > 1 else 0.0
        ttft = others * (rest + (step if pp == 1 else 0.0) + queue) + before + sum(stages)
        prompts = running * step / (ttft + osl * around)
    return SteadyLoad(ttft, around * 1e3, running / (ttft + (osl - 1) * around))

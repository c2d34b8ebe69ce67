# SPDX-License-Identifier: Apache-2.0
"""The real scheduler on a simulated clock: what its policy costs on the throughput workload, without a GPU.

A step takes token * (tokens computed), or base if that is longer, + key * (KV tokens read) + eager with a prompt's chunk (ms).
The constants of each machine are estimates from the targets' lower bounds: they serve to compare policies.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import AddRequest, RowResult, Step, StepResult
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.errors import EngineError

BLOCK = 16


@dataclass(frozen=True)
class StepTimes:
    """ms: base of a step, more for an eager one, per token computed, per KV token read; kv_tokens: what the cache holds."""

    base: float
    eager: float
    token: float
    key: float
    kv_tokens: int

    def step_ms(self, tokens: int, keys: int, *, eager: bool) -> float:
        return max(self.base, tokens * self.token) + keys * self.key + (self.eager if eager else 0.0)


MACHINES = {
    "70b fp8 tp4, bf16 KV": StepTimes(5.0, 3.0, 0.031, 2.0e-5, 1_250_000),
    "70b fp8 tp2, bf16 KV": StepTimes(9.0, 3.0, 0.061, 3.9e-5, 530_000),
    "70b fp8 tp2, fp8 KV": StepTimes(9.0, 3.0, 0.061, 2.0e-5, 1_060_000),
    "8b bf16 tp1, bf16 KV": StepTimes(3.9, 2.0, 0.021, 3.1e-5, 810_000),
}


@dataclass
class Run:
    """What came out. output, computed: tokens. longest_ms: of a step. first_token_s: the median."""

    seconds: float
    output: int
    preemptions: int
    computed: int
    longest_ms: float
    first_token_s: float


def simulate(
    machine: StepTimes, requests: int, input_len: int, output_len: Callable[[int], tuple[int, int]], *, ignore_eos: bool = True
) -> Run:
    """Queue all requests at once and run them to their ends. output_len(i): (max_tokens of request i, where it stops by itself)."""
    scheduler = Scheduler(
        SchedulerOptions(
            num_blocks=machine.kv_tokens // BLOCK, block_size=BLOCK, max_batch_size=512, max_num_tokens=8192, max_seq_len=8192,
            prefix_caching=False,
        )
    )  # fmt: skip
    ends: dict[str, int] = {}
    for number in range(requests):
        most, stop = output_len(number)
        ends[str(number)] = stop
        params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=ignore_eos)
        scheduler.add(AddRequest(str(number), [1] * input_len, params, [] if ignore_eos else [2], [] if ignore_eos else [2]))
    clock = longest = 0.0
    produced: dict[str, int] = {}
    first: dict[str, float] = {}
    computed = output = 0
    flying: deque[tuple[Step, float]] = deque()
    while not scheduler.idle:
        while (step := scheduler.schedule()) is not None:
            rows = step.batches[0].rows
            tokens = sum(row.count for row in rows)
            took = machine.step_ms(tokens, sum(row.start for row in rows), eager=any(row.count > 1 for row in rows))
            computed, longest, clock = computed + tokens, max(longest, took), clock + took
            flying.append((step, clock))
        if not flying:
            raise EngineError("requests are open", held="and no step is made", why="the scheduler stands still")
        step, at = flying.popleft()
        names = {request.slot: request.id for request in scheduler.running}
        results = []
        for row in step.batches[0].rows:
            name = names.get(row.slot, "")
            count = produced.get(name, 0) + 1
            token = 2 if count == ends.get(name) and not ignore_eos else 1
            results.append(RowResult(tokens=[token] if row.samples else []))
        for update in scheduler.process_result(StepResult(step.number, [results])):
            produced[update.request_id] = produced.get(update.request_id, 0) + 1
            first.setdefault(update.request_id, at)
            output += 1
    waits = sorted(first.values())
    return Run(clock / 1e3, output, scheduler.counters.preemptions, computed, longest, waits[len(waits) // 2] / 1e3)


def thousand(_: int) -> tuple[int, int]:
    """The throughput workload: nothing but the limit ends a request."""
    return 1000, 1000


def chat(number: int) -> tuple[int, int]:
    """max_tokens far above what comes: 2,048 asked for, 100 to 900 taken."""
    return 2048, random.Random(number).randint(100, 900)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--record", action="store_true", help="keep the figures in benchmarks/results")
    args = parser.parse_args()
    runs: dict[str, Any] = {}
    print(f"{'':38} {'tok/s':>8} {'seconds':>8} {'preempted':>9} {'recomputed':>10} {'longest ms':>10} {'first token s':>13}")
    for name, machine in MACHINES.items():
        works = {
            f"{args.requests} x 1000 / 1000": (thousand, True),
            "x 1000 / stop at 100..900 of 2048": (chat, False),
        }
        for work, (lengths, certain) in works.items():
            run = simulate(machine, args.requests, 1000, lengths, ignore_eos=certain)
            again = run.computed - (args.requests * 1000 + run.output - args.requests)
            runs[f"{name}: {work}"] = {**vars(run), "output_tok_s": run.output / run.seconds, "recomputed": again}
            print(
                f"{name + ': ' + work[:24]:46} {run.output / run.seconds:8.0f} {run.seconds:8.1f} {run.preemptions:9} {again:10} "
                f"{run.longest_ms:10.0f} {run.first_token_s:13.1f}"
            )
    if args.record:
        from benchmarks import harness

        print(f"written: {harness.write('engine_policy_model', {'asked': vars(args), 'runs': runs}).relative_to(harness.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

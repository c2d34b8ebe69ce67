# SPDX-License-Identifier: Apache-2.0
"""Hand-made steps for an executor or a runner, without the scheduler: `Drive`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from phalanx.config.options import EngineOptions
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import RowResult, SlotAssignment, Step, StepBatch, StepResult, StepRow, row_result
from phalanx.executor.rank_executor import RankExecutor

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 4


def options(folder: Path, **overrides: Any) -> EngineOptions:
    """Concrete options of a tiny engine on CPU."""
    fields: dict[str, Any] = {
        "model": str(folder), "device": "cpu", "dtype": "fp32", "kv_cache_dtype": "model", "max_batch_size": 4,
        "max_num_tokens": 64, "max_seq_len": 128, "kv_block_size": BLOCK, "kv_cache_bytes": 1 << 30, "cuda_graphs": False,
        "start_timeout": 200.0, "state_snapshots": 0, **overrides,
    }  # fmt: skip
    return EngineOptions(**fields)


def expected(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' greedy continuation."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=2)
    return [int(token) for token in out[0, len(prompt) :]]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3, 380) for _ in range(chance.randint(5, 23))] for _ in range(count)]


def await_results(collect: Callable[[], list[StepResult]], count: int, seconds: float = 100.0) -> list[StepResult]:
    results: list[StepResult] = []
    deadline = time.monotonic() + seconds
    while len(results) < count:
        results += collect()
        assert time.monotonic() < deadline, f"{len(results)} of {count} steps ended in {seconds} s"
        time.sleep(0.001)
    return results


def pids(executor: RankExecutor) -> list[int]:
    """The processes of its ranks, on this host."""
    return [handle.pid for handle in executor._handles.values()]


def all_gone(rank_pids: list[int], seconds: float = 10.0) -> bool:
    """Whether these processes end in that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in rank_pids):
            return True
        time.sleep(0.02)
    return False


class Drive:
    """Submits steps through `submit` and takes their results through `collect`; numbers go on from call to call."""

    def __init__(
        self, submit: Callable[[Step], None], collect: Callable[[], list[StepResult]], *, blocks: int = 100, block: int = BLOCK
    ) -> None:  # fmt: skip
        self._submit, self._collect, self._block = submit, collect, block
        self._blocks = list(range(blocks))
        random.Random(3).shuffle(self._blocks)
        self.number = 0

    def step(self, batch: StepBatch) -> None:
        self.number += 1
        self._submit(Step(self.number, [batch]))

    def run(self, batch: StepBatch) -> list[RowResult]:
        self.step(batch)
        (result,) = await_results(self._collect, 1)
        assert result.number == self.number
        return [row_result(output) for output in result.batches[0]]

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, *, chunk: int = 64, ahead: bool = False,
        params: SamplingParams = GREEDY, adapters: Sequence[int] = (),
    ) -> list[list[int]]:  # fmt: skip
        """Greedy tokens of all prompts together: prefills in chunks, then decodes. `ahead`: rows name no tokens but take those that
        the step before, still in flight, sampled into the slots. adapters: the slot of each prompt's, -1 for none."""
        tables: list[list[int]] = [[] for _ in prompts]
        free = list(self._blocks)

        def grow(slot: int, length: int) -> list[int]:
            new = [free.pop() for _ in range(-(-length // self._block) - len(tables[slot]))]
            tables[slot] += new
            return new

        tokens: list[list[int]] = [[] for _ in prompts]
        admitted, adapted = [], max(adapters, default=-1) >= 0
        for slot, (prompt, adapter) in enumerate(zip(prompts, adapters or [-1] * len(prompts), strict=True)):
            admitted.append(SlotAssignment(slot, list(prompt), len(prompt), params, seed=1, adapter=adapter))
        for begin in range(0, max(map(len, prompts)), chunk):
            rows = []
            for slot, prompt in enumerate(prompts):
                part = list(prompt[begin : begin + chunk])
                if part:
                    end = begin + len(part)
                    rows.append(StepRow(slot, begin, len(part), part, grow(slot, end), samples=end == len(prompt)))
            results = self.run(StepBatch(admitted=admitted, rows=rows, adapted=adapted))
            admitted = []
            for row, result in zip(rows, results, strict=True):
                assert len(result.tokens) == row.samples
                tokens[row.slot] += result.tokens
        in_flight = 0
        for number in range(count - 1):
            rows = []
            for slot, prompt in enumerate(prompts):
                at = len(prompt) + number
                rows.append(StepRow(slot, at, 1, [] if ahead else [tokens[slot][-1]], grow(slot, at + 1), samples=True))
            self.step(StepBatch(rows=rows, adapted=adapted))
            in_flight += 1
            for result in await_results(self._collect, in_flight - 1 if ahead else in_flight):
                in_flight -= 1
                for slot, row in enumerate(result.batches[0]):
                    tokens[slot] += row_result(row).tokens
        for result in await_results(self._collect, in_flight):
            for slot, row in enumerate(result.batches[0]):
                tokens[slot] += row_result(row).tokens
        self.run(StepBatch(released=list(range(len(prompts)))))
        return tokens

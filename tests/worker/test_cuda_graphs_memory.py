# SPDX-License-Identifier: Apache-2.0
"""Steps from graphs in a steady state take no new memory: on the device, and what the host keeps for its copies."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from pathlib import Path

import pytest
import torch

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, StepBatch, StepRow
from phalanx.models.batch import Batch
from phalanx.models.layers.attention.backend import AttentionPlan
from phalanx.worker.model_runner import ModelRunner, StepOutput
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import prompts
from tests.support.worker_graphs import TOKENS, Fixed, requests, serve
from tests.support.worker_profiled_runner import BLOCK, LONGEST, SLOTS, made_runner

KINDS = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1)}


def decode(runner: ModelRunner, params: SamplingParams, steps: int) -> None:
    """One step ahead, as the engine keeps it; all slots, so that new blocks come at every step."""
    next_block = iter(range(10**9))
    prompt_ids = [prompt[: 3 + number % BLOCK] for number, prompt in enumerate(prompts(SLOTS, seed=4))]
    blocks = len(prompt_ids) * -(-(max(map(len, prompt_ids)) + steps) // BLOCK)
    under_way: deque[StepOutput] = deque()
    for number in range(-1, steps):
        rows = []
        for slot, prompt in enumerate(prompt_ids):
            at = len(prompt) + number
            if number < 0:
                rows.append(StepRow(slot, 0, len(prompt), prompt, [next(next_block) % blocks], samples=True))
            else:
                rows.append(StepRow(slot, at, 1, [], [next(next_block) % blocks] if at % BLOCK == 0 else [], samples=True))
        admitted = (
            [SlotAssignment(slot, prompt, len(prompt), params, slot) for slot, prompt in enumerate(prompt_ids)]
            if number < 0
            else []
        )
        rows.sort(key=lambda row: row.count)
        under_way.append(runner.run(StepBatch(admitted=admitted, rows=rows)))
        if len(under_way) > 1:
            under_way.popleft().results()
    under_way.popleft().results()
    runner.run(StepBatch(released=list(range(SLOTS)))).results()


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_keeps_what_it_has(tmp_path: Path, kind: str) -> None:
    runner = made_runner(write_checkpoint(tmp_path / "llama", "llama"), torch.device("cpu"), torch.float32)
    sampler = runner._sampler
    assert sampler is not None
    decode(runner, KINDS[kind], 3)
    free = [id(home) for home in sampler._pinned._free]
    decode(runner, KINDS[kind], 20)
    assert sorted(id(home) for home in sampler._pinned._free) == sorted(free)


def test_a_step_leaves_nothing_for_the_garbage_collector(tmp_path: Path) -> None:
    """What it held on the device is free when it has ended."""
    runner = made_runner(write_checkpoint(tmp_path / "llama", "llama"), torch.device("cpu"), torch.float32)

    def batches() -> int:
        return sum(type(each) is Batch for each in gc.get_objects())

    gc.collect()
    before = batches()
    assert before > 0, "graphs keep theirs"
    gc.disable()
    try:
        decode(runner, KINDS["sampled"], 3)
        assert batches() == before
    finally:
        gc.enable()


def test_a_plan_is_gone_with_its_forward(tmp_path: Path) -> None:
    """What it found out on the device is then free for the next graph, and memory does not fall in the midst of steps."""
    plans: list[weakref.ref[AttentionPlan]] = []

    class Watched(Fixed):
        def plan(self, batch: Batch) -> AttentionPlan:  # type: ignore[override]
            plan = super().plan(batch)
            plans.append(weakref.ref(plan))
            return plan

    gc.disable()
    try:
        folder = write_checkpoint(tmp_path / "llama", "llama")
        runner = made_runner(folder, torch.device("cpu"), torch.float32, tokens=TOKENS, attention=Watched())
        captured = len(plans)
        decode(runner, KINDS["sampled"], 3)
        assert len(plans) > captured > len(runner.graphs.sizes if runner.graphs else [])
        assert [plan() for plan in plans if plan() is not None] == []
    finally:
        gc.enable()


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_steps_take_no_memory_from_the_device(tmp_path: Path, kind: str) -> None:
    device = torch.device("cuda", 0)
    folder = write_checkpoint(
        tmp_path / "llama", "llama", hidden_size=512, num_attention_heads=8, num_key_value_heads=8, head_dim=64, std=0.05
    )
    runner = made_runner(folder, device, torch.bfloat16)
    assert runner.graphs is not None
    decode(runner, KINDS[kind], 50)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)
    decode(runner, KINDS[kind], 1000)
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    for name in ("segment.all.allocated", "segment.all.freed", "num_alloc_retries", "num_ooms", "num_device_alloc"):
        assert after.get(name) == before.get(name), name
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    host = torch.cuda.host_memory_stats()
    decode(runner, KINDS[kind], 100)
    assert torch.cuda.host_memory_stats().get("segment.allocated") == host.get("segment.allocated")


@pytest.mark.gpu1
def test_steps_of_any_rows_take_no_memory_from_the_device(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    folder = write_checkpoint(
        tmp_path / "llama", "llama", hidden_size=512, num_attention_heads=8, num_key_value_heads=8, head_dim=64, std=0.05
    )
    runner = made_runner(folder, device, torch.bfloat16, tokens=TOKENS)
    assert runner.graphs is not None
    assert runner.graphs.mixed_buffers is not None
    sizes = {"block_size": BLOCK, "max_batch_size": SLOTS, "max_seq_len": LONGEST, "num_blocks": 100}
    arrivals = [each for each in requests(3, count=40) if each[1].params.prompt_logprobs is None]
    serve([runner], arrivals, **sizes)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)
    for _ in range(4):
        serve([runner], arrivals, **sizes)
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    for name in ("segment.all.allocated", "segment.all.freed", "num_alloc_retries", "num_ooms", "num_device_alloc"):
        assert after.get(name) == before.get(name), name
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]

# SPDX-License-Identifier: Apache-2.0
"""Data-parallel indices that replay the same graph in each step, on CPU: `EagerCapturer` does again what a CUDA graph would replay,
on the same tensors."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from phalanx.comm.local import LocalWorld
from phalanx.engine.dp_scheduler import DpScheduler
from phalanx.engine.messages import AddRequest, RequestUpdate, Step, StepResult
from phalanx.engine.scheduler import SchedulerOptions
from phalanx.worker.model_runner import ModelRunner
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.engine_drive import BLOCK
from tests.support.worker_graphs import SLOTS, TOKENS, Steps, alike, put_references, requests, serve, step_runner

INDICES = 2
Updates = dict[str, list[RequestUpdate]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dp") / "mixtral", "mixtral", num_hidden_layers=2)


def runners_of(folder: Path, world: LocalWorld, capturers: list[Any]) -> list[ModelRunner]:
    return world.run(lambda group: step_runner(folder, capturers[group.rank], dp=group))


def serve_together(
    world: LocalWorld, runners: list[ModelRunner], coming: list[tuple[int, AddRequest]]
) -> tuple[Updates, list[Step]]:
    """As `worker_graphs.serve`, for several indices."""
    scheduler = DpScheduler(
        SchedulerOptions(
            num_blocks=30, block_size=BLOCK, max_batch_size=SLOTS, max_num_tokens=TOKENS, max_seq_len=128, vocab_size=VOCAB_SIZE
        ),
        INDICES,
    )
    queue, results, steps, turn = deque(coming), deque[StepResult](), list[Step](), 0
    updates: Updates = {add.request_id: [] for _, add in coming}
    while queue or not scheduler.idle:
        while queue and queue[0][0] <= turn:
            scheduler.add(queue.popleft()[1])
        while (step := scheduler.schedule()) is not None:
            steps.append(step)
            parts = world.run(lambda group, step=step: runners[group.rank].run(step.batches[group.rank], step.extent).results()[0])
            results.append(StepResult(step.number, parts))  # type: ignore[arg-type]
        for update in scheduler.process_result(results.popleft()) if results else []:
            assert isinstance(update, RequestUpdate)
            updates[update.request_id].append(update)
        turn += 1
        assert turn < 2000
    scheduler.check()
    return updates, steps


@pytest.mark.parametrize("seed", [0, 1])
def test_answers_equal_those_of_one_rank_without_graphs(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put_references(monkeypatch)
    coming = requests(seed, count=12)
    expected, _ = serve([step_runner(folder, None)], coming)
    world, capturers = LocalWorld(INDICES), [Steps(), Steps()]
    updates, steps = serve_together(world, runners_of(folder, world, capturers), coming)
    alike(updates, expected)
    assert capturers[0].sized == capturers[1].sized  # every index replays the same sizes, also without rows
    assert sum(capturers[0].replays.values()) == len(steps)
    assert capturers[0].mixed
    assert any(not batch.rows for step in steps for batch in step.batches)
    eager = runners_of(folder, world, [None, None])
    without_graphs, _ = serve_together(world, eager, coming)
    alike(without_graphs, expected)


def test_experts_see_tokens_and_no_padding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_references(monkeypatch)
    world = LocalWorld(INDICES)
    runners = runners_of(folder, world, [Steps(), Steps()])
    blocks = [layer.mlp for runner in runners for layer in runner._model.layers]
    for block in blocks:
        block.load.zero_()  # of the captures
    _, steps = serve_together(world, runners, requests(3, count=5))
    tokens = sum(row.count for step in steps for batch in step.batches for row in batch.rows)
    layers, per_token = len(runners[0]._model.layers), blocks[0].config.per_token
    assert sum(int(block.load.sum()) for block in blocks) == tokens * layers * per_token

# SPDX-License-Identifier: Apache-2.0
"""Data-parallel indices that replay the same graph in each step, on CPU: `EagerCapturer` does again what a CUDA graph would replay,
on the same tensors."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.engine.dp_scheduler import DpScheduler
from phalanx.engine.messages import AddRequest, RequestUpdate, Step, StepResult
from phalanx.engine.scheduler import SchedulerOptions
from phalanx.worker.model_runner import ModelRunner
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.engine_drive import BLOCK
from tests.support.worker_drafts import K, KnownAnswers, answers_of, require_alike
from tests.support.worker_graphs import SLOTS, TOKENS, Steps, alike, requests, serve, step_runner

INDICES = 2
Updates = dict[str, list[RequestUpdate]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dp") / "mixtral", "mixtral", num_hidden_layers=2)


def runners_of(folder: Path, world: LocalWorld, capturers: list[Any], proposers: list[Any] | None = None) -> list[ModelRunner]:
    def make(group: Group) -> ModelRunner:
        drafting = {"max_drafts": K, "proposer": proposers[group.rank]} if proposers else {}
        return step_runner(folder, capturers[group.rank], dp=group, **drafting)

    return world.run(make)


def serve_together(
    world: LocalWorld, runners: list[ModelRunner], coming: list[tuple[int, AddRequest]], max_drafts: int = 0
) -> tuple[Updates, list[Step]]:
    """As `worker_graphs.serve`, for several indices."""
    scheduler = DpScheduler(
        SchedulerOptions(
            num_blocks=30,
            block_size=BLOCK,
            max_batch_size=SLOTS,
            max_num_tokens=TOKENS,
            max_seq_len=128,
            vocab_size=VOCAB_SIZE,
            max_drafts=max_drafts,
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


@pytest.mark.usefixtures("attention_by_reference")
@pytest.mark.parametrize("seed", [0, 1])
def test_answers_equal_those_of_one_rank_without_graphs(folder: Path, seed: int) -> None:
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


@pytest.mark.usefixtures("attention_by_reference")
@pytest.mark.parametrize("graphs", [False, True])
def test_indices_verify_drafts(folder: Path, graphs: bool) -> None:
    coming = requests(5, count=10)
    expected, _ = serve([step_runner(folder, None)], coming)
    world, capturers = LocalWorld(INDICES), [Steps(rows=(1 + K) * SLOTS) if graphs else None for _ in range(INDICES)]
    proposers = [KnownAnswers(answers_of(coming, expected), 0.8, seed) for seed in range(INDICES)]
    updates, steps = serve_together(world, runners_of(folder, world, capturers, proposers), coming, max_drafts=K)
    require_alike(updates, expected)
    assert not graphs or capturers[0].sized == capturers[1].sized  # type: ignore[union-attr]
    verifying = [step for step in steps if any(row.drafts for batch in step.batches for row in batch.rows)]
    assert any(not batch.rows for step in verifying for batch in step.batches)


@pytest.mark.usefixtures("attention_by_reference")
def test_experts_see_tokens_and_no_padding(folder: Path) -> None:
    world = LocalWorld(INDICES)
    runners = runners_of(folder, world, [Steps(), Steps()])
    blocks = [layer.mlp for runner in runners for layer in runner._model.layers]
    for block in blocks:
        block.load.zero_()  # of the captures
    _, steps = serve_together(world, runners, requests(3, count=5))
    tokens = sum(row.count for step in steps for batch in step.batches for row in batch.rows)
    layers, per_token = len(runners[0]._model.layers), blocks[0].config.per_token
    assert sum(int(block.load.sum()) for block in blocks) == tokens * layers * per_token

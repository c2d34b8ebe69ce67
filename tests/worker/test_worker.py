# SPDX-License-Identifier: Apache-2.0
"""Real rank processes over gloo: greedy tokens equal transformers' in every layout."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from phalanx.engine.messages import DECODE_GRAPH, MIXED_GRAPH, RankFacts, RowOutput, Step, StepBatch
from phalanx.executor.protocol import Stop
from phalanx.executor.rank_executor import RankExecutor
from phalanx.layout.rank_progress import RankProgress
from phalanx.worker.worker import Worker
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import Drive, expected, options, prompts

pytestmark = pytest.mark.usefixtures("forked_python")

LAYOUTS = [(2, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("worker") / "qwen3", "qwen3", num_hidden_layers=3)


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"tp{layout[0]}-pp{layout[1]}")
def pool(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[RankExecutor, list[RankFacts], int, Drive]]:
    tp, pp = request.param
    executor = RankExecutor(options(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, kv_cache_bytes=300_000))
    assert isinstance(executor, RankExecutor)
    facts, blocks = executor.start()
    yield executor, facts, blocks, Drive(executor.submit, executor.collect, blocks=min(blocks, 100))
    executor.shutdown()


Pool = tuple[RankExecutor, list[RankFacts], int, Drive]


def test_greedy_tokens_equal_transformers(pool: Pool, folder: Path) -> None:
    *_, drive = pool
    prompt_ids = prompts(4, seed=1)
    assert drive.generate(prompt_ids, 6, chunk=9) == [expected(folder, prompt, 6) for prompt in prompt_ids]


def test_steps_run_ahead_of_the_host(pool: Pool, folder: Path) -> None:
    """With stages, the host must know a token before it schedules the next one."""
    executor, facts, _, drive = pool
    prompt_ids = prompts(3, seed=5)
    assert executor.depth == 2
    one_stage = len({rank.layers for rank in facts}) == 1
    assert drive.generate(prompt_ids, 6, ahead=one_stage) == [expected(folder, prompt, 6) for prompt in prompt_ids]


def test_each_rank_reports_what_it_holds(pool: Pool) -> None:
    executor, facts, blocks, _ = pool
    assert [rank.rank for rank in facts] == list(range(len(facts)))
    stages = sorted({rank.layers for rank in facts})
    assert stages[0][0] == 0
    assert stages[-1][1] == 3
    assert all(before[1] == after[0] for before, after in pairwise(stages))
    for rank in facts:
        assert rank.bytes["weights"] > 0
        # Every rank has the same number of blocks: as many as the rank with the most layers and heads can hold.
        assert 0 < rank.bytes["kv"] <= 300_000
        assert {"import torch", "load weights", "form groups"} <= rank.phases.keys()
    assert blocks >= 100
    by_rank, calls, *_ = executor.stats()
    assert by_rank.keys() == set(range(len(facts)))
    assert all(count > 0 for count in calls.values())


def test_rank_0_counts_how_the_engines_steps_ran(pool: Pool) -> None:
    """Its heartbeat reports them once a second. On CPU there are no graphs."""
    executor, *_, drive = pool
    prompt_ids, end = prompts(2, seed=7), time.monotonic() + 30
    before = counted(executor, end)
    drive.generate(prompt_ids, 5)
    tokens = sum(map(len, prompt_ids)) + 2 * 4
    while (after := counted(executor, end))["eager/tokens"] < before["eager/tokens"] + tokens:
        assert time.monotonic() < end
    assert after["eager/tokens"] == before["eager/tokens"] + tokens
    assert after["eager/steps"] == before["eager/steps"] + 5
    graphs = {name: count for name, count in after.items() if name.partition("/")[0] in (DECODE_GRAPH, MIXED_GRAPH)}
    assert len(graphs) == 6
    assert set(graphs.values()) == {after["eager/padding"]} == {0}


def counted(executor: RankExecutor, end: float) -> dict[str, int]:
    """The counts in the next heartbeat of rank 0 that has some."""
    counts_before = executor.stats().ran
    while (counts := executor.stats().ran) is counts_before or "eager/steps" not in counts:
        assert time.monotonic() < end
        time.sleep(0.02)
        executor.collect()
    return counts


class Later:
    """An outcome that the device comes to once it has been asked for so often."""

    def __init__(self, queries: int) -> None:
        self.left = queries

    @property
    def ready(self) -> bool:
        self.left -= 1
        return self.left < 0

    def outputs(self) -> tuple[list[RowOutput], int]:
        assert self.left < 0, "it would wait for the device"
        return [5], 7


class Line:
    """A rank's line on which these messages come, each once the rank is ready to listen for so long that it would see results."""

    def __init__(self, *messages: object) -> None:
        self.messages = list(messages)
        self.replies: list[object] = []
        self.patience: list[float | None] = []
        self.progress = RankProgress()
        self.digest = bytes(16)

    def send(self, message: object) -> None:
        self.replies.append(message)

    def receive(self, seconds: float | None = None) -> object:
        self.patience.append(seconds)
        if not self.messages or (isinstance(self.messages[0], Stop) and seconds is not None):
            return None
        return self.messages.pop(0)


def test_results_that_come_while_a_step_is_queued_layer_by_layer_are_reported_then(folder: Path) -> None:
    line = Line(Step(1, [StepBatch()]), Step(2, [StepBatch()]), Stop())
    worker = Worker({"options": options(folder).model_dump(mode="json"), "rank": 0}, line)  # type: ignore[arg-type]
    events: list[str] = []
    line.send = lambda message: events.append(f"done {message.number}")  # type: ignore[attr-defined,method-assign]

    class Runs:
        def run(self, step: StepBatch, extent: object) -> Later:
            for layer in range(4):
                line.progress.enter_layer(layer)
                events.append(f"layer {layer}")
            return Later(queries=4)

    try:
        worker._serve(Runs())  # type: ignore[arg-type]
    finally:
        gc.unfreeze()
    layers = [f"layer {layer}" for layer in range(4)]
    assert events == [*layers, *layers[:2], "done 1", *layers[2:], "done 2"]
    assert line.progress.between_layers is None


def test_a_rank_queues_steps_before_it_reports_and_never_waits_for_the_device(folder: Path) -> None:
    line = Line(Step(1, [StepBatch()]), Step(2, [StepBatch()]), Stop())
    worker = Worker({"options": options(folder).model_dump(mode="json"), "rank": 0}, line)  # type: ignore[arg-type]
    events: list[str] = []

    class Runs:
        def run(self, step: StepBatch, extent: object) -> Later:
            events.append("run")
            line.send = lambda message: events.append(f"done {message.number}")  # type: ignore[attr-defined,method-assign]
            return Later(queries=6)

    try:
        worker._serve(Runs())  # type: ignore[arg-type]
    finally:
        gc.unfreeze()
    assert events == ["run", "run", "done 1", "done 2"]
    assert line.progress.finished == 2
    assert line.patience[0] is None, "without work it sleeps until something comes"
    between = [seconds for seconds in line.patience if seconds is not None]
    assert 0 < max(between) < 1e-3, "with work it looks at the device many times a millisecond"
    assert between.count(0.0) <= 4, "and does not spin"

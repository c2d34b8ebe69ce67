# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose last stage returns tokens to the first: every request gets the tokens that it gets without that, while its steps
are scheduled before they are known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.dp_scheduler import DpScheduler
from phalanx.engine.limits import SchedulerOptions, depth_of
from phalanx.engine.messages import AddRequest, RequestUpdate, StepRow
from phalanx.engine.scheduler import Scheduler
from phalanx.executor.launcher import LocalLauncher
from phalanx.executor.rank_executor import RankExecutor
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.token_return import FIRST, LAST, TokenReturn
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.engine_client import each_update
from tests.support.engine_drive import BLOCK, await_results, options
from tests.support.worker_graphs import BLOCKS, Counting, Stage, alike, requests, serve, step_runner

pytestmark = pytest.mark.usefixtures("forked_python")

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("returned") / "llama", "llama", num_hidden_layers=LAYERS)


# ---- stages in one process -----------------------------------------------------------------------------------------------


class Ends:
    """The first and the last stage in one process, one step after the other. The first receives the latest tokens that it may count
    on: as they were `stages` steps ago. log: of what was called."""

    size = 2

    def __init__(self, rank: int, stages: int, history: list[Tensor], log: list[str]) -> None:
        self.rank, self._stages, self._history, self._log = rank, stages, history, log

    def send(self, x: Tensor, to: int) -> None:
        assert (self.rank, to) == (LAST, FIRST)
        self._log.append("send")

    def receive(self, x: Tensor, source: int) -> Tensor:
        assert (self.rank, source) == (FIRST, LAST)
        self._log.append("receive")
        return x.copy_(self._history[-self._stages])


def pipeline(folder: Path, capturers: Sequence[Counting | None], log: list[str] | None) -> list[ModelRunner]:
    stages, lanes, history = len(capturers), [deque[Tensor]() for _ in capturers], list[Tensor]()
    cuts = [LAYERS * at // stages for at in range(stages + 1)]
    runners = []
    for at, capturer in enumerate(capturers):
        rank = {0: FIRST, stages - 1: LAST}.get(at)
        ends = None if log is None or rank is None else Ends(rank, stages, history, log)
        runners.append(step_runner(folder, capturer, range(cuts[at], cuts[at + 1]), Stage(at, lanes), ends=ends))
    run = runners[-1].run
    runners[-1].run = lambda step: (run(step), history.append(runners[-1]._last_tokens.clone()))[0]  # type: ignore[method-assign]
    return runners


@pytest.mark.usefixtures("attention_by_reference")
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("graphs", [False, True])
def test_stages_forward_tokens_that_only_the_device_knows(folder: Path, stages: int, graphs: bool) -> None:
    capturers, log = [Counting() if graphs else None for _ in range(stages)], list[str]()
    runners, arrivals = pipeline(folder, capturers, log), requests(5, count=24)
    returned = {"returns_tokens": True, "depth": depth_of(stages, returns_tokens=True), "num_blocks": BLOCKS}
    outputs, scheduler = serve(runners, arrivals, **returned)
    assert log == ["receive", "send"] * (len(log) // 2)
    assert scheduler.counters.steps / 2 < len(log) / 2 < scheduler.counters.steps
    if graphs:
        assert all(sum(capturer.replays.values()) > scheduler.counters.steps / 2 for capturer in capturers if capturer)
    alike(outputs, serve(pipeline(folder, [None] * stages, None), arrivals, num_blocks=BLOCKS, depth=stages)[0])


class FakeEvent:
    """step: how many steps had been queued when it was recorded."""

    step = 0

    def __init__(self, queued: list[int]) -> None:
        self._queued = queued

    def record(self) -> None:
        self.step = self._queued[0]


class FakeStream:
    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def wait_event(self, event: FakeEvent) -> None:
        self._log.append(event.step)


class OnGpu:
    """As much of a tensor on a GPU as is looked at."""

    is_cuda, device = True, "cuda:0"


@pytest.mark.parametrize("stages", [2, 3])
def test_on_a_gpu_the_last_stage_sends_once_the_step_of_so_many_stages_ago_has_ended(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    log, queued, tokens = list[Any](), [0], OnGpu()
    side = FakeStream(log)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(queued))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(log.append("side" if stream is side else "?")))

    class Group:
        rank, size = LAST, 2

        def send(self, x: object, to: int) -> None:
            assert (x, to) == (tokens, FIRST)
            log.append("send")

    end = TokenReturn(Group(), tokens, stages)  # type: ignore[arg-type]
    for step in range(1, 9):
        if step != 5:
            end.return_tokens()
            assert log == ["side", max(step - stages, 0), "send"]
        log.clear()
        queued[0] = step
        end.step_queued()


# ---- stages in processes -------------------------------------------------------------------------------------------------

LIMITS = SchedulerOptions(
    num_blocks=60, block_size=BLOCK, max_batch_size=8, max_num_tokens=24, max_seq_len=128, vocab_size=VOCAB_SIZE
)  # fmt: skip


def some_requests() -> list[AddRequest]:
    """Greedy ones and others, with prompts that begin alike, prompts of several chunks, and stop tokens that end some of them."""
    chance = random.Random(3)
    beginning = [chance.randrange(3, 380) for _ in range(17)]
    adds = []
    for number in range(20):
        prompt = [chance.randrange(3, 380) for _ in range(chance.choice((2, 9, 40)))]
        prompt = prompt if number % 3 else beginning + prompt
        params = SamplingParams(
            temperature=number % 2 * 0.8, seed=number, max_tokens=chance.randint(20, 50), presence_penalty=number % 4 * 0.2
        )
        adds.append(AddRequest(str(number), prompt, params, sorted({chance.randrange(VOCAB_SIZE) for _ in range(9)})))
    return adds


class Served:
    """The updates of requests that ranks have computed, and all rows of the steps."""

    def __init__(self, executor: RankExecutor, limits: SchedulerOptions, stages: int, indices: int = 1) -> None:
        self.rows: list[StepRow] = []
        self.empty = 0  # steps without rows
        self.updates: dict[str, list[RequestUpdate]] = {}
        limits = replace(limits, pipeline_stages=stages, depth=executor.depth, returns_tokens=executor.returns_tokens)
        self.scheduler = Scheduler(limits) if indices == 1 else DpScheduler(limits, indices)
        executor.start()
        try:
            self._serve(executor)
        finally:
            executor.shutdown()
        self.scheduler.check()

    def _serve(self, executor: RankExecutor) -> None:
        coming, scheduler, ended, aborted = deque(some_requests()), self.scheduler, 0, False
        while coming or not scheduler.idle:
            for _ in range(min(3, len(coming))):
                scheduler.add(coming.popleft())
            if ended >= 20 and not aborted:  # several results may come at once
                aborted = True
                for request in list(scheduler.running)[::4]:
                    scheduler.abort(request.id)
            while (step := scheduler.schedule()) is not None:
                rows = [row for batch in step.batches for row in batch.rows]
                self.rows += rows
                self.empty += not rows
                executor.submit(step)
            for result in await_results(executor.collect, 1) if scheduler.steps_in_flight else []:
                ended += 1
                for update in each_update(scheduler.process_result(result)):
                    assert isinstance(update, RequestUpdate)
                    self.updates.setdefault(update.request_id, []).append(update)

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: [token for update in updates for token in update.tokens] for name, updates in self.updates.items()}

    @property
    def reasons(self) -> dict[str, str | None]:
        return {name: updates[-1].finish_reason for name, updates in self.updates.items()}


def equal_tokens(one: Served, other: Served) -> None:
    """Requests that were aborted, at different tokens, have those that came before."""
    for add in some_requests():
        tokens, others = one.tokens.get(add.request_id, []), other.tokens.get(add.request_id, [])
        if one.reasons.get(add.request_id) and other.reasons.get(add.request_id):
            assert tokens == others, add.request_id
        else:
            count = min(len(tokens), len(others))
            assert tokens[:count] == others[:count], add.request_id


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 3)])
def test_ranks_give_the_tokens_that_they_give_where_each_is_awaited(folder: Path, tp: int, pp: int) -> None:
    sizes: dict[str, Any] = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "max_batch_size": LIMITS.max_batch_size}
    awaited, returned = (
        Served(RankExecutor(options(folder, **sizes), returns_tokens=returns), LIMITS, pp) for returns in (False, True)
    )
    equal_tokens(returned, awaited)
    assert all(row.tokens for row in awaited.rows)
    unknown = sum(not row.tokens for row in returned.rows)
    assert unknown > len(returned.rows) / 2
    assert awaited.empty == 0 < returned.empty
    stats = returned.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert sum(row.count > 1 for row in returned.rows) > len(some_requests())
    reasons = list(returned.reasons.values())
    assert reasons.count("stop") > 2
    assert reasons.count("length") > 2
    assert reasons.count(None) > 0
    sampled = sum(row.samples for row in returned.rows)
    assert sampled > sum(map(len, returned.tokens.values())), "no row came behind a stop token"


def test_each_data_parallel_index_returns_its_own_tokens(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "mixtral", "mixtral", num_hidden_layers=2)
    sizes: dict[str, Any] = {"expert_parallel_size": 2, "pipeline_parallel_size": 2, "max_batch_size": 2 * LIMITS.max_batch_size}
    sizes["max_num_tokens"] = 2 * LIMITS.max_num_tokens
    awaited, returned = (
        Served(RankExecutor(options(folder, **sizes), returns_tokens=returns), LIMITS, 2, indices=2) for returns in (False, True)
    )
    equal_tokens(returned, awaited)
    assert sum(not row.tokens for row in returned.rows) > len(returned.rows) / 2


def test_the_depth_follows() -> None:
    for stages, returns, depth in ((1, True, 2), (2, False, 2), (2, True, 3), (4, True, 5)):
        executor = RankExecutor(options(Path("x"), pipeline_parallel_size=stages), returns_tokens=returns)
        assert (executor.depth, executor.returns_tokens) == (depth, returns and stages > 1)


@pytest.mark.parametrize(("device", "nnodes", "returned"), [("cuda", 1, True), ("cpu", 1, False), ("cuda", 2, False)])
def test_tokens_return_on_the_gpus_of_one_host(monkeypatch: pytest.MonkeyPatch, device: str, nnodes: int, returned: bool) -> None:
    monkeypatch.setattr(LocalLauncher, "require_devices", lambda launcher, ranks: None)
    chosen = options(Path("x"), pipeline_parallel_size=2, device=device, nnodes=nnodes, insecure_cluster=True)
    executor = RankExecutor.from_options(chosen, None, {})  # type: ignore[arg-type]
    assert (executor.returns_tokens, executor.depth) == (returned, 3 if returned else 2)

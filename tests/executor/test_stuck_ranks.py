# SPDX-License-Identifier: Apache-2.0
"""Real ranks that get stuck in all the ways there are: the error names the rank, the collective and the layer, in 10 seconds."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from phalanx.engine.messages import Step, StepBatch, StepExtent
from phalanx.errors import EngineError, RankDied, RankStalled, StepDiverged
from phalanx.executor.rank_executor import RankExecutor
from phalanx.layout.rank_progress import Call, unpack
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import Drive, all_gone, options, pids, prompts
from tests.support.faulty_rank import KINDS, FaultyLauncher

pytestmark = pytest.mark.usefixtures("forked_python")

LIMIT = 3.0
"""Seconds of a step, in place of those that the engine predicts, which are 5 at least."""
PROMPTS = [[3 + token % 200 for token in prompt] for prompt in prompts(2, seed=4)]
LAUNCHER = "tests.support.faulty_rank:FaultyLauncher"


class Fault(NamedTuple):
    """kind: see `tests.support.faulty_rank`."""

    rank: int
    kind: str
    step: int
    call: int


def for_all_indices(step: Step, executor: RankExecutor) -> Step:
    """The step with empty parts for the data-parallel indices beside the first."""
    indices = executor._layout.dp
    if indices > 1:
        step.batches += [StepBatch() for _ in range(indices - 1)]
        step.extent = StepExtent.of(step.batches)
    return step


def calls_of(folder: Path, layout: dict[str, int], steps: int) -> dict[int, dict[int, list[Call]]]:
    """What each rank calls in the first steps, by step and rank, where nothing goes wrong."""
    executor = RankExecutor(options(folder, **layout))
    executor.start()
    calls: dict[int, dict[int, list[Call]]] = {}
    record = executor._in_flight.record

    def recorded(done: Any, now: float) -> None:
        record(done, now)
        calls.setdefault(done.number, {})[done.rank] = unpack(done.calls)

    executor._in_flight.record = recorded  # type: ignore[method-assign]
    Drive(lambda one: executor.submit(for_all_indices(one, executor)), executor.collect, blocks=40).generate(PROMPTS, steps)
    executor.shutdown()
    return calls


def run(folder: Path, layout: dict[str, int], fault: Fault) -> tuple[EngineError, float, list[int]]:
    """The error of an engine one of whose ranks goes wrong, after how many seconds, and the pids of its ranks."""
    executor = RankExecutor(options(folder, launcher=LAUNCHER, **layout))
    launcher = executor._launcher
    assert isinstance(launcher, FaultyLauncher)
    launcher.fault = fault._asdict()
    executor.start()
    ranks, began = pids(executor), 0.0

    def submit(step: Step) -> None:
        nonlocal began
        began = time.monotonic()
        step.limit = LIMIT
        executor.submit(for_all_indices(step, executor))

    try:
        with pytest.raises(EngineError) as caught:
            Drive(submit, executor.collect, blocks=40).generate(PROMPTS, fault.step + 5)
        return caught.value, time.monotonic() - began, ranks
    finally:
        executor.shutdown()


def require_named(fault: Fault, calls: list[Call], error: EngineError, seconds: float, ranks: list[int]) -> None:
    """calls: of the rank, in the step in which it goes wrong, where it does not."""
    call = calls[fault.call]
    text, begin = str(error), time.monotonic()
    assert all_gone(ranks, 5.0), fault
    assert time.monotonic() - begin < 5
    assert seconds < 10, (fault, seconds)
    match fault.kind:
        case "kill":
            assert isinstance(error, RankDied), (fault, text)
            assert text.startswith(f"rank {fault.rank} (pid {ranks[fault.rank]}, node 0) was killed by SIGKILL"), (fault, text)
        case "stop":
            assert isinstance(error, RankStalled), (fault, text)
            assert text.startswith(f"rank {fault.rank} stands still"), (fault, text)
        case "spin":
            assert isinstance(error, RankStalled), (fault, text)
            # Nobody may wait for the message that it does not take in, but for its next call.
            awaited = [f"rank {fault.rank} does not finish step {fault.step}"]
            for each in calls[fault.call :] if call.between_two else [call]:
                what = f"{each.operation} of the pipeline, for which rank" if each.between_two else each.words
                awaited.append(f"rank {fault.rank} has not come to {what}")
            assert text.startswith(tuple(awaited)), (fault, text)
        case "skip":
            assert isinstance(error, RankStalled | StepDiverged), (fault, text)
            assert text.startswith(f"rank {fault.rank} ("), (fault, text)
            assert f"skipped {call.words} in step {fault.step}" in text, (fault, text)
        case "link":
            assert isinstance(error, RankStalled), (fault, text)
            # Either end of a pipeline's link may be the first that does not go on.
            ends = ("send of the pipeline", "receive of the pipeline") if call.between_two else (call.words,)
            assert text.startswith(ends), (fault, text)
            assert (
                f"does not end; ranks {' and '.join(map(str, sorted(range(len(ranks)))))} have all come" in text or "link" in text
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("stuck") / "llama", "llama")


def test_every_kind_of_stuck_rank_is_named(folder: Path) -> None:
    layout = {"tensor_parallel_size": 2}
    calls = calls_of(folder, layout, 3)[3][0]
    reduces = [at for at, call in enumerate(calls) if call.operation == "all_reduce"]
    assert {call.layer for call in calls} >= {1, 2}, "the calls of each layer are told apart"
    faults = [Fault(number % 2, kind, 3, reduces[1 + number % 3]) for number, kind in enumerate(KINDS)]
    with ThreadPoolExecutor(len(faults)) as pool:
        outcomes = list(pool.map(lambda fault: run(folder, layout, fault), faults))
    for fault, outcome in zip(faults, outcomes, strict=True):
        require_named(fault, calls, *outcome)


@pytest.mark.skipif("PHALANX_FUZZ_FAULTS" not in os.environ, reason="make fuzz")
def test_random_faults_are_named(folder: Path, tmp_path: Path) -> None:
    """PHALANX_FUZZ_FAULTS of them, from PHALANX_FUZZ_SEED."""
    seed = int(os.environ.get("PHALANX_FUZZ_SEED", "0"))
    chance, mixtral = random.Random(seed), write_checkpoint(tmp_path, "mixtral")
    layouts = [
        (folder, {"tensor_parallel_size": 2}), (folder, {"pipeline_parallel_size": 2}),
        (folder, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}), (mixtral, {"expert_parallel_size": 2}),
    ]  # fmt: skip
    calls = [calls_of(model, layout, 6) for model, layout in layouts]
    number = 0
    while number < int(os.environ["PHALANX_FUZZ_FAULTS"]):
        at = chance.randrange(len(layouts))
        model, layout = layouts[at]
        step = chance.randint(1, 6)
        rank = chance.randrange(len(calls[at][step]))
        own, kind = calls[at][step][rank], chance.choice(KINDS)
        places = [i for i, call in enumerate(own) if kind != "skip" or call.operation in ("all_reduce", "all_gather")]
        if not places:
            continue
        number += 1
        fault = Fault(rank, kind, step, chance.choice(places))
        print(f"fault {number} of seed {seed}: {layout}, {fault}", flush=True)
        require_named(fault, own, *run(model, layout, fault))

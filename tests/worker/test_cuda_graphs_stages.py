# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline have graphs for a share of the requests each, as no step has more rows; one with more would run eagerly."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from phalanx.engine.messages import SlotAssignment, StepBatch, StepRow
from phalanx.worker.graph_buffers import graph_sizes
from phalanx.worker.model_runner import ModelRunner
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import BLOCK, GREEDY
from tests.support.worker_graphs import BLOCKS, SLOTS, TOKENS, Counting, Stage, alike, requests, serve, step_runner

pytestmark = pytest.mark.usefixtures("attention_by_reference")

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("stages") / "llama", "llama", num_hidden_layers=LAYERS)


def pipeline(folder: Path, capturers: Sequence[Counting | None]) -> list[ModelRunner]:
    lanes: list[deque[Tensor]] = [deque() for _ in capturers]
    cuts = [LAYERS * at // len(capturers) for at in range(len(capturers) + 1)]
    return [
        step_runner(folder, capturer, range(cuts[at], cuts[at + 1]), Stage(at, lanes) if len(capturers) > 1 else None)
        for at, capturer in enumerate(capturers)
    ]


@pytest.mark.parametrize(("stages", "most"), [(1, 11), (2, 6), (3, 4)])
def test_every_stage_captures_what_a_step_may_have_and_no_more(folder: Path, stages: int, most: int) -> None:
    capturers = [Counting() for _ in range(stages)]
    runners = pipeline(folder, capturers)
    decodes, mixed = graph_sizes(most, TOKENS)
    for runner, capturer in zip(runners, capturers, strict=True):
        assert runner.max_rows == decodes[-1].tokens == most
        assert runner.graphs is not None
        assert runner.graphs.sizes == [*decodes, *mixed]
        assert runner.graphs.largest == [decodes[-1], mixed[-1]]
        assert capturer.recorded == runner.graphs.count == len(decodes) + len(mixed)
        assert runner.graphs.decode_buffers.width == most
        assert len(runner._last_tokens) == len(runner._tables.host[0]) == SLOTS


@pytest.mark.parametrize(
    ("stages", "options"), [(2, {}), (3, {}), (2, {"chunked_prefill": False, "max_num_tokens": 128}), (3, {"num_blocks": 30})]
)
def test_no_step_of_a_scheduler_is_too_large_for_them(folder: Path, stages: int, options: dict[str, Any]) -> None:
    """Of more requests than slots or blocks, which come and go: all steps of few tokens are replayed, the largest among them."""
    options = {"num_blocks": BLOCKS, **options}
    capturers, arrivals = [Counting() for _ in range(stages)], requests(9, count=24)
    runners, ran = pipeline(folder, capturers), list[StepBatch]()
    run = runners[0].run
    runners[0].run = lambda step: (ran.append(step), run(step))[1]  # type: ignore[method-assign]
    outputs, scheduler = serve(runners, arrivals, **options)
    assert max(len(step.rows) for step in ran) == -(-SLOTS // stages) or scheduler.counters.preemptions
    small = [step for step in ran if sum(row.count for row in step.rows) <= TOKENS]
    assert all(sum(capturer.replays.values()) == len(small) for capturer in capturers)
    assert len(small) > len(ran) * 0.9
    assert scheduler.counters.steps == len(ran)
    alike(outputs, serve(pipeline(folder, [None]), arrivals, pipeline_stages=stages, **options)[0])


def test_a_step_of_more_rows_runs_eagerly(folder: Path) -> None:
    """Decode rows, alone and before a prompt, of which there are more than any size has; and more prompts than that."""
    capturers = Counting(), Counting()
    count, sampled = 9, []
    for runners in (pipeline(folder, capturers), pipeline(folder, [None, None])):
        prompts = [[5 + slot, 6, 7 + slot] for slot in range(count + 1)]
        admitted = [SlotAssignment(slot, prompt, 3, GREEDY, 1) for slot, prompt in enumerate(prompts)]
        steps = [
            StepBatch(admitted=admitted, rows=[StepRow(slot, 0, 2, prompts[slot][:2], [slot]) for slot in range(count)]),
            StepBatch(rows=[StepRow(slot, 2, 1, prompts[slot][2:], [], samples=True) for slot in range(count)]),
            StepBatch(
                rows=[
                    *(StepRow(slot, 3, 1, [8], [], samples=True) for slot in range(count)),
                    StepRow(count, 0, 3, prompts[count], [count], samples=True),
                ]
            ),
        ]
        for step in steps:
            for stage in runners:
                rows, _ = stage.run(step).results()
            assert rows is not None
            sampled.append([row.tokens for row in rows])
    assert BLOCK >= 4
    assert sampled[:3] == sampled[3:]
    assert None not in sampled[1] + sampled[2]
    assert not capturers[0].replays
    assert not capturers[1].replays


def test_a_stage_gives_the_next_one_the_inputs_of_its_layers(tmp_path: Path) -> None:
    """Beside the residual stream, in the buffers of graphs, too; a graph's batch does not keep them."""
    folder = write_checkpoint(tmp_path / "gemma4", "gemma4_e", num_hidden_layers=LAYERS)
    runners = pipeline(folder, [Counting() for _ in range(2)])
    for before, behind in itertools.pairwise(runners):
        assert before.graphs is not None
        assert behind.graphs is not None
        for size in before.graphs.sizes:
            out, hidden = before.graphs.buffers(size).out, behind.graphs.buffers(size).hidden
            assert out is not None
            assert hidden is not None
            assert out.shape == hidden.shape
            assert out.shape[1] > before._model.shape.hidden_size
    batches = [runner.graphs.batch(size) for runner in runners if runner.graphs is not None for size in runner.graphs.sizes]
    assert all(batch.layer_inputs is None for batch in batches)
    arrivals = requests(9, count=6)
    outputs, _ = serve(runners, arrivals)
    alike(outputs, serve(pipeline(folder, [None]), arrivals, pipeline_stages=2)[0])

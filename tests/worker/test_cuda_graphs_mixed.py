# SPDX-License-Identifier: Apache-2.0
"""Mixed graphs, on CPU (see test_cuda_graphs): what a scheduler makes of random requests gives the tokens that eager steps
give. The back end is the kernels', with the kernels' references in their place."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import RequestUpdate, SlotAssignment, StepBatch, StepRow
from phalanx.layout import graphs as plan_graphs
from phalanx.layout.cache import group_windows
from phalanx.layout.families import model_cache
from phalanx.models.batch import Batch
from phalanx.models.layers.attention import triton
from phalanx.models.layers.attention.sdpa import SdpaBackend
from phalanx.models.layers.attention.triton import TritonBackend, TritonPlan
from phalanx.worker import memory_profile
from phalanx.worker.cuda_graphs import StepGraphs
from phalanx.worker.graph_buffers import GraphSize
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import BLOCK, GREEDY, expected, prompts
from tests.support.worker_graphs import (
    BLOCKS,
    CPU,
    ROWS,
    TOKENS,
    Stage,
    Steps,
    alike,
    drive,
    make_runner,
    requests,
    serve,
    step_runner,
    tensors_of,
)

pytestmark = pytest.mark.usefixtures("attention_by_reference")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("steps")
    return {family: write_checkpoint(parent / family, family, num_hidden_layers=3) for family in ("llama", "mistral", "gpt_oss")}


@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("llama", 1), ("mistral", 2), ("gpt_oss", 3)])
def test_what_a_scheduler_asks_gives_the_tokens_of_eager_steps(folders: dict[str, Path], family: str, seed: int) -> None:
    capturer, arrivals = Steps(), requests(seed)
    windows = group_windows(model_cache(ModelShape.from_folder(folders[family])))
    options = {"windows": windows, "num_blocks": 30 * len(windows)}
    outputs, scheduler = serve([step_runner(folders[family], capturer)], arrivals, **options)
    counted = scheduler.counters
    assert counted.prefix_hits
    assert counted.preemptions or family != "llama"
    assert any(update.prompt_logprobs for updates in outputs.values() for update in updates)
    replayed, mixed = sum(capturer.replays.values()), capturer.mixed
    assert replayed == counted.steps  # none was eager
    assert sum(mixed.values()) >= 5
    assert len(mixed) >= 2
    wanted, _ = serve([step_runner(folders[family], None)], arrivals, **options)
    alike(outputs, wanted)
    greedy = [add for _, add in arrivals if add.params.temperature == 0 and add.params.repetition_penalty == 1]
    for add in greedy[:3]:
        tokens = [token for update in outputs[add.request_id] for token in update.tokens]
        assert tokens == expected(folders[family], add.token_ids, len(tokens))


def test_stages_hand_on_what_graphs_forwarded(folders: dict[str, Path]) -> None:
    lanes, capturers, arrivals = [deque[Tensor](), deque[Tensor]()], (Steps(rows=6), Steps(rows=6)), requests(5)
    stages = [
        step_runner(folders["llama"], capturer, layers, Stage(at, lanes))
        for at, (capturer, layers) in enumerate(zip(capturers, (range(2), range(2, 3)), strict=True))
    ]
    outputs, scheduler = serve(stages, arrivals)
    assert capturers[0].replays == capturers[1].replays
    assert sum(capturers[0].replays.values()) == scheduler.counters.steps
    assert len(capturers[0].mixed) >= 2
    assert not any(lanes)
    alike(outputs, serve([step_runner(folders["llama"], None)], arrivals, pipeline_stages=2)[0])


def test_ranks_agree(folders: dict[str, Path]) -> None:
    arrivals = requests(6, count=8)

    def run(group: Group) -> tuple[dict[str, list[RequestUpdate]], dict[int, int]]:
        capturer = Steps()
        return serve([step_runner(folders["llama"], capturer, group=group)], arrivals)[0], capturer.mixed

    (first, mixed), (second, _) = LocalWorld(2).run(run)
    assert len(mixed) >= 2
    assert first == second
    alike(first, serve([step_runner(folders["llama"], None)], arrivals)[0])


def admitted(slot: int, prompt: list[int], params: SamplingParams = GREEDY) -> SlotAssignment:
    return SlotAssignment(slot, prompt, len(prompt), params, 1)


def test_padding_writes_nothing_and_reads_nothing_that_matters(folders: dict[str, Path]) -> None:
    """All blocks that no row owns are poison, block 0 among them, which padding points at; and no graph writes its facts."""
    capturer, prompt = Steps(), prompts(1, seed=5)[0][:6]
    runner, plain = step_runner(folders["mistral"], capturer), step_runner(folders["mistral"], None)
    first = StepBatch(
        admitted=[admitted(7, prompt), admitted(2, prompt)],
        rows=[StepRow(7, 0, 6, prompt, [1, 2], samples=True), StepRow(2, 0, 6, prompt, [3, 4], samples=True)],
    )
    second = StepBatch(
        admitted=[admitted(0, prompt), admitted(5, prompt)],
        rows=[
            StepRow(7, 6, 1, [], [], samples=True), StepRow(2, 6, 1, [9], [], samples=True),
            StepRow(0, 0, 6, prompt, [5, 6], samples=True), StepRow(5, 0, 3, prompt[:3], [7]),
        ],
    )  # fmt: skip
    strangers = [slot for slot in range(BLOCKS * BLOCK) if not 1 <= slot // BLOCK <= 7]
    tokens = []
    for each in (runner, plain):
        for part in tensors_of(each):
            part[strangers] = float("nan")
        each.run(first).results()
        before = [part.clone() for part in tensors_of(each)]
        last = each._last_tokens.clone()
        rows, _ = each.run(second).results()
        assert rows is not None
        tokens.append([row.tokens for row in rows])
        written = {2 * BLOCK + 2, 4 * BLOCK + 2, *range(5 * BLOCK, 5 * BLOCK + 6), *range(7 * BLOCK, 7 * BLOCK + 3)}
        for part, old in zip(tensors_of(each), before, strict=True):
            changed = ((part != old) & ~(part.isnan() & old.isnan())).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(changed) <= written
            assert len(changed) > len(written) // 2
        assert set((each._last_tokens != last).nonzero().flatten().tolist()) <= {7, 2, 0}
    assert tokens[0] == tokens[1]
    assert tokens[0][3] == []
    assert capturer.mixed == {32: 2}


def test_a_capture_behind_steps_stores_nothing(folders: dict[str, Path]) -> None:
    """As after sleep. What the last step asked for is not done again, by graphs of all sizes, some smaller than that step."""
    prompt = prompts(1, seed=5)[0][:6]
    runner = step_runner(folders["mistral"], Steps())
    runner.run(StepBatch(admitted=[admitted(3, prompt)], rows=[StepRow(3, 0, 6, prompt, [1, 2], samples=True)])).results()
    several = [StepRow(slot, 0, 6, prompt, [2 * slot + 1, 2 * slot + 2], samples=True) for slot in (4, 5, 6)]
    runner.run(StepBatch(admitted=[admitted(row.slot, prompt) for row in several], rows=several)).results()
    runner.run(StepBatch(rows=[StepRow(slot, 6, 1, [], [], samples=True) for slot in (3, 4)])).results()
    kept = [runner._last_tokens, *tensors_of(runner)]
    for part in kept[1:]:
        part += 1  # a store would be one of something else
    before = [part.clone() for part in kept]
    runner.capture_again()
    assert all(torch.equal(part, old) for part, old in zip(kept, before, strict=True))


def test_facts_stay_as_they_were_filled(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads lengths before the kernels before it have ended; and what it finds out of them, it finds first of all."""
    forward, planned, done = StepGraphs._forward, [], []

    def watched(graphs: StepGraphs, size: GraphSize, *rest: Any) -> None:
        before = [column.clone() for column in vars(graphs.buffers(size).columns).values()]
        forward(graphs, size, *rest)
        assert all(map(torch.equal, vars(graphs.buffers(size).columns).values(), before))
        done.append(size)

    class Plan(TritonPlan):
        def __init__(self, backend: TritonBackend, batch: Batch) -> None:
            super().__init__(backend, batch)
            planned.append(batch)

    monkeypatch.setattr(StepGraphs, "_forward", watched)
    monkeypatch.setattr(triton, "TritonPlan", Plan)
    runner = step_runner(folders["llama"], Steps())
    assert len(planned) == len(done) == len(ROWS) + 3
    done.clear()
    serve([runner], requests(8, count=6))
    assert {size.prefill_rows > 0 for size in done} == {True, False}


def test_the_smallest_size_that_holds_a_step(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens, and by prefill rows; a step that none holds is eager, as is any once graphs are dropped."""
    monkeypatch.setattr(plan_graphs, "MAX_PREFILL_ROWS", 2)
    capturer = Steps(tokens=100)
    runner = step_runner(folders["llama"], capturer, tokens=100)
    assert [size.tokens for size in capturer.of.values() if size.prefill_rows] == [100, 64, 32]
    graphs = runner.graphs
    assert graphs is not None
    size_of_count = {5: 32, 32: 32, 33: 64, 65: 100, 100: 100, 101: None}
    for count, size in size_of_count.items():
        capturer.replays.clear()
        prompt = [3 + at % 300 for at in range(count)]
        runner.run(StepBatch(admitted=[admitted(0, prompt)], rows=[StepRow(0, 0, count, prompt, list(range(26)), True)])).results()
        assert capturer.mixed == ({} if size is None else {size: 1})
        runner.run(StepBatch(released=[0]))
    for rows, size in ((1, 32), (2, 32), (3, None)):
        capturer.replays.clear()
        step = [StepRow(slot, 0, 2, [5, 6], [slot], samples=True) for slot in range(rows)]
        runner.run(StepBatch(admitted=[admitted(slot, [5, 6]) for slot in range(rows)], rows=step)).results()
        assert capturer.mixed == ({} if size is None else {size: 1})
        runner.run(StepBatch(released=list(range(rows))))
    for most, size in ((10.0, 32), (9.0, None)):  # four tokens have ten pairs of one with an earlier one or itself
        monkeypatch.setattr(graphs, "_max_prefill_pairs", most)
        capturer.replays.clear()
        step = [StepRow(0, 0, 4, [5, 6, 7, 8], [0], samples=True)]
        runner.run(StepBatch(admitted=[admitted(0, [5, 6, 7, 8])], rows=step)).results()
        assert capturer.mixed == ({} if size is None else {size: 1})
        runner.run(StepBatch(released=[0]))
    graphs.reset()
    capturer.replays.clear()
    assert drive(runner).generate([prompts(1)[0]], 3) == [expected(folders["llama"], prompts(1)[0], 3)]
    assert not capturer.replays


def test_steps_are_counted_by_how_they_ran(folders: dict[str, Path]) -> None:
    capturer = Steps(tokens=40)
    runner = step_runner(folders["llama"], capturer, tokens=40)
    assert not any(runner.ran.by_name.values()), "capturing runs no step"
    long, short = [3 + at for at in range(41)], [5, 6, 7]

    def run(*rows: StepRow, **changes: Any) -> None:
        runner.run(StepBatch(rows=[*rows], **changes)).results()

    run(StepRow(0, 0, 41, long, list(range(11)), True), admitted=[admitted(0, long)])  # more than any graph holds
    run(StepRow(0, 41, 1, [], [], True))
    run(StepRow(0, 42, 1, [], [], True), StepRow(1, 0, 3, short, [20], True), admitted=[admitted(1, short)])
    run(StepRow(0, 43, 1, [], [], True), StepRow(1, 3, 1, [], [], True))
    for slot in range(2, 4):
        run(StepRow(slot, 0, 3, short, [slot * 20], True), admitted=[admitted(slot, short)])
    run(*(StepRow(slot, start, 1, [], [60 + slot], True) for slot, start in enumerate((44, 4, 3))))
    run(released=[*range(4)])  # without rows there is nothing to forward
    assert capturer.sized == {GraphSize(1, 1): 1, GraphSize(2, 2): 1, GraphSize(4, 4): 1, GraphSize(32, 11, 8): 3}
    assert runner.ran.by_name == {
        "decode graph/steps": 3, "decode graph/tokens": 6, "decode graph/padding": 1,
        "prompt graph/steps": 3, "prompt graph/tokens": 10, "prompt graph/padding": 86,
        "eager/steps": 1, "eager/tokens": 41, "eager/padding": 0,
    }  # fmt: skip


def test_more_new_blocks_than_a_graph_takes_go_before_it(folders: dict[str, Path]) -> None:
    """A row whose beginning the prefix cache holds brings all its blocks at once."""
    prompt, capturer = [3 + at % 300 for at in range(125)], Steps(tokens=16)
    runner, plain = step_runner(folders["llama"], capturer, tokens=16), step_runner(folders["llama"], None)
    sampled = []
    for each in (runner, plain):
        stored: list[int] = []
        each._store = lambda new, stored=stored: stored.append(len(new[0]))  # type: ignore[method-assign, misc]
        blocks = list(range(40, 72))
        each.run(StepBatch(admitted=[admitted(0, prompt)], rows=[StepRow(0, 0, 124, prompt[:124], blocks[:31])])).results()
        each.run(StepBatch(released=[0]))
        rows, _ = each.run(
            StepBatch(admitted=[admitted(3, prompt)], rows=[StepRow(3, 120, 5, prompt[120:], blocks, True)])
        ).results()
        assert rows is not None
        assert stored == [31, 32]
        sampled.append(rows[0].tokens[0])
    assert capturer.mixed == {16: 1}
    assert sampled == [expected(folders["llama"], prompt, 1)[0]] * 2


def test_memory_is_measured_by_the_largest_of_each_kind(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter((1000, 900, 650))
    monkeypatch.setattr(memory_profile, "free_bytes", lambda device: next(free))
    capturer = Steps()
    runner = step_runner(folders["llama"], capturer)
    graphs = runner.graphs
    assert graphs is not None
    graphs.reset()
    recorded = capturer.recorded
    assert recorded == graphs.count == len(graphs.sizes) == len(ROWS) + 3
    recorded_counts: list[int] = []
    graph_bytes = memory_profile.measure_graphs(runner, CPU, lambda: recorded_counts.append(capturer.recorded))
    assert graph_bytes == 350 + memory_profile.GRAPH_BYTES * graphs.count
    assert recorded_counts == [recorded + 1, recorded + 2]
    assert capturer.recorded == recorded + 2
    assert not graphs._captured
    assert [*runner.capture()] == [*capturer.of.values()]  # of each kind the largest first


@pytest.mark.parametrize(("own", "tokens"), [("none", TOKENS), ("quantized", 0), ("quantized", 1)])
def test_only_decode_rows_have_graphs(folders: dict[str, Path], own: Any, tokens: int) -> None:
    """Where there is no kernel for the others, or nobody asked."""
    capturer = Steps(tokens=0)
    runner = make_runner(folders["llama"], capturer, attention=lambda: TritonBackend(SdpaBackend(), CPU, own), tokens=tokens)
    assert capturer.recorded == len(ROWS)
    prompt = prompts(1)[0]
    assert drive(runner).generate([prompt], 4) == [expected(folders["llama"], prompt, 4)]
    assert capturer.sized == {GraphSize(1, 1): 3}

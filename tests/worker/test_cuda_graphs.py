# SPDX-License-Identifier: Apache-2.0
"""Padded decode steps on CPU: `EagerCapturer` does again what a CUDA graph would replay, on the same tensors."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.comm.group import Solo
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, StepBatch, StepRow
from phalanx.errors import EngineError
from phalanx.layout.rank_progress import ALL_GATHER, ALL_REDUCE, BEFORE_LAYERS, BEHIND_LAYERS, RankProgress, unpack
from phalanx.models import registry
from phalanx.models.layers.attention.sdpa import SdpaBackend
from phalanx.models.layers.embedding import ParallelLMHead
from phalanx.models.slices import LayerContext
from phalanx.worker import cuda_graphs
from phalanx.worker.cuda_graphs import EagerCapturer
from phalanx.worker.model_runner import ModelRunner
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import BLOCK, GREEDY, expected, prompts
from tests.support.worker_graphs import (
    BLOCKS,
    CPU,
    ROWS,
    Counting,
    Fixed,
    Stage,
    drive,
    make_runner,
    tensors_of,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("graphs") / "mistral", "mistral", num_hidden_layers=3)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_tokens_equal_the_eager_path_and_transformers(folder: Path, count: int, ahead: bool) -> None:
    prompt_ids, capturer = prompts(count, seed=count), Counting()
    tokens = drive(make_runner(folder, capturer)).generate(prompt_ids, 7, ahead=ahead)
    assert tokens == drive(make_runner(folder, None)).generate(prompt_ids, 7, ahead=ahead)
    assert tokens[0] == expected(folder, prompt_ids[0], 7)
    used = len(ROWS) - 1 - next(at for at, size in enumerate(ROWS) if size >= count)
    assert capturer.replays == {used: 6}


def test_a_forward_is_planned_as_a_part_of_itself(folder: Path) -> None:
    """So that a graph has in it what the device computes for all layers: once per capture, and at each replay."""
    prompt_ids, capturer = prompts(5, seed=1), Counting()
    runner = make_runner(folder, capturer)
    attention = runner._backend
    assert isinstance(attention, Fixed)
    assert attention.planned == len(ROWS)
    assert drive(runner).generate(prompt_ids, 7, ahead=True) == [expected(folder, prompt, 7) for prompt in prompt_ids]
    assert attention.planned == len(ROWS) + sum(capturer.replays.values())


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_agree_on_tokens_without_the_logits(
    folder: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A step in which a row filters, or wants logprobs, gathers the logits; the others gather keys, eagerly as in graphs."""
    prompt_ids, gathers = prompts(3, seed=6), Counter[str]()
    gather = ParallelLMHead.gather
    gathered = [SamplingParams(temperature=0.8, top_p=0.9), SamplingParams(temperature=0.0, logprobs=1)]

    def counted(self: ParallelLMHead, local: Tensor) -> Tensor:
        gathers["logits"] += 1
        return gather(self, local)

    monkeypatch.setattr(ParallelLMHead, "gather", counted)
    for params in (GREEDY, SamplingParams(temperature=0.9), *gathered):
        for capturer in (Counting, lambda: None):
            gathers.clear()
            runs = LocalWorld(2).run(
                lambda group, capturer=capturer, params=params: drive(make_runner(folder, capturer(), group=group)).generate(
                    prompt_ids, 6, ahead=ahead, params=params
                )
            )
            assert runs[0] == runs[1] == drive(make_runner(folder, None)).generate(prompt_ids, 6, params=params)
            assert (gathers["logits"] > 0) == (params in gathered)
    assert drive(make_runner(folder, Counting())).generate(prompt_ids, 6) == [expected(folder, prompt, 6) for prompt in prompt_ids]


def test_padding_writes_nothing_and_reads_nothing_that_matters(folder: Path) -> None:
    """Everything that no row owns is poison or must stay as it is, block 0 among them, which padding points at."""
    capturer = Counting()
    runner, plain = make_runner(folder, capturer), make_runner(folder, None)
    prompt, used = prompts(1, seed=5)[0][:6], {7: [1, 2], 2: [3, 4], 4: [5, 6]}
    steps = [
        StepBatch(
            admitted=[SlotAssignment(slot, prompt, 6, GREEDY, 1) for slot in used],
            rows=[StepRow(slot, 0, 6, prompt, blocks, samples=True) for slot, blocks in used.items()],
        ),
        StepBatch(rows=[StepRow(slot, 6, 1, [9] if slot == 2 else [], [], samples=True) for slot in used]),
    ]
    strangers = [slot for slot in range(BLOCKS * BLOCK) if not 1 <= slot // BLOCK <= 6]
    tokens = []
    for each in (runner, plain):
        for part in tensors_of(each):
            part[strangers] = float("nan")
        each.run(steps[0]).results()
        before = [part.clone() for part in tensors_of(each)]
        rows, _ = each.run(steps[1]).results()
        assert rows is not None
        tokens.append([row.tokens for row in rows])
        written = {blocks[1] * BLOCK + 2 for blocks in used.values()}  # position 6
        for part, old in zip(tensors_of(each), before, strict=True):
            changed = ((part != old) & ~(part.isnan() & old.isnan())).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(changed) == written
    assert tokens[0] == tokens[1]
    assert capturer.replays == {ROWS[::-1].index(4): 1}


def test_draws_do_not_depend_on_padding(folder: Path) -> None:
    prompt_ids, params = prompts(3, seed=9), SamplingParams(temperature=0.9, top_p=0.8, logprobs=2)
    runs = [drive(make_runner(folder, capturer)).generate(prompt_ids, 6, params=params) for capturer in (Counting(), None)]
    assert runs[0] == runs[1]


def test_steps_that_no_graph_fits_run_eagerly(folder: Path) -> None:
    """A prompt, a chunk of one token that does not sample, and a reported prompt token beside a decode."""
    capturer = Counting()
    runner = make_runner(folder, capturer)
    batches, prompt = drive(runner), prompts(1, seed=3)[0]
    reporting = SamplingParams(temperature=0.0, prompt_logprobs=1)
    batches.run(
        StepBatch(admitted=[SlotAssignment(0, prompt, 5, GREEDY, 1)], rows=[StepRow(0, 0, 5, prompt[:5], [1, 2], samples=True)])
    )
    batches.run(StepBatch(
        admitted=[SlotAssignment(1, prompt, 3, reporting, 1)],
        rows=[StepRow(0, 5, 1, [], [], samples=True), StepRow(1, 0, 1, prompt[:1], [3])],
    ))  # fmt: skip
    batches.run(StepBatch(rows=[StepRow(0, 6, 1, [], [], samples=True), StepRow(1, 1, 1, prompt[1:2], [])]))
    assert not capturer.replays
    batches.run(StepBatch(rows=[StepRow(0, 7, 1, [], [], samples=True), StepRow(1, 2, 1, prompt[2:3], [], samples=True)]))
    assert sum(capturer.replays.values()) == 1


def test_stages_hand_on_the_residual_stream_of_real_rows_only(folder: Path) -> None:
    lanes: list[deque[Tensor]] = [deque(), deque()]
    capturers = Counting(), Counting()
    stages = [
        make_runner(folder, capturer, layers, Stage(i, lanes))
        for i, (capturer, layers) in enumerate(zip(capturers, (range(2), range(2, 3)), strict=True))
    ]
    prompt_ids = prompts(3, seed=2)
    assert drive(*stages).generate(prompt_ids, 6) == [expected(folder, prompt, 6) for prompt in prompt_ids]
    assert capturers[0].replays == capturers[1].replays
    assert sum(capturers[0].replays.values()) == 5
    with pytest.raises(EngineError, match="before their last token is known"):
        stages[0].run(StepBatch(admitted=[SlotAssignment(0, [5], 1, GREEDY, 1)], rows=[StepRow(0, 0, 1, [], [1], samples=True)]))


def test_a_back_end_that_cannot_be_captured_has_no_graphs(folder: Path) -> None:
    runner = make_runner(folder, None)
    assert runner.graphs is None
    assert list(runner.capture()) == []
    shape = ModelShape.from_folder(folder)
    model = registry.build(shape, range(shape.num_layers), LayerContext(Solo(), torch.float32, CPU))
    plain = ModelRunner(
        model, [], SdpaBackend(), None, Solo(), max_batch_size=2, max_seq_len=8, block_size=4, dtype=torch.float32, device=CPU,
        capturer=EagerCapturer(),
    )  # fmt: skip
    assert plain.graphs is None


class _Cuda:
    """What CudaGraphCapturer asks of torch.cuda; nothing is captured."""

    def __init__(self) -> None:
        self.pools: list[object] = []
        self.replayed = 0

    def Stream(self, device: object) -> _Cuda:
        return self

    CUDAGraph = current_stream = lambda self: self

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait_stream(self, other: object) -> None: ...
    def synchronize(self) -> None: ...
    def capture_end(self) -> None: ...

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self.pools.append(pool)

    def pool(self) -> str:
        return "shared"

    def replay(self) -> None:
        self.replayed += 1


def test_a_replay_counts_the_collectives_that_were_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, calls = _Cuda(), {"NCCL/NONE": 5}
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)
    capturer = cuda_graphs.CudaGraphCapturer(CPU, calls)

    def work() -> None:
        calls["NCCL/NONE"] += 2
        calls["ONESHOT/NONE"] = calls.get("ONESHOT/NONE", 0) + 1

    first_calls: list[int] = []
    replay = capturer.capture(work, lambda: first_calls.append(len(cuda.pools)))
    assert first_calls == [0]  # before the capture began
    before = dict(calls)
    replay()
    assert calls == {"NCCL/NONE": before["NCCL/NONE"] + 2, "ONESHOT/NONE": before["ONESHOT/NONE"] + 1}
    assert cuda.replayed == 1
    capturer.capture(work, work)
    capturer.reset()
    capturer.capture(work, work)
    assert cuda.pools == [None, "shared", None]


def test_a_replay_records_the_collectives_that_were_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs.torch, "cuda", _Cuda())
    progress = RankProgress()
    capturer, marker = cuda_graphs.CudaGraphCapturer(CPU, progress=progress), progress.marker("tp")

    def work() -> None:
        for layer in range(2):
            progress.enter_layer(layer)
            marker.call(ALL_REDUCE, lambda: None)

    replay = capturer.capture(work, work)
    replay()
    assert not progress.calls, "no step has begun"
    progress.begin(5)
    progress.layer = BEFORE_LAYERS
    marker.call(ALL_REDUCE, lambda: None)
    replay()
    marker.call(ALL_GATHER, lambda: None)
    assert [(call.layer, call.operation) for call in unpack(progress.packed_calls)] == [
        (BEFORE_LAYERS, "all_reduce"), (1, "all_reduce"), (2, "all_reduce"), (BEHIND_LAYERS, "all_gather"),
    ]  # fmt: skip


def test_forgotten_graphs_are_not_used(folder: Path) -> None:
    capturer = Counting()
    runner = make_runner(folder, capturer)
    assert runner.graphs is not None
    runner.graphs.reset()
    prompt_ids = prompts(2, seed=4)
    assert drive(runner).generate(prompt_ids, 4) == [expected(folder, prompt, 4) for prompt in prompt_ids]
    assert not capturer.replays

# SPDX-License-Identifier: Apache-2.0
"""Second graphs for short rows, on CPU: which sizes have one, and which of the two is replayed. The back end is the kernel's, with
the kernel's reference in its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels import reference
from phalanx.kernels.attention.heuristics import SHORT_KV
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention import triton
from phalanx.models.layers.attention.sdpa import SdpaBackend
from phalanx.models.layers.attention.triton import TritonBackend
from phalanx.worker.cuda_graphs import StepGraphs
from phalanx.worker.graph_buffers import GraphSize
from phalanx.worker.model_runner import ModelRunner
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import expected, prompts
from tests.support.worker_graphs import CPU, ROWS, Counting, drive, make_runner

PROCESSORS = 16
"""So that up to 4 rows, of 2 KV heads each, are few."""
LONG, SHORTER = {11: 0, 8: 1, 4: 2, 2: 4, 1: 6}, {4: 3, 2: 5, 1: 7}
"""The recordings' numbers by size."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("short") / "llama", "llama", max_position_embeddings=2 * SHORT_KV)


@pytest.fixture(autouse=True)
def planned_lengths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of each launch, whether rows are said to be short, and how long the longest is."""
    heard: list[tuple[bool, int]] = []

    def stand_in(
        query: Tensor, *inputs: Any, workspace: Any, short: bool, splits: None, early_lengths: bool, out: Tensor, **options: Any
    ) -> Tensor:
        heard.append((short, int(inputs[-1].max())))
        return out.copy_(reference.decode_attention(query, *inputs, **options))

    monkeypatch.setattr(triton.kernels, "decode_attention", stand_in)
    return heard


def kernels_backend() -> TritonBackend:
    backend = TritonBackend(SdpaBackend(), CPU)
    backend.workspace.num_sms = PROCESSORS
    return backend


def short_runner(folder: Path, capturer: Counting) -> ModelRunner:
    return make_runner(folder, capturer, attention=kernels_backend, longest=2 * SHORT_KV)


def about(length: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens."""
    return [token for each in prompts(length // 5 + 1, seed) for token in each][:length]


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_outgrow_the_short_graph_go_on_in_the_other(
    folder: Path, ahead: bool, planned_lengths: list[tuple[bool, int]]
) -> None:  # fmt: skip
    """The longest has 251 .. 261 tokens: those of 256 are still short, those of 257 no more."""
    assert SHORT_KV == 256
    prompt_ids, capturer = [about(250), about(9, seed=1)], Counting()
    runner = short_runner(folder, capturer)
    planned_lengths.clear()
    tokens = drive(runner).generate(prompt_ids, 12, ahead=ahead)
    assert capturer.replays == {SHORTER[2]: 6, LONG[2]: 5}
    assert {length for short, length in planned_lengths if short} == set(range(251, 257))
    assert {length for short, length in planned_lengths if not short} == set(range(257, 262))
    assert tokens == drive(make_runner(folder, None, longest=2 * SHORT_KV)).generate(prompt_ids, 12)
    assert tokens == [expected(folder, prompt, 12) for prompt in prompt_ids]


@pytest.mark.parametrize(("count", "used"), [(1, SHORTER[1]), (3, SHORTER[4]), (5, LONG[8])])
def test_many_rows_have_one_graph(folder: Path, count: int, used: int) -> None:
    prompt_ids, capturer = prompts(count, seed=count), Counting()
    tokens = drive(short_runner(folder, capturer)).generate(prompt_ids, 4)
    assert tokens == drive(make_runner(folder, None)).generate(prompt_ids, 4)
    assert capturer.replays == {used: 3}


def test_each_size_is_told_of_once_and_all_graphs_are_counted(folder: Path) -> None:
    capturer = Counting()
    runner = short_runner(folder, capturer)
    graphs = runner.graphs
    assert graphs is not None
    assert capturer.recorded == graphs.count == len(LONG) + len(SHORTER)
    graphs.reset()
    assert [size.tokens for size in runner.capture()] == ROWS[::-1]
    assert capturer.recorded == 2 * graphs.count
    graphs.reset()
    assert list(runner.capture([GraphSize(2, 2)])) == [GraphSize(2, 2)]
    capturer.replays.clear()
    assert drive(runner).generate([about(7)], 3) == [expected(folder, about(7), 3)]
    assert capturer.replays == {2 * graphs.count + 1: 2}
    plain = make_runner(folder, capturer)
    assert plain.graphs is not None
    assert plain.graphs.count == len(LONG)


def test_a_graph_writes_none_of_its_facts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads lengths before the kernels before it have ended."""
    forward, done = StepGraphs._forward, []

    def watched(graphs: StepGraphs, size: GraphSize, batch: Batch, caches: Sequence[LayerCache]) -> None:
        before = [column.clone() for column in vars(graphs.buffers(size).columns).values()]
        forward(graphs, size, batch, caches)
        assert all(map(torch.equal, vars(graphs.buffers(size).columns).values(), before))
        done.append(len(batch.kv_lengths_cpu))

    monkeypatch.setattr(StepGraphs, "_forward", watched)
    runner = short_runner(folder, Counting())
    done.clear()
    drive(runner).generate([about(7), about(9)], 4, ahead=True)
    assert done == [2] * 3

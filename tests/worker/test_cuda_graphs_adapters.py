# SPDX-License-Identifier: Apache-2.0
"""Graphs with adapters, on CPU: steps replay them, whichever rows have which adapter; a step without adapters
replays the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from phalanx.config.model import ModelShape
from phalanx.kernels.adapters.rows import FEW, MANY, AdapterBatch, grouped, most_tiles
from phalanx.layout.adapter import read_adapter
from phalanx.worker.graph_buffers import AdapterInputs, GraphSize, graph_sizes
from phalanx.worker.model_runner import ModelRunner
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import prompts
from tests.support.worker_graphs import CPU, ROWS, SLOTS, TOKENS, Counting, drive, make_runner, step_runner

IN_SLOTS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The model, and its adapters: one of other modules, one of another rank."""
    root = tmp_path_factory.mktemp("adapted")
    base = write_checkpoint(root / "base", "llama")
    kinds = [{}, {"modules": ["down_proj"]}, {"r": 7}]
    return [base, *(write_adapter(root / str(seed), base, seed=seed, size=1.0, **kind) for seed, kind in enumerate(kinds))]


def adapted_runner(
    folders: list[Path], capturer: Counting | None, make: Callable[..., ModelRunner] = make_runner
) -> ModelRunner:  # fmt: skip
    runner = make(folders[0], capturer, adapters=AdapterBatch(IN_SLOTS, 8))
    shape, model = ModelShape.from_folder(folders[0]), runner._adapters
    assert model is not None
    for slot, folder in enumerate(folders[1:]):
        file = read_adapter(folder, shape, max_rank=8)
        model.place(slot, model.read(file.folder, file.digest, file.parts))
    return runner


@pytest.mark.parametrize("slots", [[0], [2, -1, 0], [1, 1, -1, 0, 2, 0, 1]])
def test_steps_with_adapters_replay_graphs(folders: list[Path], slots: list[int]) -> None:
    """Placed after the capture, so that what a graph computes is read when it is replayed."""
    texts, capturer = prompts(len(slots), seed=len(slots)), Counting()
    runner = adapted_runner(folders, capturer)
    wanted = drive(adapted_runner(folders, None)).generate(texts, 6, adapters=slots)
    for ahead in (False, True):
        capturer.replays.clear()
        assert drive(runner).generate(texts, 6, ahead=ahead, adapters=slots) == wanted
        size = next(rows for rows in ROWS if rows >= len(slots))
        number = len(ROWS) + ROWS[::-1].index(size)
        assert capturer.replays == {number: 5}, "the prompts' step runs eagerly"
    without = drive(runner).generate(texts, 6)
    assert without == drive(make_runner(folders[0], None)).generate(texts, 6)
    assert without != wanted
    assert capturer.replays == {number: 5, number - len(ROWS): 5}


@pytest.mark.usefixtures("attention_by_reference")
def test_prompts_with_adapters_replay_mixed_graphs(folders: list[Path]) -> None:
    slots = [1, 0, -1, 2]
    texts, capturer = prompts(len(slots), seed=1), Counting()
    runner = adapted_runner(folders, capturer, step_runner)
    wanted = drive(adapted_runner(folders, None, step_runner)).generate(texts, 6, adapters=slots)
    capturer.replays.clear()
    assert drive(runner).generate(texts, 6, adapters=slots) == wanted
    mixed = len(graph_sizes(SLOTS, TOKENS)[1])
    first = 2 * len(ROWS) + mixed
    assert sum(capturer.replays.values()) == 6, "none was eager"
    assert sum(count for number, count in capturer.replays.items() if number in range(first, first + mixed)) == 1
    assert drive(runner).generate(texts, 6) != wanted


def test_each_size_is_captured_twice() -> None:
    decode, mixed = graph_sizes(SLOTS, 64, adapted=True)
    plain, same = graph_sizes(SLOTS, 64)
    assert decode == [*plain, *(size._replace(adapted=True) for size in plain)]
    assert mixed == [*same, *(size._replace(adapted=True) for size in same)]


def test_tiles_of_any_rows_have_room() -> None:
    """The most tiles that rows can take, and not one more: then what is behind the last one is empty."""
    rng = np.random.default_rng(0)
    for tokens, slots in ((1, 8), (7, 3), (33, 2), (600, 5)):
        size, inputs = GraphSize(tokens, tokens, adapted=True), AdapterInputs(600, 8, CPU)
        rows = inputs.rows(size)
        assert rows.tile == (FEW if tokens <= 512 else MANY)
        for _ in range(20):
            chosen = rng.integers(-1, slots, tokens)
            inputs.fill(chosen, size)
            order, tiles = grouped(chosen, rows.tile)
            assert rows.order[: len(order)].tolist() == order.tolist()
            assert rows.tiles[: len(tiles)].tolist() == tiles.tolist()
            assert not rows.tiles[len(tiles) :].any()
        inputs.fill(None, size)
        assert not rows.tiles.any()
        worst = np.minimum(np.arange(tokens), slots - 1)  # one token of each, and all others of the last
        assert len(grouped(worst, rows.tile)[1]) == most_tiles(tokens, slots, rows.tile)

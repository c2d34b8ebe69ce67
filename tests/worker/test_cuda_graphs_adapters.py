# SPDX-License-Identifier: Apache-2.0
"""Decode graphs with adapters, on CPU: steps of decode rows replay them, whichever rows have which adapter; a step without adapters
replays the others."""

from __future__ import annotations

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
from tests.support.worker_graphs import CPU, ROWS, SLOTS, Counting, drive, make_runner

IN_SLOTS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The model, and its adapters: one of other modules, one of another rank."""
    root = tmp_path_factory.mktemp("adapted")
    base = write_checkpoint(root / "base", "llama")
    kinds = [{}, {"modules": ["down_proj"]}, {"r": 7}]
    return [base, *(write_adapter(root / str(seed), base, seed=seed, size=1.0, **kind) for seed, kind in enumerate(kinds))]


def adapted_runner(folders: list[Path], capturer: Counting | None) -> ModelRunner:
    runner = make_runner(folders[0], capturer, adapters=AdapterBatch(IN_SLOTS, 8))
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


def test_each_size_is_captured_twice() -> None:
    decode, mixed = graph_sizes(SLOTS, 64, adapted=True)
    plain, same = graph_sizes(SLOTS, 64)
    assert (decode, mixed) == ([*plain, *(GraphSize(size.tokens, size.decode_rows, adapted=True) for size in plain)], same)


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

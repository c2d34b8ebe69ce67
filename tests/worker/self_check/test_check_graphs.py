# SPDX-License-Identifier: Apache-2.0
"""A check of a runner with captured graphs, in this process: graphs are judged by what they compute, and blamed last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.group import Solo
from phalanx.errors import SelfCheckFailed
from phalanx.models.layers.attention import triton
from phalanx.worker.cuda_graphs import Replay
from phalanx.worker.self_check.check import SelfCheck
from phalanx.worker.self_check.compare import Agreement
from phalanx.worker.self_check.steps import check_steps
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.engine_drive import BLOCK
from tests.support.worker_graphs import BLOCKS, SLOTS, TOKENS, Steps, put_references, step_runner


class Stale(Steps):
    """Graphs of decode rows that keep what they computed when they were captured."""

    def capture(self, work: Callable[[], None], warmup: Callable[[], None]) -> Replay:
        again = super().capture(work, warmup)
        return again if self.of[self.recorded - 1].prefill_rows else lambda: None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("graphs") / "llama", "llama")


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    put_references(monkeypatch)


def checked(folder: Path, capturer: Steps) -> Agreement | None:
    runner = step_runner(folder, capturer)
    sizes: dict[str, Any] = {"max_num_tokens": TOKENS, "max_seq_len": 128, "block_size": BLOCK, "blocks": BLOCKS}
    steps = check_steps(vocab_size=VOCAB_SIZE, max_rows=runner.max_rows, **sizes)
    before = runner.graphs
    try:
        return SelfCheck(runner, runner._model, Solo(), Solo(), steps, compares=True, slots=SLOTS).run()
    finally:
        assert runner.graphs is before


@torch.inference_mode()
def test_graphs_run_in_a_check_and_right_ones_pass(folder: Path) -> None:
    capturer = Steps()
    answers = checked(folder, capturer)
    assert answers is not None
    assert answers.worst_kl < 1e-9
    assert {bool(size.prefill_rows) for size in capturer.sized} == {True, False}


@torch.inference_mode()
def test_a_graph_that_computes_something_else_is_named(folder: Path) -> None:
    with pytest.raises(SelfCheckFailed, match=r"decode of .*moved by captured graphs; use cuda_graphs=False"):
        checked(folder, Stale())


@torch.inference_mode()
def test_graphs_are_not_blamed_for_a_kernel_in_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton.kernels.decode_attention

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return right(*arguments, **options).mul_(1.5)

    monkeypatch.setattr(triton.kernels, "decode_attention", wrong)
    with pytest.raises(SelfCheckFailed, match="moved by attention back end; report"):
        checked(folder, Steps())

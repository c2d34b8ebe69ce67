# SPDX-License-Identifier: Apache-2.0
"""The seam: what `make` and `join` refuse before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.engine.executor import Executor, join, make
from phalanx.errors import EngineClosed, LayoutError
from phalanx.executor.node import Node
from phalanx.hardware.probe import Gpu, Machine
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import options


def test_as_many_steps_are_in_flight_as_there_are_stages_and_never_less_than_two() -> None:
    depths = [make(options(Path("x"), pipeline_parallel_size=stages)).depth for stages in (1, 2, 4)]
    assert depths == [2, 2, 4]


def test_an_executor_that_was_never_started_runs_nothing_and_ends_quietly() -> None:
    executor: Executor = make(options(Path("x")))
    assert executor.waitables() == []
    assert executor.stats() == ({}, {}, {})
    with pytest.raises(EngineClosed, match="not running"):
        executor.collect()
    executor.shutdown()
    executor.shutdown()


def test_ranks_that_do_not_spread_over_the_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="2 nodes"):
        make(options(Path("x"), tensor_parallel_size=3, nnodes=2))
    with pytest.raises(LayoutError, match="node_rank=1"):
        join(options(write_checkpoint(tmp_path / "llama", "llama"), node_rank=1))


def test_a_layout_that_the_model_cannot_have_is_refused_on_every_host(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"tensor_parallel_size=5 .*sizes that divide"):
        join(options(write_checkpoint(tmp_path / "llama", "llama"), tensor_parallel_size=5, nnodes=5, node_rank=1))


def test_a_joining_process_needs_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.hardware.detect_machine", lambda: Machine((Gpu(0, "GPU-0", "NVIDIA H200", 90, 1, 1),), 1, 1, 1))
    asked = options(Path("x"), device="cuda", tensor_parallel_size=2, nnodes=2, node_rank=1)
    with pytest.raises(LayoutError, match=r"2 ranks.*node 1 has 1 GPU;"):
        Node(asked, local_rank=1)


def test_the_seam_needs_no_torch() -> None:
    code = "import sys, phalanx.engine.executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun or mpirun started are the benchmark's ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from phalanx.deploy.ray_serve import free_ports
from phalanx.tune import records
from phalanx.tune.commands import launched_rank

pytestmark = pytest.mark.usefixtures("forked_python")

BENCH = ["bench", "--device", "cpu", "--tokens", "1,16", "--hidden", "128", "--fusions", "NONE", "--calls", "2", "--replays", "3"]


def test_the_rank_of_a_process():
    nothing = (None, None, None)
    assert launched_rank(None, nothing, nothing, "h:1") is None
    assert launched_rank(None, (1, 4, 1), nothing, "h:1") is None  # RANK and its like are set by other tools, too
    assert launched_rank("run", (1, 4, 1), nothing, "h:1").address is None
    rank = launched_rank(None, nothing, (5, 8, 1), "h:1")
    assert (rank.rank, rank.world, rank.local_rank, rank.address) == (5, 8, 1, "h:1")
    assert launched_rank(None, nothing, (0, 1, 0), "h:1") is None
    assert launched_rank(None, nothing, (3, 4, None), "h:1").local_rank == 3


def check(folder):
    bench = records.read(folder / "benchmark.tp2.sm0.csv")
    assert len(bench.times) + len(bench.skips) == 2 * 3
    assert bench.facts["complete"] == "yes"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"benchmark.tp2.sm0.{kind}" for kind in ("csv", "journal", "json")
    ]  # fmt: skip


def test_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "phalanx.tune.cli"]
    ran = subprocess.run([*command, *BENCH, "--save_csv_dir", str(tmp_path / "made")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    check(tmp_path / "made")


def test_under_mpirun(tmp_path):
    """mpirun sets these variables for each process that it starts."""
    port = free_ports(2)
    command = [
        sys.executable,
        "-m",
        "phalanx.tune.cli",
        *BENCH,
        "--master_port",
        str(port),
        "--save_csv_dir",
        str(tmp_path / "made"),
    ]
    ranks = []
    for rank in range(2):
        says = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        env = os.environ | {name: str(value) for name, value in says.items()}
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    ends = [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0, 0], ends
    check(tmp_path / "made")

# SPDX-License-Identifier: Apache-2.0
"""The README's table of peers: every cell of ours, the best of each family, and the slower cells by name."""

from __future__ import annotations

import subprocess
import sys

from tests.architecture.sources import ROOT
from tests.support.tune_benchmarks import NVLINK2, folder_of

HEADER = "world_size,dtype,size,num_tokens,hidden_size,implementation,fusion,time (us)"


def test_table(tmp_path):
    folder_of(tmp_path, NVLINK2, tokens="1,8,64", hidden="8192", fusions="NONE")
    rows = ["2,bfloat16,16384,1,8192,Fast 1 one-shot,NONE,1.0", "2,bfloat16,16384,1,8192,Slow 2,NONE,90.5"]
    rows += ["2,bfloat16,131072,8,8192,Slow 2 quick,NONE,80.0", "2,bfloat16,131072,8,8192,Slow 2,NONE,90.0"]
    (tmp_path / "peers.csv").write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
    command = [sys.executable, ROOT / "benchmarks" / "tune" / "compare_peers.py", "--data_dir", tmp_path]
    ran = subprocess.run([*command, "--peers", tmp_path / "peers.csv"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines() if line.startswith("| ")]
    assert cells[0] == ["tokens", "KiB", "**ours**", "runs", "NCCL, same run", "Fast", "Slow", "ours / best peer"]
    assert [row[0] for row in cells[1:]] == ["1", "8", "64"]
    assert cells[1][5:7] == ["1.00", "90.50"]
    assert cells[1][7].endswith("slower")
    assert cells[2][5:7] == ["", "80.00"]
    assert cells[3][5:] == ["", "", ""]
    assert "1 of 2 cells with a peer are at most 2% slower than the fastest peer" in ran.stdout
    assert "against 1.00 us of Fast 1 one-shot" in ran.stdout.split("Slower:")[1]


def test_the_peers_that_ship_are_read():
    path = ROOT / "benchmarks" / "results" / "peers_allreduce_h200_nvlink.csv"
    assert path.with_suffix(".json").is_file()
    text = path.read_text(encoding="utf-8")
    assert text.startswith(HEADER)
    assert len(text.splitlines()) == 392

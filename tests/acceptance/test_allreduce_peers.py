# SPDX-License-Identifier: Apache-2.0
"""The run beside the peers, as far as it goes without GPUs: what counts as wrong, and the table that people read."""

from __future__ import annotations

import csv

import torch

from benchmarks.comm import peers
from phalanx.tables.message import Fusion


def row(tokens: int, name: str, us: float, fusion: Fusion = Fusion.NONE) -> peers.Row:
    return (4, "bfloat16", tokens * 16384, tokens, 8192, name, fusion.name, us)


def test_a_table_of_the_fastest(tmp_path):
    rows = [
        row(1, "Phalanx AUTO", 2.0), row(1, "Phalanx ONESHOT", 1.98), row(1, "Phalanx TWOSHOT", 3.5),
        row(1, "NCCL 2.28.9", 11.0), row(1, "FlashInfer 0.6.12 one-shot PDL", 3.1), row(1, "FlashInfer 0.6.12 two-shot PDL", 30.0),
        row(8, "Phalanx AUTO", 9.0), row(8, "NCCL 2.28.9", 8.0),
    ]  # fmt: skip
    path = tmp_path / "peers.tp4.sm90.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([peers.COLUMNS, *rows])
    assert peers.read(path) == rows
    lines = peers.markdown(peers.read(path))
    assert lines[0] == "### TP 4, NONE"
    assert lines[4] == "| 1 | 16 | **2.00** | 1.98 ONESHOT | 3.10 one-shot PDL | 11.00 | 0.65 |"
    assert lines[5] == "| 8 | 128 | **9.00** |  |  | 8.00 | 1.12 miss |"


def test_rounding_is_no_fault_and_everything_else_is():
    total = torch.linspace(-12, 12, 64).view(4, 16)
    cell = peers.Cell(Fusion.NONE, total.bfloat16(), None, total)
    assert cell.differs(total.bfloat16()) is None
    assert cell.differs((total / peers.SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)) == "10 of 64 values are wrong"
    for wrong in (float("nan"), float("inf"), 1.0):
        altered = total.clone()
        altered[2, 3] = wrong
        assert cell.differs(altered) == "1 of 64 values are wrong"

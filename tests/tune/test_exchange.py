# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import exchange as tables
from phalanx.tune import cli, exchange
from phalanx.tune.exchange import MeasuredSize

HERE = Fingerprint(90, "nvlink", 2)


def row(name: str, payload: str, tokens: int, us: float, *, graph: bool = True, hidden: int = 4096) -> dict[str, Any]:
    return {"hidden": hidden, "tokens": tokens, "exchange": name, "payload": payload, "cuda_graph": graph, "us": us}


ROWS = [
    row("ALL_GATHER", "bf16", 8, 40.0), row("ALL_TO_ALL", "bf16", 8, 1.0, graph=False), row("ONE_SIDED", "bf16", 8, 10.0),
    row("ONE_SIDED", "e4m3", 8, 8.0), row("ONE_SIDED dispatch", "e4m3", 8, 4.0),
    row("ALL_GATHER", "bf16", 64, 50.0), row("ONE_SIDED", "bf16", 64, 49.0), row("ONE_SIDED", "e4m3", 64, 20.0),
    row("ALL_GATHER", "bf16", 8192, 400.0), row("ONE_SIDED", "bf16", 8192, 100.0),
]  # fmt: skip


@pytest.fixture
def times_file(tmp_path: Path) -> Path:
    path = tmp_path / "comm_expert_exchange.ep2.sm90.json"
    path.write_text(json.dumps({"about": {"commit": "abc"}, "machine": str(HERE), "one_sided": {}, "rows": ROWS}))
    return path


def test_the_challenger_must_win_by_more_than_the_noise(times_file: Path) -> None:
    fingerprint, times, facts = exchange.read(times_file)
    assert fingerprint == HERE
    assert facts == {"commit": "abc"}
    assert times[MeasuredSize("e4m3", 4096, 8)] == {"ALL_GATHER": 40.0, "ONE_SIDED": 8.0}
    table = exchange.decide(times, fingerprint, facts)
    in_16_bit, in_e4m3 = table.rows
    assert [(span.first, span.last, span.exchange) for span in in_16_bit.spans] == [
        (8, 22, "ONE_SIDED"), (23, 64, "ALL_GATHER"), (8192, 8192, "ONE_SIDED"),
    ]  # fmt: skip
    assert [span.gain for span in in_16_bit.spans] == [4.0, 1.0, 4.0]
    assert [(span.first, span.last, span.exchange) for span in in_e4m3.spans] == [(8, 64, "ONE_SIDED")]
    assert in_e4m3.spans[0].gain == pytest.approx((5.0 * 2.5) ** 0.5, abs=1e-3)


def test_import_installs_it_and_explain_prints_it(times_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", str(times_file), "--folder", str(tmp_path / "tables")]) == 0
    path = tmp_path / "tables" / "exchange" / "sm90.nvlink.ep2.json"
    assert capsys.readouterr().out == f"installed {path}\n"
    assert tables.table_for(HERE, tmp_path / "tables") == exchange.decide(*exchange.read(times_file)[:2][::-1])
    assert cli.main(["explain", "--exchange", "--table", str(path), "--hidden", "4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sm90.nvlink.ep2: ")
    assert "  commit: abc" in lines
    begin = lines.index("hidden 4096, experts that take tokens in 16 bit")
    assert [line.split(" tokens of each index: ")[0].split() for line in lines[begin + 1 : begin + 7]] == [
        ["1", "to", "7"], ["8", "to", "22"], ["23", "to", "64"], ["65", "to", "8191"], ["8192", "to", "8192"],
        ["8193", "or", "more"],
    ]  # fmt: skip
    assert [line.split(": ")[1].split()[0] for line in lines[begin + 2 : begin + 4]] == ["ONE_SIDED", "ALL_GATHER"]
    assert "estimated: not measured" in lines[begin + 1]


@pytest.mark.parametrize(("link", "says"), [("pcie", "ALL_GATHER always"), ("pcie_p2p", "no table: everything is estimated")])
def test_explain_of_another_machine(link: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--exchange", "--machine", f"sm75.{link}.tp4"]) == 0
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"machine": "x", "about": {}, "rows": []}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(TableError, match="holds no times of exchanges"):
        exchange.read(path)
    with pytest.raises(TableError, match=r"no times of sm90.nvlink.ep2"):
        exchange.decide({}, HERE)

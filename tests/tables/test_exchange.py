# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import LINKS, Fingerprint
from phalanx.tables import exchange
from phalanx.tables.exchange import ExchangeRow, ExchangeSpan, ExchangeTable

HERE = Fingerprint(90, "nvlink", 2)
TABLE = ExchangeTable(
    HERE,
    (
        ExchangeRow("16 bit", 4096, 5418, (ExchangeSpan(1, 64, "ONE_SIDED", 2.5), ExchangeSpan(65, 1024, "ALL_GATHER", 1.0))),
        ExchangeRow("16 bit", 5419, 7168, (ExchangeSpan(1, 1024, "ONE_SIDED", None),)),
        ExchangeRow("e4m3", 4096, 4096, (ExchangeSpan(8, 8, "ONE_SIDED", 3.0),)),
    ),
    {"commit": "abc"},
)


@pytest.mark.parametrize(
    ("payload", "tokens", "hidden", "answer", "source"),
    [
        ("16 bit", 1, 4096, "ONE_SIDED", "table"),
        ("16 bit", 64, 5418, "ONE_SIDED", "table"),
        ("16 bit", 65, 4096, "ALL_GATHER", "table"),
        ("16 bit", 65, 5419, "ONE_SIDED", "table"),
        ("16 bit", 1025, 4096, "ONE_SIDED", "estimated"),
        ("16 bit", 1, 4095, "ONE_SIDED", "estimated"),
        ("e4m3", 8, 4096, "ONE_SIDED", "table"),
        ("e4m3", 9, 4096, "ONE_SIDED", "estimated"),
    ],
)
def test_a_size_is_answered_by_its_range_or_an_estimate(
    payload: str, tokens: int, hidden: int, answer: str, source: str
) -> None:  # fmt: skip
    entry = TABLE.lookup(payload, tokens, hidden)
    assert (entry.exchange, entry.source) == (answer, source)
    assert entry.reason.startswith("table of sm90.nvlink.ep2, " if source == "table" else "not measured: ")


@pytest.mark.parametrize("link", LINKS)
def test_what_was_not_measured_is_one_sided_over_nvlink_alone(link: str) -> None:
    table = ExchangeTable(Fingerprint(90, link, 4))
    entry = table.lookup("e4m3", 64, 4096)
    assert (entry.exchange, entry.source) == ("ONE_SIDED" if "nvlink" in link else "ALL_GATHER", "estimated")
    assert table.has_one_sided == ("nvlink" in link)
    assert replace(TABLE, fingerprint=table.fingerprint).has_one_sided


def test_the_package_has_a_table_of_two_gpus_over_nvlink() -> None:
    table = exchange.table_for(HERE, Path("none"))
    for payload in exchange.PAYLOADS:
        assert table.lookup(payload, 64, 4096).source == "table"


def test_a_reason_tells_the_gain() -> None:
    assert TABLE.lookup("16 bit", 2, 4096).reason == "table of sm90.nvlink.ep2, 1..64 tokens: 2.50x the speed of ALL_GATHER"
    assert TABLE.lookup("16 bit", 100, 4096).reason.endswith("65..1024 tokens: nothing is faster by more than the noise")


def test_the_file_holds_the_table(tmp_path: Path) -> None:
    path = exchange.path_of(HERE, tmp_path)
    assert path == tmp_path / "exchange" / "sm90.nvlink.ep2.json"
    exchange.save(TABLE, path)
    for table in (exchange.load(path), exchange.table_for(HERE, tmp_path)):
        assert table == TABLE
        assert table.provenance == TABLE.provenance
    assert exchange.table_for(replace(HERE, world=7), tmp_path) == ExchangeTable(replace(HERE, world=7))
    assert replace(TABLE, provenance={}).digest == TABLE.digest != replace(TABLE, rows=TABLE.rows[:2]).digest


def test_a_table_is_no_all_reduce_table(tmp_path: Path) -> None:
    """Both are in one folder, and the all-reduce's looks for its relatives there."""
    from phalanx.tables import shipped

    exchange.save(TABLE, exchange.path_of(HERE, tmp_path))
    assert shipped.relatives(replace(HERE, link="pcie_p2p"), tmp_path) == []
    assert all(table.fingerprint.world != 2 for table in shipped.relatives(HERE, tmp_path))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data.update(version=2), "version 2"),
        (lambda data: data.update(more=1), "unknown field 'more'"),
        (lambda data: data["rows"].pop(), "the file was changed"),
        (lambda data: data["rows"][0].update(payload="int4"), "payload 'int4' is unknown"),
        (lambda data: data["rows"][0]["spans"][0].__setitem__(2, "ALL_TO_ALL"), "exchange 'ALL_TO_ALL' is unknown"),
        (lambda data: data["rows"][0]["spans"][1].__setitem__(0, 3), "the range 3..1024 does not rise from 64"),
        (lambda data: data["rows"][0].update(hidden=[1]), "a row: hidden is not a list of 2"),
        (lambda data: data["fingerprint"].update(link="wire"), "link class 'wire' is unknown"),
    ],
)
def test_a_faulty_file_is_refused(change: Callable[[dict[str, Any]], object], problem: str, tmp_path: Path) -> None:
    data = json.loads(exchange.dumps(TABLE))
    change(data)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TableError, match=problem) as error:
        exchange.load(path)
    assert str(path) in str(error.value)


def test_shipped_tables_are_sound() -> None:
    for path in exchange._SHIPPED.glob("*.json"):
        table = exchange.load(path)
        assert path.name == exchange.path_of(table.fingerprint).name
        assert path.read_text() == exchange.dumps(table)

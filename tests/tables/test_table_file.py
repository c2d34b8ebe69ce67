# SPDX-License-Identifier: Apache-2.0
"""A table's file is read strictly and written whole."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import table_file
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import Seed, default
from phalanx.tables.strategy import Choice, Strategy
from tests.support.tables_strategies import one_span, tables

MACHINE = Fingerprint(90, "nvlink", 2)
TABLE = one_span(MACHINE, default(MACHINE), Choice(Strategy.TWOSHOT))


@given(tables())
@settings(max_examples=40, deadline=None)
def test_round_trip(table):
    again = table_file.loads(table_file.dumps(table))
    assert again == table
    assert (again.provenance, again.digest) == (table.provenance, table.digest)
    assert [list(m) for m in again.seed.models.values()] == [list(m) for m in table.seed.models.values()]


def test_file(tmp_path):
    path = tmp_path / "deep" / "table.json"
    table_file.save(TABLE, path)
    assert table_file.load(path) == TABLE
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "table.json"
    table_file.save(TABLE, path)
    with pytest.raises(UnicodeEncodeError):
        table_file.write_whole(path, "\ud800")
    assert table_file.load(path) == TABLE
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table_file.os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/table.json'"):
        table_file.save(TABLE, tmp_path / "table.json")
    assert not list(tmp_path.iterdir())


def _changed(change) -> str:
    data = json.loads(table_file.dumps(TABLE))
    change(data)
    return json.dumps(data)


FAULTS = {
    "empty": lambda: "",
    "cut short": lambda: table_file.dumps(TABLE)[:-20],
    "a list": lambda: "[]",
    "an unknown field": lambda: _changed(lambda d: d.update(extra=1)),
    "a field less": lambda: _changed(lambda d: d.pop("seed")),
    "another version": lambda: _changed(lambda d: d.update(version=3)),
    "a version that is true": lambda: _changed(lambda d: d.update(version=True)),
    "another choice": lambda: _changed(lambda d: d["sections"][0]["rows"][0]["spans"][0].__setitem__(2, "ONESHOT")),
    "a choice nobody knows": lambda: _changed(lambda d: d["sections"][0]["rows"][0]["spans"][0].__setitem__(2, "RING")),
    "a gain of nothing": lambda: _changed(lambda d: d["sections"][0]["rows"][0]["spans"][0].__setitem__(3, 0)),
    "an unknown field deep inside": lambda: _changed(lambda d: d["sections"][0]["rows"][0].update(x=1)),
    "an unknown link": lambda: _changed(lambda d: d["fingerprint"].update(link="rope")),
    "a caller nobody knows": lambda: _changed(lambda d: d["sections"][0].update(caller="nobody")),
    "a caller that is not allowed it": lambda: _changed(
        lambda d: d["sections"][0]["rows"][0]["spans"][0].__setitem__(2, "GEMM_RS")
    ),
    "no thresholds": lambda: _changed(lambda d: d["seed"].pop("sequence_parallel")),
    "a threshold less": lambda: _changed(lambda d: d["seed"]["sequence_parallel"].pop("gemm_rs_min_bytes")),
    "a threshold of nothing": lambda: _changed(lambda d: d["seed"]["sequence_parallel"].update(rs_norm_ag_min_tokens=0)),
    "a threshold that is text": lambda: _changed(lambda d: d["seed"]["sequence_parallel"].update(rs_norm_ag_min_tokens="64")),
    "a seed without a model": lambda: _changed(lambda d: d["seed"]["order"]["NONE"].pop()),
    "text for a number": lambda: _changed(lambda d: d["fingerprint"].update(sm="90")),
}


def _as_version_1(table) -> str:
    """The file that Phalanx wrote before there were callers."""
    data = json.loads(table_file.dumps(table))
    data["version"] = 1
    for section in data["sections"]:
        del section["caller"]
    del data["seed"]["estimated"], data["seed"]["sequence_parallel"]
    decides = {key: data[key] for key in ("fingerprint", "sections", "seed")}
    data["digest"] = hashlib.sha256(json.dumps(decides, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return json.dumps(data)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_file_of_version_1_is_read(world, tmp_path):
    """Its sections answer as before, and sequence parallelism runs by the machine's class. A changed one is refused."""
    machine = Fingerprint(90, "nvlink", world)
    seed = Seed("fitted to 3990 times", default(machine).models)
    old = one_span(machine, seed, Choice(Strategy.TWOSHOT))
    path = tmp_path / "table.json"
    path.write_text(_as_version_1(old), encoding="utf-8")
    table = table_file.load(path)
    assert table.sections == old.sections
    assert table.lookup("bf16", Fusion.NONE, 8, 4096).source == "table"
    first = 128 if world == 2 else 64
    entry = table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, first, 4096, Caller.SHARDED)
    assert (entry.strategy, entry.source) == (Strategy.RS_NORM_AG, "estimated" if world == 8 else "seed")
    assert table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, first - 1, 4096, Caller.GEMM).strategy is not Strategy.RS_NORM_AG
    assert table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, 2048, 8192, Caller.GEMM).strategy is Strategy.GEMM_RS
    assert table_file.loads(table_file.dumps(table)) == table
    path.write_text(_as_version_1(old).replace("TWOSHOT", "ONESHOT", 1), encoding="utf-8")
    with pytest.raises(TableError, match=r"the file was changed.*tune again"):
        table_file.load(path)


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_files_name_the_file_and_the_cure(fault, tmp_path):
    path = tmp_path / "sm90.nvlink.tp2.json"
    path.write_text(FAULTS[fault](), encoding="utf-8")
    with pytest.raises(TableError, match=r"sm90\.nvlink\.tp2\.json is faulty.*tune again"):
        table_file.load(path)


def test_no_file(tmp_path):
    with pytest.raises(TableError, match="cannot be read"):
        table_file.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TableError, match="is not text"):
        table_file.load(tmp_path / "binary.json")

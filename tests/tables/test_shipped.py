# SPDX-License-Identifier: Apache-2.0
"""A machine finds its own table; an unknown one gets the nearest seed, and a line that says how to tune."""

from __future__ import annotations

import pytest

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import shipped
from phalanx.tables.message import Fusion
from phalanx.tables.seed import default
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tables.table_file import load, save
from tests.support.tables_strategies import one_span

ODD = Fingerprint(77, "pcie_p2p", 4)


def test_found_where_it_was_installed(tmp_path):
    assert shipped.find(ODD, tmp_path) is None
    table = one_span(ODD, default(ODD), Choice(Strategy.TWOSHOT))
    save(table, tmp_path / shipped.file_name(ODD))
    assert shipped.find(ODD, tmp_path) == table == shipped.table_for(ODD, tmp_path)
    assert shipped.advice(ODD, tmp_path) == ""


def test_an_unknown_machine_runs_by_its_class(tmp_path):
    table = shipped.table_for(ODD, tmp_path)
    assert table.sections == ()
    assert table.seed.origin == "class pcie_p2p"
    assert table.lookup("bf16", Fusion.NONE, 1, 8192).source == "seed"
    line = shipped.advice(ODD, tmp_path)
    assert "phalanx allreduce tune --tp_size 4" in line
    assert "sm77.pcie_p2p.tp4" in line
    assert "\n" not in line


def test_an_unmeasured_number_of_ranks_scales_the_nearest(tmp_path):
    for world in (2, 8):
        relative = Fingerprint(77, "pcie_p2p", world)
        save(one_span(relative, default(relative), Choice(Strategy.TWOSHOT), 3.0), tmp_path / shipped.file_name(relative))
    assert shipped.table_for(Fingerprint(77, "pcie_p2p", 3), tmp_path).seed.origin == "scaled from sm77.pcie_p2p.tp2"
    assert shipped.table_for(Fingerprint(77, "pcie_p2p", 6), tmp_path).seed.origin == "scaled from sm77.pcie_p2p.tp8"
    assert "3.0x as fast as NCCL" in shipped.advice(Fingerprint(77, "pcie_p2p", 3), tmp_path)


def test_a_faulty_table_is_an_error_not_a_seed(tmp_path):
    (tmp_path / shipped.file_name(ODD)).write_text("{}", encoding="utf-8")
    with pytest.raises(TableError, match="is faulty"):
        shipped.find(ODD, tmp_path)


def test_what_ships_is_whole():
    for path in sorted(shipped._SHIPPED.glob("*.json")):
        table = load(path)
        assert shipped.file_name(table.fingerprint) == path.name
        assert table.sections

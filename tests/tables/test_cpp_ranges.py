# SPDX-License-Identifier: Apache-2.0
"""The header compiles, and answers like Python on every edge, beside it and far beyond."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import cpp_ranges
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.table import Table
from tests.support.tables_strategies import edges, tables

MAIN = """
#include "tables.hpp"
#include <iostream>
int main() {
    int sm, world, dtype, fusion, caller; std::string link; long long tokens, hidden;
    while (std::cin >> sm >> link >> world >> dtype >> fusion >> tokens >> hidden >> caller) {
        const phalanx::allreduce::Table* table = phalanx::allreduce::find(sm, link.c_str(), world);
        if (!table) { std::cout << "none\\n"; continue; }
        try {
            const auto kind = phalanx::allreduce::Dtype(dtype);
            const auto who = phalanx::allreduce::Caller(caller);
            const auto a = phalanx::allreduce::lookup(*table, kind, fusion, tokens, hidden, who);
            std::cout << a.strategy << ' ' << a.fused << ' ' << a.measured << ' ' << table->digest << '\\n';
        } catch (const std::invalid_argument&) { std::cout << "invalid\\n"; }
    }
}
"""
DTYPES = ["bf16", "fp16", "fp32"]


def answers(folder, tables: list[Table], queries) -> list[str]:
    (folder / "tables.hpp").write_text(cpp_ranges.emit(tables), encoding="utf-8")
    (folder / "main.cpp").write_text(MAIN, encoding="utf-8")
    compile_ = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-o", "answer", "main.cpp"]
    subprocess.run(compile_, cwd=folder, check=True)
    text = "".join(f"{f.sm} {f.link} {f.world} {DTYPES.index(d)} {int(n)} {t} {h} {int(c)}\n" for f, d, n, t, h, c in queries)
    ran = subprocess.run(["./answer"], cwd=folder, input=text, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


@pytest.mark.skipif(shutil.which("g++") is None, reason="not run: needs g++")
@given(st.lists(tables(), min_size=6, max_size=6, unique_by=lambda table: table.fingerprint))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@seed(20261121)
def test_cpp_answers_like_python(tmp_path_factory, tables):
    queries = [(table.fingerprint, *edge) for table in tables for edge in edges(table)]
    expected = []
    for table in tables:
        for edge in edges(table):
            entry = table.lookup(*edge)
            expected.append(f"{int(entry.strategy)} {int(entry.fused)} {int(entry.source == 'table')} {table.digest}")
    assert answers(tmp_path_factory.mktemp("cpp"), tables, queries) == expected


@pytest.mark.skipif(shutil.which("g++") is None, reason="not run: needs g++")
def test_what_cpp_refuses(tmp_path):
    from phalanx.tables.seed import default

    here = Fingerprint(90, "nvlink", 2)
    queries = [
        (here, "bf16", Fusion.NONE, 0, 8, Caller.REPLICATED),
        (here, "bf16", 3, 1, 8, Caller.GEMM),
        (here, "bf16", Fusion.NONE, 8, -1, Caller.SHARDED),
        (Fingerprint(90, "pcie", 2), "bf16", Fusion.NONE, 8, 8, Caller.REPLICATED),
    ]
    assert answers(tmp_path, [Table(here, (), default(here))], queries) == ["invalid", "invalid", "invalid", "none"]


def test_no_tables():
    with pytest.raises(TableError, match="phalanx allreduce tune"):
        cpp_ranges.emit([])

# SPDX-License-Identifier: Apache-2.0
"""From CSVs to tables and C++: one file for several machines, digests in the header, whole or not at all."""

from __future__ import annotations

import pytest

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import cpp_lookup
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Strategy
from phalanx.tables.table_file import load
from phalanx.tune import codegen, records
from tests.support.tune_benchmarks import NVLINK2, SMALL, bench, folder_of

NVLINK4, OFF_GPU = Fingerprint(90, "nvlink", 4), Fingerprint(0, "shm", 2)


def test_a_folder_of_several_machines(tmp_path):
    folder_of(tmp_path, NVLINK2, NVLINK4, OFF_GPU, **SMALL)
    results, paths = codegen.generate(records.read_folder(tmp_path), tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        "tables/sm0.shm.tp2.json", "tables/sm90.nvlink.tp2.json", "tables/sm90.nvlink.tp4.json",
        "gen_heuristic_code/generated_lookup_table.cpp",
    ]  # fmt: skip
    text = paths[3].read_text(encoding="utf-8")
    assert [lookup.sm for lookup in cpp_lookup.parse(text)] == [0, 90]
    assert text.count("TP=8: not measured; every value is the seed's") == 2
    assert text.count("TP=4: not measured; every value is the seed's (scaled from sm0.shm.tp2)") == 1
    for one, path in zip(results, paths[:3], strict=True):
        table = load(path)
        assert table == one.table
        assert f"sha256:{table.digest}" in text
        assert table.provenance["gpu"] == "synthetic"
        assert table.provenance["regret of the table"].startswith("mean ")


def test_the_lookup_table_says_what_was_measured(tmp_path):
    folder_of(tmp_path, NVLINK2, fusions="NONE")
    codegen.generate(records.read_folder(tmp_path), tmp_path)
    (lookup,) = cpp_lookup.parse((tmp_path / codegen.LOOKUP).read_text(encoding="utf-8"))
    table = load(tmp_path / "tables" / "sm90.nvlink.tp2.json")
    for h, hidden in enumerate(lookup.hidden):
        for t, tokens in enumerate(lookup.tokens):
            entry = table.lookup("bf16", Fusion.NONE, tokens, hidden)
            assert entry.source == "table"
            assert lookup.values[0][0][h][t] == entry.strategy


def test_another_dtype_alone(tmp_path):
    folder_of(tmp_path, NVLINK2, **SMALL, dtype="fp32")
    results, _ = codegen.generate(records.read_folder(tmp_path), tmp_path)
    (lookup,) = cpp_lookup.parse((tmp_path / codegen.LOOKUP).read_text(encoding="utf-8"))
    assert lookup.values[0][0][6][8] == results[0].table.lookup("fp32", Fusion.NONE, 256, 8192).strategy


def test_an_incumbents_csv_keeps_strategies_that_are_not_ours(tmp_path):
    rows = ["world_size,dtype,size,num_tokens,hidden_size,strategy,fusion,time (us)"]
    rows += [
        f"2,float16,256,1,128,{name},NONE,{us}" for name, us in (("NCCL", 9), ("NCCL_SYMMETRIC", 2), ("AUTO", 1), ("ONESHOT", 5))
    ]
    (tmp_path / "benchmark.tp2.sm100.csv").write_text("\n".join(rows), encoding="utf-8")
    results, _ = codegen.generate(records.read_folder(tmp_path), tmp_path)
    assert str(results[0].table.fingerprint) == "sm100.nvlink.tp2"
    assert results[0].table.lookup("fp16", Fusion.NONE, 1, 128).strategy is Strategy.NCCL_SYMMETRIC
    (lookup,) = cpp_lookup.parse((tmp_path / codegen.LOOKUP).read_text(encoding="utf-8"))
    assert lookup.values[0][0][0][0] == 8


@pytest.mark.parametrize("fastest", ["MNNVL", "SYMM_MEM", "UB", "MIN_LATENCY", "TWOSHOT"])
def test_a_winner_that_their_dispatcher_refuses_leaves_the_cell_to_the_next_one(fastest, tmp_path):
    """One token for 8 ranks, which TWOSHOT has not enough of."""
    rows = ["world_size,dtype,size,num_tokens,hidden_size,strategy,fusion,time (us)"]
    rows += [f"8,bfloat16,256,1,128,{name},NONE,{us}" for name, us in ((fastest, 1), ("NCCL_SYMMETRIC", 2), ("NCCL", 9))]
    (tmp_path / "benchmark.tp8.sm100.csv").write_text("\n".join(rows), encoding="utf-8")
    codegen.generate(records.read_folder(tmp_path), tmp_path)
    (lookup,) = cpp_lookup.parse((tmp_path / codegen.LOOKUP).read_text(encoding="utf-8"))
    assert lookup.values[2][0][0][0] == 8
    (tmp_path / "benchmark.tp8.sm100.csv").write_text("\n".join(rows[:2]), encoding="utf-8")  # nothing else was measured
    codegen.generate(records.read_folder(tmp_path), tmp_path)
    (lookup,) = cpp_lookup.parse((tmp_path / codegen.LOOKUP).read_text(encoding="utf-8"))
    assert lookup.values[2][0][0][0] in (0, 4)


def test_nothing_is_written_where_one_file_is_faulty(tmp_path):
    folder_of(tmp_path, NVLINK2, NVLINK4, **SMALL)
    path = tmp_path / "benchmark.tp4.sm90.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("ONESHOT", "RING"), encoding="utf-8")
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(TableError, match=r"benchmark\.tp4\.sm90\.csv line \d+: strategy 'RING"):
        codegen.generate(records.read_folder(tmp_path), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_two_links_have_no_place_in_one_lookup_table(tmp_path):
    tables = [
        one.table
        for link in ("nvlink", "pcie_p2p")
        for one in codegen.decide_benchmarks([bench(Fingerprint(90, link, 2), **SMALL)])
    ]
    with pytest.raises(TableError, match=r"two tables of sm90 and tp2: sm90\.nvlink\.tp2 and sm90\.pcie_p2p\.tp2"):
        codegen.write_code(tables, tmp_path)
    with pytest.raises(TableError, match="phalanx allreduce tune"):
        codegen.write_code([], tmp_path)
    assert not list(tmp_path.iterdir())

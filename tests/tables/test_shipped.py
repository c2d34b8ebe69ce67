# SPDX-License-Identifier: Apache-2.0
"""A machine finds its own table; an unknown one gets the nearest seed, and a line that says how to tune."""

from __future__ import annotations

import pytest

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import shipped
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import default
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tables.table_file import load, save
from tests.architecture.sources import ROOT
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
    assert table.lookup("bf16", Fusion.NONE, 1, 8192).source == "estimated"
    entry = table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, 64, 8192, Caller.SHARDED)
    assert (entry.strategy, entry.source) == (Strategy.RS_NORM_AG, "estimated")
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
        assert not table.seed.sequence_parallel.estimated


@pytest.mark.parametrize("world", [3, 5, 6, 7, 8])
def test_thresholds_are_estimated_where_they_were_not_measured(world, tmp_path):
    """Without a tuned table, layers run by the thresholds of the nearest number of ranks."""
    table = shipped.table_for(Fingerprint(90, "nvlink", world), tmp_path)
    first, long = 64, 4096
    for fusion in (Fusion.RESIDUAL_RMS_NORM, Fusion.RESIDUAL_RMS_NORM_QUANT_FP8, Fusion.RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE):
        for caller in (Caller.SHARDED, Caller.GEMM):
            for tokens in (1, first - 1, first, long - 1, long, 8192):
                entry = table.lookup("bf16", fusion, tokens, 8192, caller)
                wanted = {True: Strategy.RS_NORM_AG}.get(tokens >= first)
                wanted = Strategy.GEMM_RS if caller is Caller.GEMM and tokens >= long else wanted
                if wanted is None:
                    assert entry == table.lookup("bf16", fusion, tokens, 8192)
                else:
                    assert (entry.strategy, entry.source) == (wanted, "estimated")
    assert table.gemm_rs_min_bytes() == 2 * 8192 * long


@pytest.mark.parametrize("world", [2, 4])
def test_h200_measured_sequence_parallelism(world, tmp_path):
    """Each decision of a layer up to 16,384 tokens is the table's, and none the seed's; it changes where the tuner found it."""
    table = shipped.table_for(Fingerprint(90, "nvlink", world), tmp_path)
    fused = Fusion.RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE
    for fusion in (Fusion.RESIDUAL_RMS_NORM, Fusion.RESIDUAL_RMS_NORM_QUANT_FP8, fused):
        for caller in (Caller.SHARDED, Caller.GEMM):
            entries = [table.lookup("bf16", fusion, 1 << power, 8192, caller) for power in range(15)]
            assert {entry.source for entry in entries} == {"table"}
            assert (entries[0].strategy, entries[9].strategy) == (Strategy.ONESHOT, Strategy.RS_NORM_AG)
    assert table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, 64, 8192, Caller.SHARDED).strategy is Strategy.TWOSHOT
    assert table.lookup("bf16", fused, 64, 8192, Caller.SHARDED).strategy is Strategy.RS_NORM_AG
    assert table.lookup("bf16", fused, 4096, 8192, Caller.GEMM).strategy is Strategy.GEMM_RS
    # No run of four has reached this hidden size.
    assert table.lookup("bf16", fused, 64, 1024, Caller.SHARDED).source == ("table" if world == 2 else "seed")


def test_cpu_ranks_run_sequence_parallelism_only_where_it_was_tuned(tmp_path):
    table = shipped.table_for(Fingerprint(0, "shm", 2), tmp_path)
    for tokens in (1, 64, 4096, 1 << 20):
        entry = table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, tokens, 8192, Caller.GEMM)
        assert entry == table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, tokens, 8192)
    assert table.gemm_rs_min_bytes() is None


@pytest.mark.parametrize("world", [2, 4])
def test_the_files_of_version_1_that_were_measured_are_the_shipped_tables(world):
    old = load(ROOT / "benchmarks" / "results" / "allreduce" / "tables" / f"sm90.nvlink.tp{world}.json")
    assert old == load(shipped._SHIPPED / f"sm90.nvlink.tp{world}.json")


def test_a_norm_before_experts_in_fp8_leaves_the_residual_sharded_on_h200():
    """The fusions of a norm that is kept for a router."""
    two, four = (shipped.table_for(Fingerprint(90, "nvlink", world)) for world in (2, 4))
    for fusion in (Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8, Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE):
        for caller in (Caller.SHARDED, Caller.GEMM):
            assert two.lookup("bf16", fusion, 64, 4096, caller).strategy is not Strategy.RS_NORM_AG
            assert two.lookup("bf16", fusion, 256, 4096, caller).strategy is Strategy.RS_NORM_AG
            assert four.lookup("bf16", fusion, 64, 4096, caller).strategy is Strategy.RS_NORM_AG
        for table, tokens in ((two, 4096), (four, 16384)):
            assert table.lookup("bf16", fusion, tokens, 4096, Caller.GEMM).strategy is Strategy.GEMM_RS

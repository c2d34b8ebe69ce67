# SPDX-License-Identifier: Apache-2.0
"""CSVs come back as they went; a faulty one is an error that names file, row and cure, and loses nothing."""

from __future__ import annotations

import json

import pytest

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune import records
from phalanx.tune.decide import decide
from phalanx.tune.sweep import Task
from tests.support.tune_benchmarks import LAYERS, NVLINK2, SMALL, bench

HEADER = "world_size,dtype,size,num_tokens,hidden_size,strategy,fusion,op,time (us)"
ROW = "2,bfloat16,16384,1,8192,ONESHOT,NONE,all_reduce,2.5"


def read(folder, text, name="benchmark.tp2.sm90.csv"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return records.read(path)


@pytest.mark.parametrize("fingerprint", [NVLINK2, Fingerprint(0, "shm", 4)])
def test_round_trip(fingerprint, tmp_path):
    wrote = bench(fingerprint, **SMALL, fusions=",".join(Fusion.__members__))
    wrote.skips[Task("bf16", Fusion.NONE, 1, 128, Choice(Strategy.AUTO))] = 'a "reason"'
    path = records.write(wrote, tmp_path)
    assert path.name == f"benchmark.tp{fingerprint.world}.sm{fingerprint.sm}.csv"
    assert records.read(path) == wrote
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == HEADER
    assert any(",ONESHOT+UNFUSED,RESIDUAL_RMS_NORM," in line for line in lines)
    assert any((",GLOO," if fingerprint.sm == 0 else ",NCCL,") in line for line in lines)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, path.with_suffix(".json").name]
    sidecar = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert len(sidecar["samples"]) == len(wrote.times)


def test_layers_with_their_gemm_lie_behind_all_other_rows(tmp_path):
    """Under an operation and names of their own, so that no reader of all-reduces takes one for another."""
    wrote = bench(NVLINK2, tokens="16,256", hidden="1024", fusions="RESIDUAL_RMS_NORM", strategies=LAYERS)
    path = records.write(wrote, tmp_path)
    assert records.read(path) == wrote
    rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    assert [row[7] for row in rows] == ["all_reduce"] * 12 + ["gemm_all_reduce"] * 7
    alone, gemm = {row[5] for row in rows[:12]}, {row[5] for row in rows[12:]}
    assert gemm == {f"GEMM+{name}" for name in alone} | {"GEMM_RS"}
    assert alone == {"NCCL", "ONESHOT", "TWOSHOT", "ONESHOT+UNFUSED", "TWOSHOT+UNFUSED", "RS_NORM_AG"}
    path.with_suffix(".json").unlink()  # the names alone say what they are
    assert records.read(path).times == wrote.times


@pytest.mark.parametrize(
    ("text", "us"),
    [
        (f"{HEADER}\n{ROW}\n", 2.5),
        (f"{HEADER.replace('op,', '')}\n{ROW.replace('all_reduce,', '')}\n", 2.5),
        (f"{HEADER.replace('fusion', 'fusion_op')}\r\n{ROW}\r\n", 2.5),
        (f"{HEADER.replace('time (us)', 'time_ms')}\n{ROW}\n\n", 2500.0),
        (f"\ufeff{HEADER},version\n{ROW},v1\n", 2.5),
        (f'{HEADER}\n{ROW.replace("bfloat16", chr(34) + "bf16" + chr(34))}\n', 2.5),
        ("strategy,time (us),fusion,hidden_size,num_tokens,size,dtype,world_size\nONESHOT, 2.5 ,NONE,8192,1,16384,bf16,2", 2.5),
    ],
)  # fmt: skip
def test_accepted_spellings(text, us, tmp_path):
    assert read(tmp_path, text).times == {Task("bf16", Fusion.NONE, 1, 8192, Choice(Strategy.ONESHOT)): us}


@pytest.mark.parametrize(
    ("op", "name", "kind"),
    [
        ("all_reduce", "TWOSHOT", "all_reduce"), ("allreduce", "TWOSHOT", "all_reduce"), ("", "TWOSHOT", "all_reduce"),
        ("gemm_allreduce", "TWOSHOT", "gemm_all_reduce"), (" gemm_all_reduce ", "GEMM+TWOSHOT", "gemm_all_reduce"),
        ("", "GEMM+TWOSHOT", "gemm_all_reduce"), ("gemm_allreduce", "GEMM_RS", "gemm_all_reduce"),
    ],
)  # fmt: skip
def test_the_operation_of_a_row(op, name, kind, tmp_path):
    """As in files of TensorRT-LLM's --profile_gemm_allreduce, whose times contain the GEMM before."""
    (task,) = read(tmp_path, f"{HEADER}\n{ROW.replace('ONESHOT', name).replace('all_reduce', op)}\n").times
    assert (task.op, task.choice.strategy.name) == (kind, name.removeprefix("GEMM+"))


def test_layers_with_their_gemm_decide_no_all_reduce(tmp_path):
    """Both operations in one file: the all-reduce alone decides, and the other time, which is shorter here, is none of its own."""
    slow = ROW.replace("ONESHOT", "TWOSHOT").replace("all_reduce", "gemm_allreduce").replace("2.5", "1.0")
    measured = read(tmp_path, f"{HEADER}\n{ROW.replace('all_reduce', 'allreduce')}\n{slow}\n")
    assert len(measured.times) == 2
    assert decide(measured.times, NVLINK2).lookup("bf16", Fusion.NONE, 1, 8192).strategy is Strategy.ONESHOT
    with pytest.raises(TableError, match="no times of sm90"):
        decide(read(tmp_path, f"{HEADER}\n{slow}\n").times, NVLINK2)


FAULTS = {
    "": "is empty",
    f"{HEADER}\n": "has a header and no rows",
    f"{HEADER.replace('strategy,', '')}\n{ROW}": r"line 1: the column 'strategy' is missing",
    f"{HEADER},colour\n{ROW},red": r"line 1: the column 'colour' is unknown",
    f"{HEADER},fusion_op\n{ROW},NONE": r"line 1: the column 'fusion' appears twice",
    f"{HEADER}\n{ROW.replace('ONESHOT', 'RING')}": r"line 2: strategy 'RING' is unknown",
    f"{HEADER}\n{ROW.replace('all_reduce', 'all_gather')}": r"line 2: op 'all_gather' is unknown",
    f"{HEADER}\n{ROW.replace('ONESHOT', 'GEMM+ONESHOT')}": r"line 2: op 'all_reduce' is not of strategy 'GEMM\+ONESHOT'",
    f"{HEADER}\n{ROW}\n{ROW.replace('all_reduce', '')}": r"line 3: .* appears in the file twice",
    f"{HEADER}\n{ROW.replace('NONE', 'RMS')}": r"line 2: fusion 'RMS' is unknown",
    f"{HEADER}\n{ROW.replace('bfloat16', 'int4')}": r"line 2: dtype 'int4' is unknown",
    f"{HEADER}\n{ROW}\n{ROW}": r"line 3: .* appears in the file twice",
    f"{HEADER}\n{ROW.replace('16384,1,', '49152,3,')}": r"line 2: tokens 3 is not on the grid",
    f"{HEADER}\n{ROW.replace('16384,1,8192', '10240,1,5120')}": r"line 2: hidden 5120 is not on the grid",
    f"{HEADER}\n{ROW.replace('16384', '16383')}": r"line 2: size 16383, but 1 x 8192 x 2 is 16384 bytes",
    f"{HEADER}\n{ROW.replace('2,bf', '4,bf')}": r"line 2: world_size 4 in a file of tp2",
    f"{HEADER}\n{ROW.replace('2.5', 'nan')}": r"line 2: the time is 'nan'",
    f"{HEADER}\n{ROW.replace('2.5', '-2.5')}": r"line 2: the time is '-2.5'",
    f"{HEADER}\n{ROW.replace('2.5', '0')}": r"line 2: the time is '0'",
    f"{HEADER}\n{ROW.replace('2.5', 'inf')}": r"line 2: the time is 'inf'",
    f"{HEADER}\n{ROW.replace('2.5', 'fast')}": r"line 2: the time is 'fast'",
    f"{HEADER}\n{ROW.replace(',1,', ',1.0,')}": r"line 2: num_tokens is '1.0'",
    f"{HEADER}\n{ROW}\n2,bfloat16": r"line 3: 2 fields under 9 columns",
    f'{HEADER}\n{ROW}\n"2,bf': r"line 3: ",
}


@pytest.mark.parametrize("text", FAULTS)
def test_faults_name_file_row_and_cure(text, tmp_path):
    with pytest.raises(TableError, match=rf"benchmark\.tp2\.sm90\.csv.*{FAULTS[text]}|{FAULTS[text]}") as caught:
        read(tmp_path, text)
    assert "benchmark.tp2.sm90.csv" in str(caught.value)
    assert caught.value.next


def test_names_and_missing_files(tmp_path):
    with pytest.raises(TableError, match="is not the name of a benchmark"):
        read(tmp_path, f"{HEADER}\n{ROW}", "times.csv")
    with pytest.raises(TableError, match="cannot be read"):
        records.read(tmp_path / "benchmark.tp2.sm80.csv")
    with pytest.raises(TableError, match="holds no benchmark"):
        records.read_folder(tmp_path)


def test_a_sidecar_names_its_own_grid(tmp_path):
    wrote = bench(tokens="3,100", hidden="5120", fusions="NONE")
    assert records.read(records.write(wrote, tmp_path)).times == wrote.times


@pytest.mark.parametrize("text", ["", "{}", '{"format": "x", "version": 1}', "[]"])
def test_a_faulty_sidecar(text, tmp_path):
    (tmp_path / "benchmark.tp2.sm90.json").write_text(text, encoding="utf-8")
    with pytest.raises(TableError, match=r"benchmark\.tp2\.sm90\.json is not a sidecar"):
        read(tmp_path, f"{HEADER}\n{ROW}")


def test_several_in_a_folder(tmp_path):
    for fingerprint in (Fingerprint(90, "nvlink", 4), NVLINK2, Fingerprint(0, "shm", 2)):
        records.write(bench(fingerprint, **SMALL), tmp_path)
    assert [(b.sm, b.world) for b in records.read_folder(tmp_path)] == [(0, 2), (90, 2), (90, 4)]
    assert [(b.sm, b.world) for b in records.read_folder(tmp_path, 90)] == [(90, 2), (90, 4)]

# SPDX-License-Identifier: Apache-2.0
"""`phalanx allreduce` from its command line: the whole pipeline on CPU ranks, and each stage alone."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from itertools import product

import pytest
from typer.testing import CliRunner

from phalanx.errors import OptionError, PhalanxError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import cpp_lookup, shipped
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.strategy import Strategy
from phalanx.tables.table_file import load
from phalanx.tune import records
from phalanx.tune.cli import app, main
from phalanx.tune.sweep import GEMM_ALL_REDUCE
from tests.support.tune_benchmarks import LAYERS, NVLINK2, SMALL, folder_of

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Tables of the person who runs the tests stay out of it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / ".cache" / "phalanx" / "tables"


def verb(*arguments):
    """(what it printed, its error or None)"""
    ran = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if ran.exception is not None and not isinstance(ran.exception, (PhalanxError, SystemExit)):
        raise ran.exception
    return ran.output, ran.exception


def test_one_command_from_measurements_to_pictures(tmp_path, home):
    """Bench, tables, C++ and pictures for 2 and 4 ranks, with true times; then engines on this host find the tables, which decide
    what layers run."""
    command = [sys.executable, "-m", "phalanx", "allreduce", "tune", "--tp_size", "2,4", "--device", "cpu", "--tokens", "8,64"]
    command += ["--hidden", "128,512", "--fusions", "NONE,RESIDUAL_RMS_NORM", "--calls", "5", "--replays", "3", "--enable_auto"]
    ran = subprocess.run([*command, "--save_csv_dir", "made"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    folder = tmp_path / "made"
    for world in (2, 4):
        bench = records.read(folder / f"benchmark.tp{world}.sm0.csv")
        assert not bench.skips
        assert len(bench.times) == 4 * (4 + 7) + 2 * 8  # layers with their GEMM at 64 tokens
        names = {task.name(0) for task in bench.times if task.op == GEMM_ALL_REDUCE}
        assert names >= {"GEMM_RS", "GEMM+RS_NORM_AG", "GEMM+TWOSHOT", "GEMM+GLOO", "GEMM+AUTO"}
        assert bench.facts["complete"] == "yes"
        table = load(folder / "tables" / f"sm0.shm.tp{world}.json")
        assert {(section.fusion, section.caller) for section in table.sections} == {
            (Fusion.NONE, Caller.REPLICATED), *((Fusion.RESIDUAL_RMS_NORM, caller) for caller in Caller)
        }  # fmt: skip
        for caller, tokens in product(Caller, (8, 16, 64)):
            assert table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, tokens, 512, caller).source == "table"
        explained, _ = verb("explain", "--tp_size", world, "--device", "cpu", "--hidden", 512, "--fusions", "RESIDUAL_RMS_NORM")
        measured = [line for line in explained.splitlines() if re.match(r" +\d+ to ", line) and 8 <= int(line.split()[0]) <= 64]
        assert len(measured) >= 3
        assert all(" table: table of sm0.shm" in line for line in measured)
        assert shipped.find(Fingerprint(0, "shm", world), home) == table
        for fusion in ("NONE", "RESIDUAL_RMS_NORM"):
            assert len(list((folder / "viz" / fusion).glob(f"benchmark.tp{world}.sm0_*.png"))) == (3 if fusion == "NONE" else 6)
        assert "GLOO" in (folder / f"benchmark.tp{world}.sm0.csv").read_text(encoding="utf-8")
    assert (folder / "viz" / "report.html").stat().st_size > 10_000
    (lookup,) = cpp_lookup.parse((folder / "gen_heuristic_code" / "generated_lookup_table.cpp").read_text(encoding="utf-8"))
    assert lookup.sm == 0


@pytest.mark.parametrize("package", ["scipy", "pandas"])
def test_a_package_that_is_missing(package, tmp_path, home):
    """What decides is asked for before a rank starts; pictures may be missing, and the tables are made."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{package!r}] = None", encoding="utf-8")
    command = [sys.executable, "-m", "phalanx", "allreduce", "tune", "--tp_size", "2", "--device", "cpu", "--tokens", "8"]
    command += ["--hidden", "128", "--fusions", "NONE", "--strategies", "NCCL,ONESHOT", "--calls", "2", "--replays", "2"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    install = "'scipy>=1.13'\n" if package == "scipy" else "'matplotlib"
    assert f"{package} is not installed; run: pip install {install}" in ran.stderr
    if package == "scipy":
        assert ran.returncode == 2
        assert not (tmp_path / "data").exists()
        return
    assert ran.returncode == 0, ran.stderr
    assert "no pictures" in ran.stderr
    assert (home / "sm0.shm.tp2.json").exists()
    assert not (tmp_path / "data" / "viz").exists()


def test_a_strategy_is_measured_again(tmp_path, home):
    size = ["--tp_size", 2, "--device", "cpu", "--tokens", 1, "--hidden", 128, "--save_csv_dir", tmp_path]
    size += ["--fusions", "NONE,RESIDUAL_RMS_NORM", "--calls", 5, "--replays", 3]
    path = tmp_path / "benchmark.tp2.sm0.csv"
    samples = []
    for more in ([], ["--remeasure", "GLOO", "--fusions", "NONE"]):
        _, error = verb("bench", *size, *more)
        assert error is None
        samples.append(records.read(path).samples)
    changed = {str(task) for task, before in samples[0].items() if samples[1][task] != before}
    assert samples[0].keys() == samples[1].keys()
    assert changed == {"bf16 NONE 1x128 NCCL"}


def test_a_folder_with_a_finished_record(tmp_path, home, monkeypatch, caplog):
    """No rank starts where nothing is left to measure; the same command again measures nothing, and goes on to the tables."""
    size = ["--tp_size", 2, "--device", "cpu", "--tokens", "1,16384", "--hidden", 128, "--save_csv_dir", tmp_path / "made"]
    size += ["--fusions", "NONE", "--calls", 5, "--replays", 3, "--max_mib", 1]
    with caplog.at_level(logging.INFO, "phalanx"):
        printed, error = verb("bench", *size)
    assert (error, printed) == (None, f"{tmp_path}/made/benchmark.tp2.sm0.csv\n")
    assert "tp 2: skipped: bf16 NONE 16384x128 NCCL and 2 more like it: 4.0 MiB is more than --max_mib 1" in caplog.text
    before = (tmp_path / "made" / "benchmark.tp2.sm0.csv").read_bytes()
    with caplog.at_level(logging.INFO, "phalanx"):
        printed, error = verb("tune", *size)
    assert error is None
    assert "3 results are taken from" in caplog.text
    assert (tmp_path / "made" / "benchmark.tp2.sm0.csv").read_bytes() == before
    assert (home / "sm0.shm.tp2.json").exists()
    monkeypatch.setattr("phalanx.launch.start", lambda *_: pytest.fail("a rank starts"))
    for more in (["--tokens", 16384], ["--tokens", 16384, "--restart"]):
        printed, error = verb("tune", *size, *more)
        assert "give a larger --max_mib" in str(error)
        assert not printed
        assert (tmp_path / "made" / "benchmark.tp2.sm0.csv").read_bytes() == before


def test_a_launcher_that_starts_again_behind_a_hang_drops_nothing(monkeypatch):
    """What is in the folder is then this run's own, whatever its command says."""
    restarts = []
    monkeypatch.setattr("phalanx.tune.commands.measure", lambda tp_size, options, rank: restarts.append(options.restart) or [])
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert verb("bench", "--restart")[1] is None
    assert restarts == [True, False]


def test_a_failure_of_the_system_is_one_line(tmp_path, capfd):
    folder_of(tmp_path, NVLINK2, **SMALL)
    for argument, status in ((tmp_path / "benchmark.tp2.sm90.csv" / "below", 1), (tmp_path / "tables", 0)):
        assert main(["import", str(tmp_path / "benchmark.tp2.sm90.csv"), "--folder", str(argument)]) == status
        output = capfd.readouterr().err
        assert output.startswith("phalanx: [Errno 20] Not a directory: ") if status else not output
        assert output.count("\n") == status


def test_codegen_and_plot_rerun_alone(tmp_path):
    folder_of(tmp_path, NVLINK2, **SMALL | {"fusions": "NONE"})
    printed, error = verb("codegen", "--data_dir", tmp_path)
    assert error is None
    assert [line.removeprefix(f"{tmp_path}/") for line in printed.splitlines()] == [
        "tables/sm90.nvlink.tp2.json", "gen_heuristic_code/generated_lookup_table.cpp",
    ]  # fmt: skip
    table = tmp_path / "tables" / "sm90.nvlink.tp2.json"
    printed, error = verb("codegen", "--data_dir", tmp_path / "other", "--table", table)
    assert error is None
    assert (tmp_path / "other" / "gen_heuristic_code" / "generated_lookup_table.cpp").exists()
    printed, error = verb("plot", "--data_dir", tmp_path)
    assert error is None
    assert printed.splitlines()[-1].endswith("viz/report.html")
    printed, error = verb("explain", "--tp_size", 2, "--hidden", 8192, "--table", table, "--fusions", "NONE")
    assert error is None
    assert "ONESHOT" in printed


def test_explain_takes_the_ranks_from_table_or_machine(tmp_path, home):
    folder_of(tmp_path, NVLINK2, **SMALL | {"fusions": "NONE"})
    assert verb("codegen", "--data_dir", tmp_path)[1] is None
    table = tmp_path / "tables" / "sm90.nvlink.tp2.json"
    outputs = {verb("explain", "--table", table, "--fusions", "NONE", *more) for more in ([], ["--tp_size", 2])}
    ((printed, error),) = outputs
    assert error is None
    assert printed.startswith("sm90.nvlink.tp2: ")
    for more in (["--tp_size", 4], ["--machine", "sm90.pcie.tp2"]):
        printed, error = verb("explain", "--table", table, *more)
        assert isinstance(error, OptionError)
        assert not printed
        assert f"--table {table}; " in str(error)
    printed, error = verb("explain", "--machine", "sm90.nvlink.tp4", "--fusions", "NONE")
    assert error is None
    assert "sm90.nvlink.tp4: " in printed


def test_explain_an_unknown_machine(home):
    printed, error = verb("explain", "--tp_size", 3, "--machine", "sm77.pcie.tp3", "--hidden", 4096, "--fusions", "NONE")
    assert error is None
    assert printed.startswith("no all-reduce table for sm77.pcie.tp3: the seed decides (class pcie); `phalanx allreduce tune")
    assert "NCCL" in printed
    assert "the seed" in printed


def test_import_of_csvs_and_code(tmp_path, home):
    folder_of(tmp_path, NVLINK2, **SMALL)
    (tmp_path / "benchmark.tp2.sm90.json").unlink()
    printed, error = verb("import", tmp_path / "benchmark.tp2.sm90.csv")
    assert error is None
    assert shipped.find(NVLINK2, home).lookup("bf16", Fusion.NONE, 1, 128).strategy is Strategy.ONESHOT
    cell = "{" + ",".join(["8"] * 10 + ["5"] * 5) + "}"
    rows = "{" + ",".join([cell] * 7) + "}"
    text = f"inline T AllReduceBestStrategyTableSM100 = {{{','.join(['{' + ','.join([rows] * 4) + '}'] * 3)}}};"
    (tmp_path / "table.h").write_text(text, encoding="utf-8")
    printed, error = verb("import", tmp_path / "table.h", "--link", "nvlink_multicast")
    assert error is None
    assert "28 ranges of strategies that do not run here became NCCL" in printed
    table = shipped.find(Fingerprint(100, "nvlink_multicast", 8), home)
    assert table.lookup("bf16", Fusion.NONE, 1, 128).strategy is Strategy.NCCL
    assert table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, 4096, 128).strategy is Strategy.TWOSHOT


def test_a_csv_with_layers_is_imported_with_their_sections(tmp_path, home):
    folder_of(tmp_path, NVLINK2, tokens="16,256", hidden="1024,8192", fusions="RESIDUAL_RMS_NORM", strategies=LAYERS)
    assert verb("codegen", "--data_dir", tmp_path)[1] is None
    decided = load(tmp_path / "tables" / "sm90.nvlink.tp2.json")
    printed, error = verb("import", tmp_path / "benchmark.tp2.sm90.csv")
    assert error is None
    assert "became NCCL" not in printed
    installed = shipped.find(NVLINK2, home)
    assert installed == decided
    assert {section.caller for section in installed.sections} == set(Caller)


@pytest.mark.parametrize("size", ["2", "1", "all"])
def test_one_gpu_has_nothing_to_reduce(size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("phalanx.tune.commands._gpu_count", lambda: 1)
    assert "1 GPU here; one rank has nothing to reduce; use --device cpu" in str(verb("bench", "--tp_size", size)[1])


NOTHING = ["--tp_size", "2", "--device", "cpu", "--tokens", "16384", "--hidden", "8192"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "--tp_size", "1", "--device", "cpu"], "can form 2 to 8 ranks on cpu, not 1; give 2 to 8"),
        (["bench", "--tp_size", "2,2", "--device", "cpu"], "--tp_size 2,2: 2 is given twice; give each size once"),
        (["bench", "--tp_size", "2,x", "--device", "cpu"], "'x' is not a number of ranks"),
        (["bench", "--tp_size", "2,", "--device", "cpu"], "'' is not a number of ranks"),
        (["bench", "--tp_size", "2,9", "--device", "cpu"], "can form 2 to 8 ranks on cpu, not 9"),
        (["bench", *NOTHING, "--max_mib", "nan"], "--max_mib nan is not a size"),
        (["bench", *NOTHING], "256.0 MiB is more than --max_mib 4; give a larger --max_mib"),
        (["tune", *NOTHING], "256.0 MiB is more than --max_mib 4; give a larger --max_mib"),
        (["bench", "--tp_size", "2", "--device", "cpu", "--strategies", "LOWPRECISION"], "choose among NCCL, ONESHOT, TWOSHOT"),
        (["tune", "--tp_size", "2", "--device", "cpu", "--strategies", "NCCL,MNNVL"], "choose among NCCL, ONESHOT, TWOSHOT"),
        (
            ["bench", "--tp_size", "2", "--device", "cpu", "--save_csv_dir", "/dev/null"],
            "--save_csv_dir /dev/null cannot be written; ",
        ),
        (["tune", "--tp_size", "2", "--device", "cpu", "--save_csv_dir", "/proc/d"], "--save_csv_dir /proc/d cannot be written; "),
        (["bench", "--tp_size", "2", "--device", "tpu"], "use auto, cuda or cpu"),
        (["bench", "--tp_size", "2", "--device", "cpu", "--fusions", "RMS"], "fusion 'RMS' is unknown"),
        (["bench", "--tp_size", "2", "--device", "cpu", "--tokens", "0"], "--tokens '0' is not a size"),
        (["bench", "--tp_size", "2", "--device", "cpu", "--remeasure", "RING"], "strategy 'RING' is unknown"),
        (
            ["bench", "--tp_size", "2", "--device", "cpu", "--remeasure", "AUTO"],
            "--remeasure AUTO is not among the strategies to be measured",
        ),
        (["codegen", "--data_dir", "nowhere"], "nowhere holds no benchmark"),
        (["plot", "--data_dir", "nowhere"], "nowhere holds no benchmark"),
        (["import", "nowhere.cpp"], "cannot be read"),
        (["explain", "--tp_size", "4", "--machine", "sm90.nvlink.tp2"], "the same number of ranks"),
        (["explain", "--tp_size", "2", "--table", "nowhere.json"], "cannot be read"),
        (["explain"], "--tp_size is missing; nothing else gives the number of ranks; give it, or --machine, or --table"),
    ],
)
def test_bad_options_start_nothing(arguments, says, tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    _, error = verb(*arguments)
    assert says in str(error)
    assert not list(tmp_path.iterdir())

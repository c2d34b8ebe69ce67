# SPDX-License-Identifier: Apache-2.0
"""`phalanx plan` as it is typed: a model, JSON for programs, exit 2 where nothing fits, simulation, errors in one line."""

from __future__ import annotations

import json

import pytest

from benchmarks.planner.rows import RESULTS
from phalanx.cli import main
from phalanx.planner import calibration
from phalanx.planner.coefficients import Coefficients

pytestmark = pytest.mark.usefixtures("forked_python")


def test_a_plan_as_json_on_stdout(capsys):
    assert (
        main(["plan", "meta-llama/Meta-Llama-3-70B", "--gpu", "H200", "--gpus_per_node", "4", "--dtype", "fp8", "--json", "-"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["plans"][0]["layout"]["tp"] == 4
    assert document["serve"].startswith("phalanx serve meta-llama/Meta-Llama-3-70B --tp_size 4")


def test_verified_plans_are_in_the_json_and_stdout_is_json_alone(capsys, tmp_path, monkeypatch):
    run = json.loads((RESULTS / "plan_served_cpu.json").read_text())["runs"][0]
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path)
    calibration.install("CPU", Coefficients.from_json(run["coefficients"]), {"gpu": run["gpu"]})
    words = ["plan", "demo", "--gpu", "cpu", "--dtype", "fp32", "--isl", "16", "--osl", "4", "--concurrency", "2"]
    assert main([*words, "--verify", "--verify_plans", "1", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["verified"]
    assert set(row["measured"]) == {"output_tokens_per_second", "ms_per_token", "ttft_ms", "kv_tokens"}
    # Two requests at once: the burst is their first token and three more steps, by the definitions of the plan.
    seconds = 2 * 4 / row["measured"]["output_tokens_per_second"]
    assert 1e3 * seconds == pytest.approx(row["measured"]["ttft_ms"] + 3 * row["measured"]["ms_per_token"], rel=0.5)
    assert row["measured"]["kv_tokens"] > 0


def test_nothing_fits_is_status_2_with_the_nearest_change(capsys):
    assert main(["plan", "llama-3.1-405b", "--gpu", "H100", "--gpus_per_node", "4"]) == 2
    out = capsys.readouterr().out
    assert "no layout fits" in out
    assert "nearest: --dtype fp8 --gpus_per_node 8 would run as" in out


def test_a_size_that_no_layout_has_says_why_and_what_would_run(capsys):
    assert main(["plan", "llama-3-8b", "--gpu", "H100", "--gpus_per_node", "4", "--tp_size", "8"]) == 2
    out = capsys.readouterr().out
    assert "nearest: --gpus_per_node 8 would run as tp 8 pp 1" in out
    assert "nearest: without --tp_size, tp " in out
    assert "rejected (1):" in out
    assert "tp 8 spans nodes" in out


def test_files_are_written_and_never_overwritten(tmp_path, capsys):
    files = ["--json", str(tmp_path / "plan.json"), "--yaml", str(tmp_path / "plan.yaml")]
    words = ["plan", "llama-3-8b", "--gpu", "L40S", "--isl", "512", "--osl", "128", *files]
    assert main(words) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert (tmp_path / "plan.yaml").read_text().startswith("model: meta-llama/Meta-Llama-3-8B\n")
    assert main(words) == 2
    assert "a file is there" in capsys.readouterr().err


def test_files_are_checked_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("phalanx.planner.search.search", pytest.fail)
    monkeypatch.setattr("phalanx.planner.simulate.run", pytest.fail)
    taken = tmp_path / "taken.png"
    taken.write_text("kept")
    for command, message in (
        (f"plan llama-3-8b --gpu L40S --yaml {taken}", "the YAML file cannot be written to"),
        (f"plan simulate burst --model llama-3-8b --gpu H100 --plot {taken}", "the picture cannot be written to"),
        (f"plan simulate burst --model llama-3-8b --gpu H100 --plot {tmp_path}/new.xyz", "has an unknown kind"),
        (f"plan simulate burst --model llama-3-8b --gpu H100 --plot {taken}/new.png", "the picture cannot be written to"),
    ):
        assert main(command.split()) == 2
        assert message in capsys.readouterr().err
    assert taken.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "llama-3-8b", "--gpu", "V100"], "gpu 'V100' is not in the catalogue"),
        (["plan", "llama-3-8b", "--gpu", "H100", "--dtype", "int3"], "dtype 'int3' is unknown; use one of auto, fp8, int4, bf16, "),
        (["plan", "llama-3-8b", "--gpu", "H100", "--quantize_activations"], "it has no weights of 4-bit integers"),
        (["plan", "llama-3-8b", "--gpu", "H100", "--goal", "glory"], "goal 'glory' is unknown"),
        (["plan", "llama-3-8b", "--gpu", "H100", "--osl", "9000"], "its positions end at 8192"),
        (["plan", "simulate", "nowhere.csv", "--model", "llama-3-8b", "--gpu", "H100"], "is not a file"),
        (["plan", "simulate", "burst", "--model", "llama-3-8b", "--gpu", "H100", "--replicas", "1001"], "give 1 to 1000"),
        (["plan", "llama-3-8b", "--gpu", "H100", "--nodes", "513"], "513 nodes of 8 GPUs are too many; give at most 4096 GPUs"),
        (["plan", "llama-3-8b", "--gpu", "H100", "--max_seq_len", "10"], "max_seq_len=10 is too small"),
    ],
)
def test_errors_are_one_line_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert "\n" not in err


BOTH = (
    ("--gpus_per_node", "0"), ("--nodes", "0"), ("--nodes", "100000"), ("--concurrency", "0"), ("--concurrency", str(10**12)),
    ("--max_batch_size", "0"), ("--max_batch_size", "65537"), ("--max_seq_len", "0"), ("--max_num_tokens", "0"), ("--isl", "0"),
    ("--tp_size", "0"), ("--pp_size", "-1"), ("--ep_size", "0"),
    ("--slo_ttft", "nan"), ("--slo_ttft", "inf"), ("--slo_tpot", "0"), ("--slo_tpot", "-1"),
)  # fmt: skip
SIMULATED = (
    ("--requests", "-5"), ("--speed", "0"), ("--speed", "-1"), ("--speed", "nan"), ("--speed", "inf"), ("--slo_part", "0"),
    ("--slo_part", "1.1"), ("--slo_part", "nan"), ("--path_ms", "nan"), ("--path_ms", "-1"), ("--event_us", "inf"),
    ("--gpu_hour", "-1"), ("--gpu_hour", "inf"), ("--osl", str(10**12)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        *(("plan llama-3-8b", *each) for each in (*BOTH, ("--redundant_experts", "-8"), ("--verify_plans", "0"))),
        *(("plan simulate burst --model llama-3-8b", *each) for each in (*BOTH, *SIMULATED)),
        ("plan calibrate", "--seconds", "nan"),
    ],
)
def test_numbers_out_of_range_are_refused_at_once(command, flag, value, capsys):
    assert main([*command.split(), flag, value]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith(f"phalanx: {flag.removeprefix('--')}={value.removesuffix('.0')}"), err
    assert "is out of range; give " in err
    assert "\n" not in err


def test_a_simulation_and_its_fewest_replicas(tmp_path, capsys):
    words = [
        "plan",
        "simulate",
        "poisson:20",
        "--model",
        "llama-3-8b",
        "--gpu",
        "H100",
        "--requests",
        "80",
        "--isl",
        "1000",
        "--osl",
        "60",
    ]
    objective = ["--slo_ttft", "150", "--slo_part", "0.9", "--find_replicas", "--gpu_hour", "2", "--json", str(tmp_path / "x.json")]
    assert main([*words, *objective]) == 0
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["within_slo"] >= 0.9
    assert report["asked"]["replicas"] >= 1
    assert f"x {report['asked']['replicas']} replicas" in capsys.readouterr().out


def test_a_simulation_says_what_lies_before_the_engine(capsys):
    burst = ["plan", "simulate", "burst", "--model", "llama-3-8b", "--gpu", "H100", "--requests", "4", "--isl", "64", "--osl", "8"]

    def simulated(*more):
        assert main([*burst, *more, "--json", "-"]) == 0
        return json.loads(capsys.readouterr().out)

    bare, measured = simulated("--path_ms", "0", "--event_us", "0"), simulated()
    assert bare["frontend"] == {"path_ms": 0.0, "event_us": 0.0, "source": "given"}
    assert measured["frontend"]["source"] == "measured on H200, 2 runs"
    assert 4.0 < measured["frontend"]["path_ms"] < 5.0
    later = measured["ttft_ms"]["p50"] - bare["ttft_ms"]["p50"]
    assert later == pytest.approx(measured["frontend"]["path_ms"], abs=4 * measured["frontend"]["event_us"] / 1e3)
    assert "path_ms given" in simulated("--path_ms", "1")["frontend"]["source"]
    assert main([*burst, "--event_us", "3"]) == 0
    assert "HTTP path" in capsys.readouterr().out

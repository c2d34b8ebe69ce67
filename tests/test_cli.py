# SPDX-License-Identifier: Apache-2.0
"""The command line: flags are the options, by all their names; an error is one line and an exit status."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import get_args

import pytest

from phalanx import cli, log
from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.version import __version__


@pytest.fixture
def served(monkeypatch):
    """What `phalanx serve` hands to the server."""
    import phalanx.serve.app

    calls = []
    monkeypatch.setattr(phalanx.serve.app, "run", lambda engine, serving: calls.append((engine, serving)) or 0)
    for name in [name for name in os.environ if name.startswith("PHALANX_")]:
        monkeypatch.delenv(name)
    return calls


def other_value(name, field):
    """A value that is not the default, as text."""
    if field.annotation is bool:
        return None
    if choices := [value for value in get_args(field.annotation) if isinstance(value, str)]:
        return next(value for value in choices if value != field.default)
    if name == "metrics_prefix":
        return "vllm"
    if name == "cors_origins":
        return "https://chat.example.org"
    return "0.5" if field.annotation is float or float in get_args(field.annotation) else "7"


@pytest.mark.parametrize("dash", ["_", "-"])
def test_every_option_is_a_flag(served, dash):
    """All options of a kind in one command line: to parse one takes a tenth of a second."""
    for model in (EngineOptions, ServeOptions):
        line, expected = ["serve", "demo"], {"model": "demo"} if model is EngineOptions else {}
        for name, field in model.model_fields.items():
            if name in ("model", "speculative_config", "lora_modules"):  # of a form that tests/config has
                continue
            text = other_value(name, field)
            if text == "7":
                text = str(7 + len(expected))  # no two alike, so that a value of another option is not taken for its own
            flag = name if text is not None else (f"no_{name}" if field.default else name)
            line += [f"--{flag.replace('_', dash)}", *([text] if text is not None else [])]
            expected[name] = text if text is not None else str(not field.default)
        assert cli.main(line) == 0, line
        assert {name: str(getattr(served[-1][model is ServeOptions], name)) for name in expected} == expected


@pytest.mark.parametrize("flag", ["--tp_size", "--tp-size", "--tensor_parallel_size", "--tensor-parallel-size"])
def test_short_names(served, flag):
    assert cli.main(["serve", "demo", flag, "4", "--pp-size=2", "--num_workers", "2"]) == 0
    engine, _ = served[-1]
    assert (engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.nnodes) == (4, 2, 2)


def test_file_then_environment_then_flags(served, monkeypatch, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("model: of-file\nport: 1\nmax_batch_size: 2\nseed: 3\n", encoding="utf-8")
    monkeypatch.setenv("PHALANX_PORT", "2")
    monkeypatch.setenv("PHALANX_SEED", "4")
    assert cli.main(["serve", "--config", str(path), "--port", "9"]) == 0
    engine, serving = served[-1]
    assert (engine.model, engine.max_batch_size, engine.seed, serving.port) == ("of-file", 2, 4, 9)


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("serve demo --tensor_paralel_size 2", 2, "--tensor_parallel_size"),
        (
            "serve demo --tp_size two",
            2,
            "phalanx: tensor_parallel_size='two' is not valid; it comes from --tensor_parallel_size; it must be a valid integer",
        ),
        ("serve demo --tp_size 0", 2, "greater than or equal to 1"),
        ("serve", 2, "phalanx: option model is missing; it has no default; give the model: a local folder"),
        ("serve demo --config /none.yaml", 2, "No such file"),
        ("serve demo more", 2, "argument 'more' is one too many"),
        ("serve demo --served-model-name a b", 2, "argument 'b' is one too many; --served_model_name takes one value"),
        ("serve demo --cuda_graphs false", 2, "--cuda_graphs takes no value; --no_cuda_graphs switches it off"),
        ("serve demo --no-cuda-graphs true", 2, "argument 'true' is one too many; --no_cuda_graphs takes no value"),
        ("frob", 2, "No such command 'frob'"),
        ("generate /none --prompt x", 1, "there is no folder /none"),
        ("generate demo --temperature hot --prompt x", 2, "Invalid value for '--temperature'"),
        ("generate demo --temperature -1 --prompt x", 2, "phalanx: temperature=-1.0 is not valid"),
        ("chat http://127.0.0.1:9", 1, "start one with `phalanx serve`"),
    ],
)
def test_what_is_wrong_is_one_line(served, capsys, monkeypatch, line, status, message):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert cli.main(line.split()) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("phalanx: ")
    assert err.count("\n") == 1
    assert message in err
    assert "Traceback" not in err


def test_a_group_without_a_verb_shows_its_help(capsys):
    assert cli.main(["plan"]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) > 20, "in lines"


def test_unknown_variable(served, capsys, monkeypatch):
    monkeypatch.setenv("PHALANX_TENSOR_PARALEL_SIZE", "2")
    assert cli.main(["serve", "demo"]) == 2
    assert "did you mean PHALANX_TENSOR_PARALLEL_SIZE" in capsys.readouterr().err


def test_a_key_is_not_shown(served, capsys):
    assert cli.main(["serve", "demo", "--api_key", ""]) == 2
    assert "phalanx: the api_key is not valid" in capsys.readouterr().err


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"phalanx {__version__}\n"
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"phalanx {__version__}\n"
    assert cli.main([]) == 0
    assert "Commands:" in capsys.readouterr().out
    assert cli.main(["serve", "--help"]) == 0
    page = capsys.readouterr().out
    for name in (*EngineOptions.model_fields, *ServeOptions.model_fields):
        assert name == "model" or f"--{name}" in page


def test_options_are_in_groups(capsys):
    fields = [*EngineOptions.model_fields, *ServeOptions.model_fields]
    assert [name for name in fields if name in cli.GROUPS] == list(cli.GROUPS), "the table has the order of the options"
    assert cli.main(["serve", "--help"]) == 0
    page = capsys.readouterr().out
    assert re.findall(r"^(\w.*):$", page, re.M) == ["Arguments", "Options", *cli.GROUPS.values()]
    assert "--max_batch_size" in page.partition("Batch and KV cache:")[2].partition("\n\n")[0]
    assert cli.main(["plan", "--help"]) == 0
    page = capsys.readouterr().out
    assert "simulate" in page
    assert "--slo_ttft" in page.partition("Options of phalanx plan MODEL:")[2]


@pytest.mark.parametrize(("words", "expected"), [("phalanx ser", "serve"), ("phalanx serve --max_ba", "--max_batch_size")])
def test_a_shell_completes_verbs_and_flags(words, expected):
    program = Path(sysconfig.get_path("scripts")) / "phalanx"
    environment = {**os.environ, "_PHALANX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert expected in done.stdout.split(), done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_nobody_caught_is_one_line_and_can_be_found(unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONDEVMODE": ""}
    command = [sys.executable, "-m", "phalanx", "version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
        assert done.returncode == 1
        assert re.fullmatch(
            r"phalanx: .*No space left on device(: 'standard output')?; raised at cli\.py:\d+; with PYTHONDEVMODE=1 .*\n",
            done.stderr,
        )
        environment["PYTHONDEVMODE"] = "1"
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
        assert done.returncode == 1
        assert "Traceback" in done.stderr


def test_an_error_of_the_system_without_words_is_named(monkeypatch, capsys):
    def late(*arguments):
        raise TimeoutError

    monkeypatch.setattr("phalanx.serve.app.run", late)
    assert cli.main(["serve", "demo"]) == 1
    assert re.match(r"phalanx: TimeoutError; raised at cli\.py:\d+; ", capsys.readouterr().err)


def test_a_stdout_that_was_closed_before_the_start_is_no_error():
    done = subprocess.run(["sh", "-c", 'exec "$0" -m phalanx version >&-', sys.executable], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_module_runs_and_loads_no_torch():
    code = "import sys; from phalanx.cli import main; main(['version']); sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
    done = subprocess.run([sys.executable, "-m", "phalanx", "version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"phalanx {__version__}\n"


def test_key_in_the_process_list(served, capsys, monkeypatch):
    assert cli.main(["serve", "demo", "--api_key", "hunter2"]) == 0
    error = capsys.readouterr().err
    assert "stands in the process list" in error
    assert "hunter2" not in error
    monkeypatch.setenv("PHALANX_API_KEY", "hunter2")
    assert cli.main(["serve", "demo"]) == 0
    assert "process list" not in capsys.readouterr().err


def test_warnings_before_the_server_are_json_too(served, capsys, monkeypatch):
    monkeypatch.setattr(log, "_settings", {})
    token = "0123456789abcdef" * 2
    assert cli.main(["serve", "demo", "--log_format", "json", "--api_key", "hunter2", "--cluster_token", token]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert len([line for line in lines if "process list" in line["message"]]) == 2


def test_adapters_are_given_as_vllm_takes_them():
    from phalanx.cli import _joined

    several = ["serve", "m", "--lora-modules", "a=/x", "b=/y", "--port", "1"]
    assert _joined(several) == ["serve", "m", "--lora-modules", "a=/x,b=/y", "--port", "1"]
    assert _joined(["serve", "--lora_modules", "a=/x", "m"]) == ["serve", "--lora_modules", "a=/x", "m"]
    assert _joined(["serve", "m", "--port", "1", "b=/y"]) == ["serve", "m", "--port", "1", "b=/y"]

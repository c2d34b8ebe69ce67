# SPDX-License-Identifier: Apache-2.0
"""Deadlines are on the monotonic clock: the wall clock jumps when somebody sets it. And no code from data is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest

from tests.architecture.sources import ROOT, module_name, nodes_of, of_each, python_files

WALL_CLOCK = {"time", "time_ns", "ctime", "localtime", "gmtime"}
"""Functions of the module time; of datetime: now, utcnow and today."""
DATES = {
    "phalanx.serve.openai.completions": "`created` of answers",
    "phalanx.serve.openai.chat": "`created` of answers",
    "phalanx.serve.openai.service": "`created` of the model",
    "phalanx.serve.openai.responses.routes": "`created_at` and `completed_at` of answers",
    "phalanx.metrics": "when the adapters of requests changed, as pickers read it",
    "phalanx.log": "times of lines",
    "phalanx.serve.telemetry.tracing": "times of spans",
    "phalanx.serve.chat_template": "`strftime_now` of templates",
    "phalanx.health.checks.cluster": "compares clocks of hosts",
    "phalanx.health.servers": "compares clocks of hosts",
    "phalanx.health.doctor": "date of a report",
    "phalanx.hardware.provenance": "date of a measurement",
}
"""Who may read the wall clock, and for what: dates that people read, never a difference."""
RUNS_CODE = {"eval", "exec", "pickle", "marshal", "dill", "cloudpickle", "shelve"}


def wall_clock_reads(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines on which a program reads the wall clock."""
    lines = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "time" and any(name.name in WALL_CLOCK for name in node.names):
            lines.append(node.lineno)
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (owner == "time" and node.attr in WALL_CLOCK) or (
                owner.rpartition(".")[2] in ("datetime", "date") and node.attr in ("now", "utcnow", "today")
            ):  # fmt: skip
                lines.append(node.lineno)
    return lines


def code_runners(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines that run code which may come from data: eval, pickle, torch.load, and checkpoints with code of their own."""
    lines = []
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            lines += [node.lineno for name in names if name.partition(".")[0] in RUNS_CODE]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            trusted = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
            refused = len(trusted) == 1 and isinstance(trusted[0], ast.Constant) and trusted[0].value is False
            if name in ("eval", "exec", "torch.load") or (name.endswith(".from_pretrained") and not refused):
                lines.append(node.lineno)
    return lines


@of_each(python_files())
def test_the_wall_clock_is_for_dates_only(path):
    lines = wall_clock_reads(nodes_of(path))
    assert bool(lines) == (module_name(path) in DATES), f"{path} reads the wall clock on lines {lines}"


@of_each(python_files())
def test_no_code_of_data_is_run(path):
    assert code_runners(nodes_of(path)) == []


@pytest.mark.parametrize("folder", ["scripts", "benchmarks"])
def test_no_code_of_data_is_run_beside_the_package(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert {str(path): lines for path in paths if (lines := code_runners(nodes_of(path)))} == {}


def test_both_are_found():
    source = (
        "import time, pickle\nfrom time import time as now\nx = time.time() + datetime.datetime.now()\neval('1')\ntorch.load(f)\n"
    )
    source += "A.from_pretrained(f)\nA.from_pretrained(f, trust_remote_code=False)\nA.from_pretrained(f, trust_remote_code=x)\n"
    nodes = list(ast.walk(ast.parse(source)))
    assert wall_clock_reads(nodes) == [2, 3, 3]
    assert sorted(code_runners(nodes)) == [1, 4, 5, 6, 8]

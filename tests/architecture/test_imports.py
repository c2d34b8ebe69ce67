# SPDX-License-Identifier: Apache-2.0
"""What import-linter cannot see: lazy imports, third-party libraries by room, and the reading of the environment."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.architecture.sources import SRC, imports_of, module_name, python_files, room_of, tree_of

LEVELS = [
    {"errors", "version"}, {"log", "metrics"}, {"config"}, {"hardware"}, {"tables"}, {"kernels", "plan"}, {"comm"}, {"models"},
    {"engine"}, {"executor"}, {"worker"}, {"serve", "tune"}, {"bench"}, {"deploy", "health"}, {"cli"}, {"__main__"},
]  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

ONLY_IN = {
    "ray": {"deploy"},
    "fastapi": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "pandas": {"tune", "bench"},
    "matplotlib": {"tune", "bench"},
    "seaborn": {"tune", "bench"},
    "scipy": {"tune", "bench"},
    "triton": {"kernels"},
    "tokenizers": {"serve"},
    "typer": {"cli", "tune", "bench", "health"},
}
NEVER_IN = {
    "torch": {"config", "hardware", "tables", "plan", "engine", "executor", "errors", "log", "metrics"},
    "transformers": {"config", "hardware", "tables", "plan", "kernels", "comm", "models", "engine", "executor"},
    "torch.distributed": {"kernels", "models"},
}


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_imports_only_go_down(path):
    here = room_of(path)
    if here == "__init__":
        return
    for target, line in imports_of(path):
        if not target.startswith("phalanx.") or (room := target.split(".")[1]) == here or room == "__init__":
            continue
        assert room in LEVEL, f"{path}:{line} imports {target}: no such room in the design"
        assert LEVEL[room] < LEVEL[here], f"{path}:{line}: {here} imports {target}, which is not below it"


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_libraries_stay_in_their_rooms(path):
    here = room_of(path)
    for target, line in imports_of(path):
        for library, rooms in ONLY_IN.items():
            if target == library or target.startswith(library + "."):
                assert here in rooms, f"{path}:{line}: {target} belongs to {sorted(rooms)}"
        for library, rooms in NEVER_IN.items():
            if target == library or target.startswith(library + "."):
                assert here not in rooms, f"{path}:{line}: {here} never imports {library}"
        if target.startswith("torch.distributed._symmetric_memory"):
            assert module_name(path) == "phalanx.comm.symmetric", f"{path}:{line}: only comm/symmetric.py knows the private API"


MEETS_ONLY = {
    ("worker", "engine"): "phalanx.engine.messages",
    ("worker", "executor"): "phalanx.executor.protocol",
    ("engine", "comm"): "phalanx.comm.launch",
    ("executor", "comm"): "phalanx.comm.launch",
}
"""What of a lower package the processes of an engine may import, as they meet by messages."""


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_processes_meet_by_messages(path):
    for target, line in imports_of(path):
        room = target.split(".")[1] if target.startswith("phalanx.") else ""
        allowed = MEETS_ONLY.get((room_of(path), room))
        assert allowed is None or f"{target}.".startswith(f"{allowed}."), f"{path}:{line} imports {target}, not {allowed}"


def test_no_import_circle_lazy_imports_included():
    graph = {module_name(p): {t for t, _ in imports_of(p) if t.startswith("phalanx")} for p in python_files()}
    graph = {m: {_known(t, graph) for t in targets} - {None, m} for m, targets in graph.items() if not m.endswith("__init__")}
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, f"a circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module in done or module not in graph:
            return
        for target in sorted(graph[module]):
            visit(target, [*path, module])
        done.add(module)

    for module in sorted(graph):
        visit(module, [])


def _known(target: str, graph: dict) -> str | None:
    """The module that an import names: `from a.b import c` may name a.b.c or an attribute of a.b. A door (a package) is no
    part of a circle: it holds no logic."""
    while target and target not in graph:
        target = target.rpartition(".")[0]
    return target or None


READS_ENVIRONMENT = {
    "phalanx.config.sources",  # the one reader
    "phalanx.comm.launch",  # hands the environment on to children
    "phalanx.comm.torch_group",  # gloo is told its interface there and nowhere else
    "phalanx.hardware.probe",  # which of the GPUs of the host this process may see is a fact of the machine
}


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_only_sources_reads_the_environment(path):
    if module_name(path) in READS_ENVIRONMENT:
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in {"environ", "getenv"}, f"{path}:{node.lineno} reads the environment"


@pytest.mark.parametrize(
    "module",
    [
        "plan", "config", "hardware", "tables", "engine.scheduler", "engine.messages", "engine.process", "executor.rank_executor",
        "executor.node", "comm.launch", "cli",
    ],
)  # fmt: skip
def test_rooms_that_never_wait_for_torch(module):
    if not (SRC / module.replace(".", "/")).is_dir() and not (SRC / (module.replace(".", "/") + ".py")).is_file():
        pytest.fail(f"phalanx.{module} is gone; mend this list")
    code = f"import sys, phalanx.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'triton', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

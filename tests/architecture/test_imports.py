# SPDX-License-Identifier: Apache-2.0
"""What import-linter cannot see: lazy imports, third-party libraries by package, and the reading of the environment."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.architecture.sources import (
    ROOT,
    imports_of,
    module_name,
    nodes_of,
    of_each,
    package_of,
    packages_named,
    python_files,
    tree_of,
)

LEVELS = [
    {"errors", "version"}, {"log", "metrics", "progress"}, {"launch"}, {"config"}, {"hardware"}, {"tables"}, {"kernels", "layout"},
    {"comm"},
    {"models"}, {"engine"}, {"executor"}, {"worker"}, {"planner"}, {"serve", "tune"}, {"bench"}, {"deploy", "health"}, {"cli"},
    {"__main__"},
]  # fmt: skip
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}

ONLY_IN = {
    "ray": {"deploy"},
    "fastapi": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "pandas": {"tune", "bench"},
    "matplotlib": {"tune", "bench"},
    "scipy": {"tune", "bench"},
    "triton": {"kernels", "comm"},
    "tokenizers": {"serve"},
    "typer": {"cli", "tune", "bench", "deploy", "health"},
}
NEVER_IN = {
    "torch": {"config", "hardware", "tables", "layout", "planner", "engine", "executor", "launch", "errors", "log", "metrics"},
    "transformers": {"config", "hardware", "tables", "layout", "planner", "kernels", "comm", "models", "engine", "executor"},
    "torch.distributed": {"kernels", "models"},
}


@of_each(python_files())
def test_imports_only_go_down(path):
    here = package_of(path)
    if here == "__init__":
        return
    for target, line in imports_of(path):
        if not target.startswith("phalanx.") or (package := target.split(".")[1]) == here or package == "__init__":
            continue
        assert package in LEVEL, f"{path}:{line} imports {target}: no such package in the design"
        assert LEVEL[package] < LEVEL[here], f"{path}:{line}: {here} imports {target}, which is not below it"


@of_each(python_files())
def test_libraries_stay_in_their_packages(path):
    here = package_of(path)
    for target, line in imports_of(path):
        for library, packages in ONLY_IN.items():
            if target == library or target.startswith(library + "."):
                assert here in packages, f"{path}:{line}: {target} belongs to {sorted(packages)}"
        for library, packages in NEVER_IN.items():
            if target == library or target.startswith(library + "."):
                assert here not in packages, f"{path}:{line}: {here} never imports {library}"
        if target.startswith("torch.distributed._symmetric_memory"):
            assert module_name(path) == "phalanx.comm.symmetric", f"{path}:{line}: only comm/symmetric.py knows the private API"


MEETS_ONLY = {
    ("worker", "engine"): "phalanx.engine.messages",
    ("worker", "executor"): "phalanx.executor.protocol",
}
"""What of a lower package the processes of an engine may import, as they meet by messages."""


@of_each(python_files())
def test_processes_meet_by_messages(path):
    for target, line in imports_of(path):
        package = target.split(".")[1] if target.startswith("phalanx.") else ""
        allowed = MEETS_ONLY.get((package_of(path), package))
        assert allowed is None or f"{target}.".startswith(f"{allowed}."), f"{path}:{line} imports {target}, not {allowed}"


def test_no_import_circle():
    """Lazy imports and `__init__` included. A file depends on those that it names: `from phalanx.kernels import reference` names
    kernels/__init__.py and kernels/reference.py. `import phalanx.kernels.reference as reference` and `from
    phalanx.kernels.reference import embed` name the latter alone, although Python runs the package's `__init__` before either: a
    package that re-exports what its modules define is no circle by itself."""
    names = {path: module_name(path).removesuffix(".__init__") for path in python_files()}
    graph: dict[str, set[str]] = {names[path]: set() for path in python_files()}
    for path, name in names.items():
        targets = {target for target, _ in imports_of(path)} | packages_named(path)
        graph[name] = {_file_of(target, graph) for target in targets if target.startswith("phalanx")} - {"", name}
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, f"a circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module in done:
            return
        for target in sorted(graph[module]):
            visit(target, [*path, module])
        done.add(module)

    for module in sorted(graph):
        visit(module, [])


def _file_of(target: str, graph: dict[str, set[str]]) -> str:
    """The file that an import names: `from a.b import c` names a.b.c, or an attribute of a.b."""
    while target and target not in graph:
        target = target.rpartition(".")[0]
    return target


def test_init_files_hold_no_logic():
    """An `__init__` re-exports: it has a docstring, imports, `__all__`, and for lazy names `__getattr__` with `_MODULES`."""
    for path in python_files():
        if path.name == "__init__.py":
            faults = [f"{path}:{node.lineno}: {ast.unparse(node)[:80]}" for node in tree_of(path).body if not _re_exports(node)]
            assert not faults, "\n".join(faults)


def _re_exports(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse and all(map(_is_import, node.body))
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets] in (["__all__"], ["_MODULES"]) and _is_literal(node.value)
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or _is_import(node) or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _is_literal(node: ast.expr) -> bool:
    return all(isinstance(part, (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Load)) for part in ast.walk(node))


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ('"""A package."""', True), ("from phalanx.errors import PhalanxError", True), ('__all__ = ["PhalanxError"]', True),
        ("def __getattr__(name): ...", True), ("if TYPE_CHECKING:\n    import torch", True), ("def form(): ...", False),
        ("class Group: ...", False), ("LIMIT = 3", False), ("__all__ = sorted(globals())", False), ("form()", False),
        ("if TYPE_CHECKING:\n    form()", False), ("try:\n    import torch\nexcept ImportError:\n    torch = None", False),
        ("async def __getattr__(name): ...", False), ("for name in names: ...", False), ("limit: int = 3", False),
    ],
)  # fmt: skip
def test_what_counts_as_logic(source, allowed):
    assert all(map(_re_exports, ast.parse(source).body)) == allowed


def test_test_modules_share_through_support():
    """What several test modules use is in tests/support: one module's change must not break another's tests."""
    likely, faults = re.compile(r"^\s*(?:from|import) tests\b[^\n(]*(?:\([^)]*)?\btest_", re.MULTILINE), set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in nodes_of(path) if likely.search(path.read_text(encoding="utf-8")) else ():  # few files are worth parsing
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if any(re.match(r"tests\.(?:\w+\.)*test_", name) for name in names):
                faults.add(str(path.relative_to(ROOT)))
    assert not faults, f"these import from test modules: {sorted(faults)}"


READS_ENVIRONMENT = {
    "phalanx.config.sources",  # the one reader
    "phalanx.launch",  # hands the environment on to children
    "phalanx.comm.torch_group",  # gloo is told its interface there and nowhere else
    "phalanx.config.home",  # gives this process and its children a home folder
    "phalanx.health.pairs",  # hands the environment on to a child
    "phalanx.hardware.probe",  # which of the GPUs of the host this process may see is a fact of the machine
}


@of_each(python_files())
def test_only_sources_reads_the_environment(path):
    if module_name(path) in READS_ENVIRONMENT:
        return
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in {"environ", "getenv"}, f"{path}:{node.lineno} reads the environment"


WITHOUT_TORCH = (
    "layout", "planner.auto", "planner.scenario", "config", "hardware", "tables", "engine.scheduler", "engine.messages",
    "engine.process", "executor.rank_executor", "executor.node", "launch", "cli",
)  # fmt: skip


def test_modules_that_never_wait_for_torch():
    modules = [f"phalanx.{name}" for name in WITHOUT_TORCH]
    code = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module(module)\n"
        "    heavy = [name for name in ('torch', 'transformers', 'triton', 'pandas') if name in sys.modules]\n"
        "    if heavy: sys.exit(f'{module} imports {heavy}')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("modules", "later"),
    [
        ("phalanx.cli, phalanx.serve.app", ["yaml", "rich", "torch", "phalanx.planner", "phalanx.deploy", "phalanx.health"]),
        ("phalanx.engine.process, phalanx.executor.rank_executor", ["yaml", "numpy", "asyncio", "torch"]),
    ],
)
def test_a_start_does_not_wait_for_what_few_requests_need(modules, later):
    code = f"import sys, {modules}; print([name for name in {later} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_models_and_groups_import_no_triton():
    """The collectives' kernels are in `comm`: a host without Triton forms groups, and only one with GPUs imports them."""
    code = (
        "import sys, phalanx.models.registry, phalanx.comm.tuned_group, phalanx.comm.one_sided; sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

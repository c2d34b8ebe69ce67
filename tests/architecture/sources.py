# SPDX-License-Identifier: Apache-2.0
"""The sources of the package, parsed once: what the architecture tests look at."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "phalanx"


def of_each(items: Sequence[Any]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Makes a check of one of these a test of all: `@of_each(python_files())`. It fails with what the check says of each.
    Parametrized, a check would take 2 ms more for each of them."""

    def test_of(check: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            faults = []
            for item in items:
                try:
                    check(item)
                except AssertionError as error:
                    faults.append(f"{item}: {error}")
            assert not faults, "\n".join(faults)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return test_of


@cache
def python_files() -> tuple[Path, ...]:
    return tuple(sorted(SRC.rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of its tree: most tests look at each of them."""
    return tuple(ast.walk(tree_of(path)))


def module_name(path: Path) -> str:
    return ".".join(("phalanx", *path.relative_to(SRC).with_suffix("").parts))


def package_of(path: Path) -> str:
    """The package below phalanx that a source belongs to; for a file of phalanx itself, its stem."""
    return path.relative_to(SRC).with_suffix("").parts[0]


@cache
def imports_of(path: Path) -> tuple[tuple[str, int], ...]:
    """(dotted target, line) of each import that runs, those inside functions included; type-checking-only imports are left out."""
    imports: list[tuple[str, int]] = []
    for node in _import_statements(path):
        parent = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        imports.extend((parent + alias.name, node.lineno) for alias in node.names)
    return tuple(imports)


def packages_named(path: Path) -> set[str]:
    """`a.b` of each `from a.b import c` that `imports_of` lists."""
    return {str(node.module) for node in _import_statements(path) if isinstance(node, ast.ImportFrom)}


@cache
def _import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    statements: list[ast.Import | ast.ImportFrom] = []

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert not getattr(node, "level", 0), f"{path}:{node.lineno}: imports are absolute"
            statements.append(node)
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(tree_of(path))
    return tuple(statements)

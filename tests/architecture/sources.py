# SPDX-License-Identifier: Apache-2.0
"""The sources of the package, parsed once: what the architecture tests look at."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "phalanx"


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

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            imports.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            imports.extend((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(tree_of(path))
    return tuple(imports)

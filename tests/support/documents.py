# SPDX-License-Identifier: Apache-2.0
"""README, CONTRIBUTING and docs, as the tests of documents read them: pages, code blocks, shell commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NO_RUN = "sh no-run"
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block: the page, what stands behind the fence ("python", "python no-run", "sh no-run", "" for shell), its text."""

    page: Path
    kind: str
    text: str


class Command(NamedTuple):
    """One shell command: the page, the line as printed, and its words."""

    page: Path
    line: str
    words: list[str]


def blocks(page: Path) -> list[Block]:
    return [Block(page, kind.strip(), text) for kind, text in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def commands(page: Path) -> list[Command]:
    """Of the page's shell blocks: those without a language. A drawing (it has box characters) is none. Of blocks of "sh no-run",
    which are for a cluster, phalanx's commands alone, up to where a pipe begins."""
    listed = []
    for block in blocks(page):
        if block.kind not in ("", NO_RUN) or re.search("[─│└├]", block.text):
            continue
        joined = re.sub(r"\\\n\s*", " ", block.text)
        lines = [Command(page, line, shlex.split(line, comments=True)) for line in joined.splitlines() if line.strip()]
        if block.kind == NO_RUN:
            lines = [line._replace(words=_before_pipe(line.words)) for line in lines if line.words[:1] == ["phalanx"]]
        listed += lines
    return [command for command in listed if command.words]


def _before_pipe(words: list[str]) -> list[str]:
    return words[: words.index("|")] if "|" in words else words


def printed_under(page: Path, heading: str) -> tuple[list[str], str]:
    """What stands below a heading: the lines of its shell blocks, continued ones joined, and the text that they print."""
    below = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    section = re.split(r"^#+ ", below, maxsplit=1, flags=re.M)[0]
    parts = [(kind.strip(), text) for kind, text in _BLOCK.findall(section)]
    lines = [line for kind, text in parts if kind == "" for line in re.sub(r"\\\n\s*", " ", text).splitlines()]
    (output,) = [text for kind, text in parts if kind == "text"]
    return lines, output

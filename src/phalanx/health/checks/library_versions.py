# SPDX-License-Identifier: Apache-2.0
"""Whether the installed libraries are those that Phalanx needs, and new enough for the model."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, requires, version

from phalanx.health.check import Check, Finding, error, note, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for requirement in requires("phalanx") or []:
        text, _, marker = requirement.partition(";")
        if "extra" in marker or "platform" in marker:
            continue
        name = re.split(r"[\[<>=!~ ]", text, maxsplit=1)[0]
        bounds = re.findall(r"(>=|<=|<|>|==)\s*([\d.]+)", text)
        try:
            installed = version(name)
        except PackageNotFoundError:
            findings.append(error(f"{name} is not installed", "install what Phalanx needs", f"pip install '{text.strip()}'"))
            continue
        if not all(_holds(installed, sign, bound) for sign, bound in bounds):
            findings.append(
                error(
                    f"{name} {installed} is installed, and {text.strip()} is needed", "install it", f"pip install '{text.strip()}'"
                )
            )
    written = _written_by(subject)
    if written and not _holds(version("transformers"), ">=", written):
        summary = f"the checkpoint was written by transformers {written}, and {version('transformers')} is installed"
        findings.append(
            note(summary, "upgrade transformers where its tokenizer fails to load", f"pip install 'transformers>={written}'")
        )
    return findings or [ok("the installed libraries are those that Phalanx needs")]


def _written_by(subject: Subject) -> str | None:
    """The version of transformers that wrote the checkpoint."""
    folder = subject.folder
    if folder is None:
        return None
    try:
        text = json.loads((folder / "config.json").read_text()).get("transformers_version")
    except (OSError, ValueError):
        return None
    return text if isinstance(text, str) and re.fullmatch(r"[\d.]+", text) else None


def _holds(installed: str, sign: str, bound: str) -> bool:
    a, b = _numbers(installed), _numbers(bound)
    width = max(len(a), len(b))
    a, b = a + [0] * (width - len(a)), b + [0] * (width - len(b))
    return {">=": a >= b, "<=": a <= b, "<": a < b, ">": a > b, "==": a == b}[sign]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.match(r"[\d.]*", text)[0].strip(".").split(".") if part]  # type: ignore[index]


CHECK = Check(
    name="library_versions",
    what="versions of the installed libraries",
    why="another program's upgrade in the same environment replaces torch or transformers: import errors, or an "
    "unknown tokenizer class",
    cure="install the versions that Phalanx names",
    threads=("https://github.com/vllm-project/vllm/issues/7074", "https://github.com/vllm-project/vllm/issues/12670"),
    examine=examine,
    symptoms=(r"ImportError", r"ModuleNotFoundError", r"AttributeError: module", r"[Tt]okenizer class", r"undefined symbol"),
)

# SPDX-License-Identifier: Apache-2.0
"""What self checks found on this machine, by version: an upgrade shows what it moved. A file for each machine, model and layout."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from phalanx.config.home import cache_folder
from phalanx.log import get_logger
from phalanx.tables.table_file import write_whole
from phalanx.version import __version__
from phalanx.worker.self_check.compare import Agreement

logger = get_logger(__name__)

VERSIONS = 20
"""That a file keeps, the newest ones."""


def version_now() -> str:
    """What decides which kernels run, beside the machine."""
    cuda = f" for CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return f"{__version__} with torch {torch.__version__}{cuda}"


def recorded(answers: Agreement, bound: float, facts: Mapping[str, str], *, folder: Path | None = None) -> str:
    """Keep what was found beside what earlier versions found for the same facts; returns the line for the log. facts: machine,
    model, layout and what else decides the answers. folder: instead of the user's."""
    path = (cache_folder("self_check") if folder is None else folder) / _file_name(facts)
    version = version_now()
    entries = [entry for entry in _entries(path) if entry["version"] != version]
    line = f"{_figures(answers.kl, answers.top1)} of {answers.positions} positions"
    line += f"; {answers.worst}: KL {answers.worst_kl:.2g}, at most {bound:.2g}"
    if entries:
        line += f"; was {_figures(entries[-1]['kl'], entries[-1]['top1'])} by version {entries[-1]['version']}"
    entries.append({
        "version": version, "kl": answers.kl, "top1": answers.top1, "positions": answers.positions, "worst": answers.worst,
        "worst_kl": answers.worst_kl,
    })  # fmt: skip
    try:
        write_whole(path, json.dumps({"facts": dict(facts), "versions": entries[-VERSIONS:]}, indent=1) + "\n")
    except OSError as error:
        logger.warning("the result of the self check is not kept: %s", error)
    return line


def _figures(kl: float, top1: float) -> str:
    return f"KL {kl:.2g}, top-1 {top1:.1%}"


def _entries(path: Path) -> list[dict[str, Any]]:
    """Those of the file, the oldest first; none where it is absent or faulty."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["versions"]
        return [dict(entry) for entry in entries if {"version", "kl", "top1"} <= entry.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _file_name(facts: Mapping[str, str]) -> str:
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(list(facts.values())[:2])).strip("-.")[:80]
    return f"{name}.{zlib.crc32(json.dumps(dict(facts), sort_keys=True).encode()):08x}.json"

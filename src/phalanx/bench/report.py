# SPDX-License-Identifier: Apache-2.0
"""What a figure is kept with (machine, versions, commit, command), and how figures are shown: JSON and tables."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import OptionError, PhalanxError
from phalanx.log import get_logger
from phalanx.tables.table_file import write_whole

logger = get_logger(__name__)

Document = dict[str, Any]


def measured_at(about: Document) -> Document:
    """For a row of a file that is extended: since when, and at which commit, it stands there."""
    return {name: about[name] for name in ("date", "commit")}


def json_path(json_file: str | None, *, extends: bool = False) -> Path | None:
    """Where a report is to be written; None for "-" and for nowhere. To be called before anything runs.

    extends: what a file there holds is read and kept (`held`). Raises OptionError where the report could not be written, or would
    take the place of another file.
    """
    if json_file is None or json_file == "-":
        return None
    path, asked = Path(json_file), f"the report was to be written to {json_file!r}"
    if json_file.endswith("/"):
        raise OptionError(asked, held="that is a folder", next="name a file in it")
    require_writable(path, asked)
    if path.exists() and not extends:
        raise OptionError(asked, held="a file is there, and would be lost", next="name a new file")
    return path


def require_writable(path: Path, asked: str) -> None:
    """Refuse a file that cannot be written, by writing another beside it: what rights say is not all that a file system refuses.
    Leaves nothing behind. Raises OptionError that begins with `asked`."""
    missing: list[Path] = []
    try:
        if path.is_dir():
            raise OptionError(asked, held="that is a folder", next="name a file in it")
        if path.exists() and not path.is_file():
            raise OptionError(asked, held="that is no plain file", next="name a new file")
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):  # named as `write_whole` names its own
            pass
    except OSError as error:
        cure = "name a file in a folder that can be written"
        raise OptionError(asked, held="nothing can be written there", why=os_failure(error), next=cure) from None
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def write(path: Path, document: Document) -> None:
    """Write a document as JSON, whole or not at all. Raises OSError."""
    write_whole(path, json.dumps(document, indent=1) + "\n")


def os_failure(error: OSError) -> str:
    """Why a file cannot be written, without the name of the one that was tried."""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return "what should be its folder is a file"
    return error.strerror or str(error)


def keep(path: Path | None, document: Document) -> None:
    """Write what is known so far, if it is to be written. Where that fails, the log says so, and what is measured goes on: `give`
    tries again."""
    if path is None:
        return
    try:
        write(path, document)
    except OSError as error:
        logger.warning("%s cannot be written (%s); it is tried again with what comes next", path, os_failure(error))


def held(path: Path | None, asked: Document) -> Document | None:
    """What an earlier run of the same wrote; None where there is no such file. Raises OptionError for a file of something else."""
    if path is None or not path.exists():
        return None
    try:
        found: Document = json.loads(path.read_text(encoding="utf-8"))
        before = dict(found["asked"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OptionError(f"{path} was to be extended", why=f"{type(error).__name__}: {error}", next="name a new file") from None
    differs = sorted(name for name in {*before, *asked} if before.get(name) != json.loads(json.dumps(asked.get(name))))
    if differs:
        raise OptionError(f"{path} was to be extended", held=f"its {', '.join(differs)} differ", next="name a new file")
    return found


def give(document: Document, tables: Sequence[Any], json_file: str | None) -> None:
    """Show a report: tables on stdout and, where asked for, the JSON in a file. "-": JSON on stdout, and tables on stderr.

    Raises PhalanxError where the file cannot be written; all is shown by then, the JSON on stdout.
    """
    if json_file == "-":
        print(json.dumps(document, indent=1))
    show(*tables, to_stderr=json_file == "-")
    if json_file is None or json_file == "-":
        return
    try:
        write(Path(json_file), document)
    except OSError as error:
        print(json.dumps(document, indent=1))
        raise PhalanxError(
            f"the report was to be written to {json_file!r}", why=os_failure(error),
            next="its JSON went to stdout instead, behind the tables",
        ) from None  # fmt: skip


def show(*parts: Any, to_stderr: bool = False) -> None:
    """Print tables and lines; as wide as they are where nobody looks on. What stands in brackets is text, whoever wrote it."""
    from rich.console import Console

    console = Console(stderr=to_stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    for part in parts:
        console.print(part)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Any:
    """A rich table: the first column to the left, the figures to the right."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, caption=caption or None, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def title(document: Document) -> str:
    """One line that says what ran."""
    engine, machine = document["engine"], document["about"]["machine"]
    where = machine["gpus"][0] if engine["device"].startswith("cuda") and machine["gpus"] else machine["cpu"]
    layout = f"tp {engine['tp']} pp {engine['pp']}"
    return f"{document['asked']['model']}, {engine['dtype']}, {layout}, on {where}; up in {engine['start_s']} s"


def caption(document: Document) -> str:
    """What the roof is, and where the start's time went."""
    measured = document["roof"]
    if "best_GBps" not in measured:
        lines = [f"roof: bandwidth not measured ({measured['not_measured']})"]
    else:
        ways = ", ".join(f"{way} {rate:,.0f}" for way, rate in measured["ways_GBps"].items())
        lines = [f"roof: bytes that a step must read at {measured['best_GBps']:,.0f} GB/s (measured GB/s: {ways})"]
    phases = [f"{name} {seconds:.1f}" for name, seconds in document["engine"]["rank_phases_s"].items() if seconds >= 0.05]
    if phases:
        lines.append(f"start, s, of the slowest rank in each phase: {', '.join(phases)}")
    return "\n".join(lines)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, linear between the two nearest ranks; nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percent_text(fraction: float | None) -> str:
    if fraction is None:
        return "not measured"
    return f"{fraction:.0%}" if fraction >= 0.0995 else f"{fraction:.1%}"

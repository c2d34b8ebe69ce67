# SPDX-License-Identifier: Apache-2.0
"""Reports of benchmarks: how they are written as JSON, extended by a later run, and shown as tables."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import OptionError, PhalanxError
from phalanx.log import get_logger
from phalanx.tables.table_file import write_whole

logger = get_logger(__name__)

Document = dict[str, Any]
ResultRow = dict[str, Any]
"""One measurement of a report."""


def measured_at(about: Document) -> Document:
    """Date and commit of a row, for a file that a later run extends."""
    return {name: about[name] for name in ("date", "commit")}


def json_path(json_file: str | None, *, extends: bool = False, what: str = "the report") -> Path | None:
    """The path of a report; None for "-" (stdout) and for no report. Call it before anything runs.

    extends: a file that is there is read and kept (`earlier`). what: the name of the file in an error. Raises OptionError where it
    cannot be written, or would replace another file.
    """
    if json_file is None or json_file == "-":
        return None
    path, failure = Path(json_file), f"{what} cannot be written to {json_file!r}"
    if json_file.endswith("/"):
        raise OptionError(failure, held="that is a folder", next="name a file in it")
    require_writable(path, failure)
    if path.exists() and not extends:
        raise OptionError(failure, held="a file is there, and would be lost", next="name a new file")
    return path


def require_writable(path: Path, failure: str) -> None:
    """Raise OptionError that begins with `failure` where a file cannot be written. Tries it with another file beside it, as a file
    system refuses more than permissions tell. Leaves nothing behind."""
    missing: list[Path] = []
    try:
        if path.is_dir():
            raise OptionError(failure, held="that is a folder", next="name a file in it")
        if path.exists() and not path.is_file():
            raise OptionError(failure, held="that is not a regular file", next="name a new file")
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):  # named as `write_whole` names its own
            pass
    except OSError as error:
        raise OptionError(failure, why=os_failure(error), next="name a file in a folder that can be written") from None
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def write(path: Path, document: Document) -> None:
    """Write a document as JSON, completely or not at all. Raises OSError."""
    write_whole(path, json.dumps(document, indent=1) + "\n")


def os_failure(error: OSError) -> str:
    """Why a file cannot be written, without its name."""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return "its folder is a file"
    return error.strerror or str(error)


def save_progress(path: Path | None, document: Document) -> None:
    """Write what is known so far, if there is a path. A failure is logged and the benchmark goes on: `publish` tries again."""
    if path is None:
        return
    try:
        write(path, document)
    except OSError as error:
        logger.warning("%s cannot be written (%s); the next result tries again", path, os_failure(error))


def earlier(path: Path | None, requested: Document) -> Document | None:
    """The report of an earlier run with the same options; None where there is no file. Raises OptionError for a file of something
    else."""
    if path is None or not path.exists():
        return None
    try:
        document: Document = json.loads(path.read_text(encoding="utf-8"))
        before = dict(document["asked"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OptionError(f"{path} cannot be extended", why=f"{type(error).__name__}: {error}", next="name a new file") from None
    differs = sorted(name for name in {*before, *requested} if before.get(name) != json.loads(json.dumps(requested.get(name))))
    if differs:
        raise OptionError(f"{path} cannot be extended", held=f"its {', '.join(differs)} differ", next="name a new file")
    return document


def publish(document: Document, tables: Sequence[Any], json_file: str | None) -> None:
    """Show the tables on stdout, and write the JSON to a file if one is named. "-": JSON on stdout, and tables on stderr.

    Raises PhalanxError where the file cannot be written; tables and JSON are on stdout by then.
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
            f"the report cannot be written to {json_file!r}", why=os_failure(error),
            next="its JSON is on stdout instead, after the tables",
        ) from None  # fmt: skip


def show(*parts: Any, to_stderr: bool = False) -> None:
    """Print tables and lines, 160 columns wide off a terminal. Brackets are text, not markup."""
    from rich.console import Console

    console = Console(stderr=to_stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    for part in parts:
        console.print(part)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Any:
    """A rich table: the first column is left-aligned, the figures right-aligned."""
    from rich import box
    from rich.table import Table

    rich_table = Table(title=title, caption=caption or None, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        rich_table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        rich_table.add_row(*row)
    return rich_table


def title(document: Document) -> str:
    """One line: model, dtype, layout, device and the seconds of the start."""
    engine, where = document["engine"], device_name(document["about"], document["engine"])
    layout = f"tp {engine['tp']} pp {engine['pp']}"
    return f"{document['asked']['model']}, {engine['dtype']}, {layout}, on {where}; up in {engine['start_s']} s"


def device_name(about: Document, engine: Document) -> str:
    """The GPU, or the CPU, that an engine ran on."""
    machine = about["machine"]
    name: str = machine["gpus"][0] if engine["device"].startswith("cuda") and machine["gpus"] else machine["cpu"]
    return name


def caption(document: Document) -> str:
    """What the roofline is, and the phases of the start."""
    bandwidth = document["roof"]
    if "best_GBps" not in bandwidth:
        lines = [f"roofline: bandwidth not measured ({bandwidth['not_measured']})"]
    else:
        ways = ", ".join(f"{way} {rate:,.0f}" for way, rate in bandwidth["ways_GBps"].items())
        lines = [f"roofline: the bytes that a step must read, at {bandwidth['best_GBps']:,.0f} GB/s (measured GB/s: {ways})"]
    phases = [f"{name} {seconds:.1f}" for name, seconds in document["engine"]["rank_phases_s"].items() if seconds >= 0.05]
    if phases:
        lines.append(f"start, seconds of the slowest rank in each phase: {', '.join(phases)}")
    return "\n".join(lines)


def percent_text(fraction: float | None) -> str:
    if fraction is None:
        return "not measured"
    return f"{fraction:.0%}" if fraction >= 0.0995 else f"{fraction:.1%}"

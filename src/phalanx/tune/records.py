# SPDX-License-Identifier: Apache-2.0
"""A benchmark's CSV and its sidecar: read strictly, written completely or not at all.

`benchmark.tp{N}.sm{V}.csv` has the columns of TensorRT-LLM's tools. Rows of op `gemm_all_reduce`, behind all others, are of layers
with their GEMM; their strategies have names of their own (GEMM_RS, GEMM+TWOSHOT). Beside it, `benchmark.tp{N}.sm{V}.json` holds
machine, versions, commit, grid, every sample and every skip. A CSV without a sidecar (TensorRT-LLM's) is read, too.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config.dtypes import DTYPES, parse_dtype
from phalanx.errors import OptionError, TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.grid import WIDE_HIDDEN, WIDE_TOKENS
from phalanx.tables.message import Fusion
from phalanx.tables.table_file import write_whole
from phalanx.tune.sweep import Task

COLUMNS = ("world_size", "dtype", "size", "num_tokens", "hidden_size", "strategy", "fusion", "op", "time (us)")
_HARMLESS = "version"
"""An older column of TensorRT-LLM: rows that differ only in it are duplicates."""
NAMES = {
    **{name: name for name in COLUMNS}, "fusion_op": "fusion", "time_us": "time (us)", "time_ms": "time (us)", _HARMLESS: _HARMLESS,
}  # fmt: skip
"""What a header may hold -> the column that it is. Anything else is refused."""
_NAME = re.compile(r"benchmark\.tp(\d+)\.sm(\d+)\.csv")
_FORMAT, _VERSION = "phalanx-allreduce-bench", 1


@dataclass
class Benchmark:
    """The results of one TP size on one SM version.

    times: microseconds, the median of the slowest rank. samples: that rank's replays. skips: what was not measured, and why. facts:
    machine, versions, commit, command. grid: the sizes of the run (None: a CSV without a sidecar).
    """

    sm: int
    world: int
    times: dict[Task, float]
    samples: dict[Task, list[float]] = field(default_factory=dict)
    skips: dict[Task, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    grid: dict[str, Any] | None = None
    link: str | None = None

    def fingerprint(self, link: str | None = None) -> Fingerprint:
        """link: of a CSV without a sidecar; nvlink on GPUs by default, as TensorRT-LLM's tables assume."""
        return Fingerprint(self.sm, self.link or link or ("shm" if self.sm == 0 else "nvlink"), self.world)


def csv_path(folder: Path, world: int, sm: int) -> Path:
    return folder / f"benchmark.tp{world}.sm{sm}.csv"


def write(bench: Benchmark, folder: Path) -> Path:
    """Write the sidecar, then the CSV, each completely or not at all, so that a CSV never has the sidecar of another one."""
    path = csv_path(folder, bench.world, bench.sm)
    rows = io.StringIO()
    out = csv.writer(rows, lineterminator="\n")
    out.writerow(COLUMNS)
    for task, us in sorted(bench.times.items(), key=_order):
        dtype, name = DTYPES[task.dtype].long_name, task.name(bench.sm)
        out.writerow(
            [bench.world, dtype, task.bytes, task.tokens, task.hidden, name, task.fusion.name, task.op, f"{us:.3f}"]
        )  # fmt: skip
    write_whole(path.with_suffix(".json"), _sidecar_text(bench))
    write_whole(path, rows.getvalue())
    return path


def _order(item: tuple[Task, float]) -> tuple[Any, ...]:
    task = item[0]
    return task.op, task.dtype, list(Fusion).index(task.fusion), task.hidden, task.tokens, task.choice


def _sidecar_text(bench: Benchmark) -> str:
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "fingerprint": str(bench.fingerprint()),
        "facts": bench.facts,
        "grid": bench.grid,
    }
    lists: dict[str, list[list[Any]]] = {
        "samples": [[str(task), values] for task, values in bench.samples.items()],
        "skips": [[str(task), reason] for task, reason in bench.skips.items()],
    }
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, items in lists.items():
        parts.append(f' "{key}": [\n' + ",\n".join(f"  {json.dumps(item)}" for item in items) + "\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read_folder(folder: Path, sm: int | None = None) -> list[Benchmark]:
    """Every benchmark.tp*.sm*.csv of a folder (of one SM version if given), by SM version and TP size.

    Raises TableError: no folder, none in it, or a faulty one.
    """
    paths = sorted(path for path in folder.glob("benchmark.tp*.sm*.csv") if _NAME.fullmatch(path.name))
    benches = [read(path) for path in paths if sm is None or _NAME.fullmatch(path.name)[2] == str(sm)]  # type: ignore[index]
    if not benches:
        of = "" if sm is None else f" of sm{sm}"
        raise TableError(
            f"{folder} holds no benchmark.tp<size>.sm<version>.csv{of}",
            next="measure with `phalanx allreduce bench --save_csv_dir`, or give another folder",
        )
    return sorted(benches, key=lambda bench: (bench.sm, bench.world))


def read(path: Path) -> Benchmark:
    """One CSV, with its sidecar if there is one. Raises TableError that names file, row and cure; no row is dropped silently."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise TableError(f"{path.name} is not the name of a benchmark", next="call it benchmark.tp<size>.sm<version>.csv")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path} cannot be read", why=str(error), next="check the path, or measure again") from None
    bench = Benchmark(int(name[2]), int(name[1]), {})
    if path.with_suffix(".json").is_file():
        _read_sidecar(path.with_suffix(".json"), bench)
    lines = csv.reader(io.StringIO(text), strict=True)
    try:
        header = next(lines, [])
        columns = _columns(header, path)
        for row in lines:
            if row:
                _add_row(row, columns, header, bench, f"{path.name} line {lines.line_num}")
    except csv.Error as error:
        raise TableError(f"{path.name} line {lines.line_num}: {error}", next="restore the file, or measure again") from None
    if not bench.times:
        raise TableError(f"{path.name} has a header and no rows", next="measure again, or remove the file")
    return bench


def _columns(header: list[str], path: Path) -> dict[str, int]:
    """The index of each column, by its current name."""
    if not header:
        raise TableError(f"{path.name} is empty", next="measure again, or remove the file")
    columns: dict[str, int] = {}
    for index, name in enumerate(header):
        plain = NAMES.get(name.strip())
        if plain is None:
            raise TableError(f"{path.name} line 1: the column {name!r} is unknown", next=f"remove it; known: {', '.join(NAMES)}")
        if plain in columns:
            raise TableError(f"{path.name} line 1: the column {plain!r} appears twice", next="keep one of them")
        columns[plain] = index
    for name in COLUMNS:
        if name not in columns and name != "op":
            raise TableError(f"{path.name} line 1: the column {name!r} is missing", next="restore it, or measure again")
    return columns


def _add_row(row: list[str], columns: dict[str, int], header: list[str], bench: Benchmark, where: str) -> None:
    """Check one row and put it into `bench`."""
    if len(row) != len(header):
        raise TableError(f"{where}: {len(row)} fields under {len(header)} columns", next="restore the row, or remove it")
    text = {name: row[index].strip() for name, index in columns.items()}
    world, size, tokens, hidden = (
        _positive_int(text[name], name, where) for name in ("world_size", "size", "num_tokens", "hidden_size")
    )
    try:
        fusion = Fusion.named(text["fusion"])
        task = Task.named(parse_dtype(text["dtype"]), fusion, tokens, hidden, text["strategy"], text.get("op", ""))
    except OptionError as error:
        raise TableError(f"{where}: {error.failure}", next=f"{error.next}; correct the row, or remove it") from None
    if world != bench.world:
        raise TableError(f"{where}: world_size {world} in a file of tp{bench.world}", next="move the row to its own file")
    if size != task.bytes:
        raise TableError(
            f"{where}: size {size}, but {tokens} x {hidden} x {DTYPES[task.dtype].itemsize} is {task.bytes} bytes",
            next="correct size, num_tokens, hidden_size or dtype",
        )
    _on_grid(task, bench, where)
    us = _microseconds(text["time (us)"], where) * (1000.0 if header[columns["time (us)"]].strip() == "time_ms" else 1.0)
    if task in bench.times:
        raise TableError(f"{where}: {task} appears in the file twice", next="remove one of the two rows")
    bench.times[task] = us


def _on_grid(task: Task, bench: Benchmark, where: str) -> None:
    grid = bench.grid or {"tokens": WIDE_TOKENS, "hidden": WIDE_HIDDEN}
    for axis, value in (("tokens", task.tokens), ("hidden", task.hidden)):
        if value not in grid[axis]:
            grid_name = "the sidecar's grid" if bench.grid else "the grid (powers of two; hidden 128 to 16384)"
            raise TableError(
                f"{where}: {axis} {value} is not on {grid_name}",
                next="remove the row, or measure that size with `phalanx allreduce bench`, whose sidecar names its grid",
            )


def _positive_int(text: str, name: str, where: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**63:
        raise TableError(f"{where}: {name} is {text!r}, not a whole number from 1", next="correct the row, or remove it")
    return int(text)


def _microseconds(text: str, where: str) -> float:
    try:
        us = float(text)
    except ValueError:
        us = math.nan
    if not (math.isfinite(us) and us > 0):
        raise TableError(f"{where}: the time is {text!r}, not a positive number", next="measure that cell again, or remove the row")
    return us


def _read_sidecar(path: Path, bench: Benchmark) -> None:
    """Read grid, facts, samples and skips into `bench`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["format"], data["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"format {data['format']!r} version {data['version']}")
        fingerprint = Fingerprint.parse(data["fingerprint"])
        if (fingerprint.sm, fingerprint.world) != (bench.sm, bench.world):
            raise ValueError(f"it is of {fingerprint}")
        bench.link, bench.facts, bench.grid = fingerprint.link, data["facts"], data["grid"]
        bench.samples = {Task.parse(task): [float(us) for us in values] for task, values in data["samples"]}
        bench.skips = {Task.parse(task): str(reason) for task, reason in data["skips"]}
    except (OSError, ValueError, KeyError, TypeError, OptionError) as error:
        raise TableError(
            f"{path.name} is not a sidecar of {path.with_suffix('.csv').name}",
            why=f"{type(error).__name__}: {error}",
            next="measure again, or remove the sidecar: the CSV is read without it",
        ) from None

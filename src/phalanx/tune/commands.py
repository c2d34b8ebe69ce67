# SPDX-License-Identifier: Apache-2.0
"""The stages behind the verbs: from options to files, and what a person sees while they run."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import OptionError, TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.log import get_logger
from phalanx.tables import cpp_lookup, shipped
from phalanx.tables.grid import TP_SIZES
from phalanx.tables.message import Fusion, dtype_named
from phalanx.tables.strategy import INCUMBENT, SUPPORTED, Strategy
from phalanx.tables.table import HiddenRange, Section, Span, Table
from phalanx.tables.table_file import load, save
from phalanx.tune import preflight
from phalanx.tune.ranks.external_launcher import Place
from phalanx.tune.records import Bench, csv_path, read, read_folder
from phalanx.tune.runner import Progress, Run, check
from phalanx.tune.sweep import Sweep, named

_log = get_logger(__name__)
_MIB = 2**20
_CPU_MAX_MIB = 4.0


@dataclass(frozen=True)
class Asked:
    """A benchmark as the command line asks for it. Lists are comma-separated text; None is the guide's grid, and everything."""

    tokens: str | None = None
    hidden: str | None = None
    fusions: str | None = None
    strategies: str | None = None
    dtype: str = "bf16"
    auto: bool = False
    folder: Path = Path("data")
    device: str = "auto"
    max_mib: float | None = None
    calls: int = 50
    replays: int = 9
    deadline: float = 60.0
    start_timeout: float = 180.0
    time_limit: float | None = None
    restart: bool = False
    extend: bool = False
    remeasure: str | None = None
    commit: str | None = None

    def run(self, world: int, device: str) -> Run:
        """What `tune.bench` takes. Raises OptionError before any rank starts for a list that nobody can honour, or that leaves
        nothing to measure even where ranks reach each other's memory."""
        mib = _CPU_MAX_MIB if self.max_mib is None and device == "cpu" else self.max_mib
        if mib is not None and not 0 < mib < math.inf:
            raise OptionError(f"--max_mib {mib:g} is no size", next="give a number of MiB above 0, or leave it out")

        def sweep(fingerprint: Fingerprint) -> Sweep:
            return Sweep.of(
                fingerprint, dtype=self.dtype, tokens=self.tokens, hidden=self.hidden, fusions=self.fusions,
                strategies=self.strategies, auto=self.auto, max_bytes=None if mib is None else int(mib * _MIB),
            )  # fmt: skip

        planned = sweep(Fingerprint(0, "shm", world))
        again = () if self.remeasure is None else named(self.remeasure, "--remeasure")
        for strategy in again:
            if strategy not in planned.strategies and not (planned.auto and strategy is Strategy.AUTO):
                raise OptionError(
                    f"--remeasure {strategy.name} was asked for",
                    held="it is not among those to be measured",
                    next="name it in --strategies (AUTO: or give --enable_auto)",
                )
        preflight.empty_plan(world, *planned.plan())
        return Run(
            world, device, self.folder, sweep, self.deadline, self.start_timeout, self.time_limit, self.restart, self.extend,
            frozenset(again), {"calls": self.calls, "replays": self.replays}, commit=self.commit,
        )  # fmt: skip


def place(elastic: str | None, env: tuple[int | None, ...], mpi: tuple[int | None, ...], address: str) -> Place | None:
    """Where this process stands under torchrun (`elastic` is set) or mpirun, from their (rank, world, local rank); else None."""
    rank, world, local = env if elastic is not None else mpi
    if rank is None or world is None or world < 2:
        return None
    return Place(rank, world, rank if local is None else local, None if elastic is not None else address)


def bench(tp_size: str, asked: Asked, outside: Place | None) -> list[Path]:
    """Measure each TP size; the CSVs written. Raises OptionError before anything starts where an option cannot be honoured."""
    device, count = _device(asked.device)
    if outside is not None:
        return _bench_outside(tp_size, asked, device, outside)
    from phalanx.tune import runner as bench_

    runs = [asked.run(world, device) for world in _tp_sizes(tp_size, device, count)]
    _can_write(runs)
    paths = []
    for run in runs:
        with _progress(f"tp {run.world}") as progress:
            paths.append(_told(bench_.bench(run, progress), asked.folder))
    return paths


def _can_write(runs: list[Run]) -> None:
    """Refuse a folder that takes no results, and runs that would drop what it holds, before any rank starts."""
    preflight.unwritable_folder(runs[0].folder)
    for run in runs:
        sm = 0 if run.device == "cpu" else _sm()
        if sm is not None:
            check(run, sm)


def _told(found: Bench, folder: Path) -> Path:
    """The CSV that a benchmark has written, after its summary."""
    path, complete = csv_path(folder, found.world, found.sm), found.facts["complete"]
    _log.info("tp %d: %d times, %d candidates left out, complete: %s", found.world, len(found.times), len(found.skips), complete)
    for reason in preflight.left_out(found.skips):
        _log.info("tp %d: left out: %s", found.world, reason)
    return path


def _bench_outside(tp_size: str, asked: Asked, device: str, outside: Place) -> list[Path]:
    from phalanx.tune.ranks import external_launcher as outside_

    if tp_size not in ("all", str(outside.world)):
        raise OptionError(
            f"--tp_size {tp_size} was asked for", held=f"the launcher started {outside.world} ranks", next="leave it out"
        )
    if asked.time_limit is not None:
        raise OptionError("--time_limit was asked for", why="a launcher's ranks are not ours to end", next="leave it out")
    run = asked.run(outside.world, device)
    if outside.rank == 0:  # who writes; the folders of other hosts are nobody's business
        _can_write([run])
    return [_told(outside_.bench(run, outside), asked.folder)]


def codegen(
    folder: Path, *, sm_version: int | None = None, link: str | None = None, tables: list[Path] | None = None
) -> list[Path]:
    """Tables and C++ from the CSVs of a folder, or C++ from tables alone; the paths written."""
    from phalanx.tune.codegen import generate, write_code

    if tables:
        return write_code([load(path) for path in tables], folder)
    with _extra():
        return generate(read_folder(folder, sm_version), folder, link)[1]


def plot(folder: Path) -> list[Path]:
    with _extra():
        from phalanx.tune import html_report

        return html_report.draw(folder)


def install(folder: Path, into: Path | None = None) -> list[Path]:
    """Put a folder's tables where engines on this host find them."""
    paths = []
    for path in sorted((folder / "tables").glob("*.json")):
        table = load(path)
        paths.append((into or shipped.user_folder()) / shipped.file_name(table.fingerprint))
        save(table, paths[-1])
    return paths


def explain(
    tp_size: int | None, hidden: int, dtype: str, fusions: str | None, machine: str | None, table: Path | None, device: str
) -> Iterator[str]:
    """The lines of `explain`. tp_size: may be None where machine or table says it."""
    from phalanx.tune.explain import lines

    if table is not None:
        held = load(table)
        _same_machine(held.fingerprint, tp_size, f"--table {table}")
        if machine and Fingerprint.parse(machine) != held.fingerprint:
            raise OptionError(
                f"--machine {machine} of --table {table}", held=f"the table is of {held.fingerprint}", next="leave --machine out"
            )
    else:
        fingerprint = _machine(tp_size, machine, device)
        held = shipped.table_for(fingerprint)
        advice = shipped.advice(fingerprint)
        if advice:
            yield advice
    chosen = tuple(Fusion.named(name.strip()) for name in fusions.split(",")) if fusions else tuple(Fusion)
    yield from lines(held, dtype_named(dtype), hidden, chosen)


def _machine(tp_size: int | None, machine: str | None, device: str) -> Fingerprint:
    if machine:
        named_ = Fingerprint.parse(machine)
        _same_machine(named_, tp_size, f"--machine {machine}")
        return named_
    if tp_size is None:
        raise OptionError(
            "--tp_size is missing", why="nothing else says how many ranks are meant", next="give it, or --machine, or --table"
        )
    return _here(tp_size, device)


def _same_machine(found: Fingerprint, tp_size: int | None, by: str) -> None:
    if tp_size not in (None, found.world):
        raise OptionError(
            f"--tp_size {tp_size} of {by}",
            held=f"that is of {found.world} ranks",
            next="give the same number of ranks in both, or leave --tp_size out",
        )


def import_(files: list[Path], link: str, folder: Path | None) -> Iterator[str]:
    """Read every file, then install every table; a line for each, and for what cannot run here and becomes NCCL."""
    from phalanx.tune.codegen import decided

    tables: list[Table] = []
    for path in files:
        if path.suffix == ".csv":
            with _extra():
                tables += [one.table for one in decided([read(path)], link)]
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(f"{path} cannot be read", why=str(error), next="give a CSV or a C++ table") from None
        for lookup in cpp_lookup.parse(text, path.name):
            tables += cpp_lookup.tables_of(lookup, link).values()
    for table in tables:
        runnable, replaced = _runnable(table)
        path = (folder or shipped.user_folder()) / shipped.file_name(table.fingerprint)
        save(runnable, path)
        yield f"installed {path}" + (f" ({replaced} ranges of strategies that do not run here became NCCL)" if replaced else "")


def _runnable(table: Table) -> tuple[Table, int]:
    """The table with NCCL in place of what Phalanx does not run, and in how many ranges that was."""
    replaced = 0

    def one(span: Span) -> Span:
        nonlocal replaced
        if span.choice.strategy in SUPPORTED:
            return span
        replaced += 1
        return Span(span.first, span.last, INCUMBENT)

    sections = tuple(
        Section(
            s.dtype,
            s.fusion,
            tuple(HiddenRange(row.first, row.last, tuple(one(span) for span in row.spans)) for row in s.hidden_ranges),
        )
        for s in table.sections
    )
    models = {f: {c: m for c, m in held.items() if c.strategy in SUPPORTED} for f, held in table.seed.models.items()}
    default = shipped.seed_for(table.fingerprint)
    seed = type(table.seed)(table.seed.origin, {f: held or default.models[f] for f, held in models.items()})
    return Table(table.fingerprint, sections, seed, table.provenance), replaced


def _device(asked: str) -> tuple[str, int]:
    """("cuda" or "cpu", how many ranks of it this machine can form)."""
    if asked not in ("auto", "cuda", "cpu"):
        raise OptionError(f"--device {asked!r} is unknown", next="auto, cuda or cpu")
    gpus = 0 if asked == "cpu" else _gpu_count()
    if asked == "cuda" and not gpus:
        raise OptionError("--device cuda was asked for", held="no GPU is to be seen here", next="give --device cpu")
    if gpus:
        return "cuda", gpus
    return "cpu", max(TP_SIZES)


def _gpu_count() -> int:
    """GPUs that ranks would see, without a CUDA context here."""
    try:
        from phalanx.hardware.probe import detect_machine

        return len(detect_machine().gpus)
    except ImportError:  # without NVML's bindings, as on a machine that has torch only
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            ran = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
            return sum(line.startswith("GPU ") for line in ran.stdout.splitlines())
        return 0


def _tp_sizes(asked: str, device: str, count: int) -> list[int]:
    """The sizes to measure. On CPU "all" is those of the guide that have a core for each rank, and at least 2."""
    if count < 2:
        raise OptionError(
            "a benchmark was asked for", held=f"{count} GPU here", why="one rank has nothing to reduce", next="--device cpu"
        )
    if asked != "all":
        return _named_sizes(asked, device, count)
    if device == "cpu":
        from phalanx.hardware.probe import cores

        count = max(2, cores())
    return [size for size in TP_SIZES if size <= count]


def _named_sizes(asked: str, device: str, count: int) -> list[int]:
    """The sizes of a comma-separated list."""
    parts = [part.strip() for part in asked.split(",")]
    sizes = [int(part) if part.isdecimal() and len(part) < 10 else 0 for part in parts]
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if not part.isdecimal():
            held, cure = f"{part!r} is no number of ranks", "give whole numbers separated by commas, or all"
        elif not 2 <= size <= count:
            held, cure = f"this machine can form 2 to {count} ranks on {device}, not {part}", f"give 2 to {count}"
        elif size in sizes[:number]:
            held, cure = f"{part} stands there twice", "give each size once"
        else:
            continue
        raise OptionError(f"--tp_size {asked} was asked for", held=held, next=cure)
    return sizes


def _sm() -> int | None:
    """The SM version of this machine's GPUs, where it can be had without a CUDA context."""
    try:
        from phalanx.hardware.probe import detect_machine

        return next((gpu.sm for gpu in detect_machine().gpus), None)
    except ImportError:
        return None


def _here(tp_size: int, device: str) -> Fingerprint:
    """The fingerprint of the first `tp_size` devices of this machine."""
    kind = _device(device)[0]
    if kind == "cpu":
        return Fingerprint(0, "shm", tp_size)
    import torch

    from phalanx.tune.ranks.candidates import fingerprint_here

    return fingerprint_here(tp_size, torch.device(kind, 0))


@contextlib.contextmanager
def _extra() -> Iterator[None]:
    """Names the extra that holds what is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("scipy", "pandas", "matplotlib", "seaborn"):
            raise
        raise OptionError(f"{error.name} is not installed", next="install the extra: pip install 'phalanx[tune]'") from None


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Progress | None]:
    """A bar on a terminal; elsewhere a line at every twentieth."""
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, of, what: bar.update(task, completed=done, total=of, description=what)


def _lines(title: str) -> Callable[[int, int, str], None]:
    told = -1

    def line(done: int, of: int, what: str) -> None:
        nonlocal told
        step = done * 20 // of if of else 20
        if step != told:
            told = step
            _log.info("%s: %d of %d %s", title, done, of, what)

    return line

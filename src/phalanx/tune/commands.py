# SPDX-License-Identifier: Apache-2.0
"""What the commands of `phalanx allreduce` do: from options to files, and the progress that a person sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.config.dtypes import parse_dtype
from phalanx.errors import OptionError, TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.log import get_logger
from phalanx.progress import OnProgress, progress_bar
from phalanx.tables import cpp_lookup, shipped
from phalanx.tables.grid import TP_SIZES
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import INCUMBENT, SUPPORTED, Strategy
from phalanx.tables.table import HAND_OVER, Span, Table
from phalanx.tables.table_file import load, save
from phalanx.tune import preflight
from phalanx.tune.options import TuneOptions
from phalanx.tune.ranks.external_launcher import LaunchedRank
from phalanx.tune.records import Benchmark, csv_path, read, read_folder
from phalanx.tune.runner import BenchmarkRun
from phalanx.tune.sweep import Sweep, parse_strategies
from phalanx.version import install_extra

_log = get_logger(__name__)


def benchmark_run(options: TuneOptions, world: int, device: str) -> BenchmarkRun:
    """The run of one TP size. Raises OptionError, before any rank starts, for a list that cannot be honoured, and for one that
    leaves nothing to measure even where the ranks reach each other's memory."""
    max_bytes = options.max_bytes(device)

    def sweep(fingerprint: Fingerprint) -> Sweep:
        return Sweep.from_text(
            fingerprint, dtype=options.dtype, tokens=options.tokens, hidden=options.hidden, fusions=options.fusions,
            strategies=options.strategies, auto=options.enable_auto, max_bytes=max_bytes,
        )  # fmt: skip

    planned = sweep(Fingerprint(0, "shm", world))
    remeasured = () if options.remeasure is None else parse_strategies(options.remeasure, "--remeasure")
    for strategy in remeasured:
        if strategy not in planned.strategies and not (planned.auto and strategy is Strategy.AUTO):
            raise OptionError(
                f"--remeasure {strategy.name} is not among the strategies to be measured",
                next="name it in --strategies (AUTO: or give --enable_auto)",
            )
    preflight.require_tasks(world, *planned.plan())
    return BenchmarkRun(world, device, sweep, options, frozenset(remeasured))


def launched_rank(
    elastic: str | None, env: tuple[int | None, ...], mpi: tuple[int | None, ...], address: str
) -> LaunchedRank | None:  # fmt: skip
    """This process as a rank of torchrun (`elastic` is set) or mpirun, from their (rank, world, local rank); else None."""
    rank, world, local = env if elastic is not None else mpi
    if rank is None or world is None or world < 2:
        return None
    return LaunchedRank(rank, world, rank if local is None else local, None if elastic is not None else address)


def measure(tp_size: str, options: TuneOptions, launched: LaunchedRank | None) -> list[Path]:
    """Measure each TP size; the CSVs written. Raises OptionError before anything starts where an option cannot be honoured."""
    device, count = _device(options.device)
    if launched is not None:
        return _measure_as_rank(tp_size, options, device, launched)
    from phalanx.tune import runner

    runs = [benchmark_run(options, world, device) for world in _tp_sizes(tp_size, device, count)]
    preflight.require_writable_folder(options.save_csv_dir)
    paths = []
    for run in runs:
        with _progress(f"tp {run.world}") as progress:
            paths.append(_log_summary(runner.run_benchmark(run, progress), options.save_csv_dir))
    return paths


def require_packages() -> None:
    """Raise OptionError, before a rank starts, where what decides from the times is not installed."""
    with _extra():
        import scipy.optimize  # noqa: F401


def _log_summary(bench: Benchmark, folder: Path) -> Path:
    """Log what a benchmark gave; the path of its CSV."""
    path, complete = csv_path(folder, bench.world, bench.sm), bench.facts["complete"]
    _log.info("tp %d: %d times, %d candidates skipped, complete: %s", bench.world, len(bench.times), len(bench.skips), complete)
    for reason in preflight.summarize_skips(bench.skips):
        _log.info("tp %d: skipped: %s", bench.world, reason)
    return path


def _measure_as_rank(tp_size: str, options: TuneOptions, device: str, launched: LaunchedRank) -> list[Path]:
    from phalanx.tune.ranks import external_launcher

    if tp_size not in ("all", str(launched.world)):
        raise OptionError(
            f"--tp_size {tp_size} is not the launcher's number of ranks", held=f"it started {launched.world}", next="leave it out"
        )
    if options.time_limit is not None:
        raise OptionError(
            "--time_limit does not work under a launcher", why="its ranks cannot be ended from within", next="leave it out"
        )
    run = benchmark_run(options, launched.world, device)
    if launched.rank == 0:  # only rank 0 writes
        preflight.require_writable_folder(options.save_csv_dir)
    return [_log_summary(external_launcher.run_benchmark(run, launched), options.save_csv_dir)]


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


def plot_where_possible(folder: Path) -> list[Path]:
    """The pictures, or a line that says how to get them: tables do not need them."""
    try:
        return plot(folder)
    except OptionError as error:
        _log.warning("no pictures: %s, then `phalanx allreduce plot --data_dir %s`", error, folder)
        return []


def install(folder: Path, into: Path | None = None) -> list[Path]:
    """Copy a folder's tables to where engines on this host look for them; the paths written."""
    paths = []
    for path in sorted((folder / "tables").glob("*.json")):
        table = load(path)
        paths.append((into or shipped.user_folder()) / shipped.file_name(table.fingerprint))
        save(table, paths[-1])
    return paths


def explain(
    tp_size: int | None, hidden: int, dtype: str, fusions: str | None, machine: str | None, table: Path | None, device: str
) -> Iterator[str]:
    """The lines of `explain`. tp_size: None where machine or table gives it."""
    from phalanx.tune.explain import lines

    if table is not None:
        loaded = load(table)
        _require_same_world(loaded.fingerprint, tp_size, f"--table {table}")
        if machine and Fingerprint.parse(machine) != loaded.fingerprint:
            raise OptionError(
                f"--machine {machine} differs from --table {table}", held=f"the table is of {loaded.fingerprint}",
                next="leave --machine out",
            )  # fmt: skip
    else:
        fingerprint = _machine(tp_size, machine, device)
        loaded = shipped.table_for(fingerprint)
        advice = shipped.advice(fingerprint)
        if advice:
            yield advice
    chosen = tuple(Fusion.named(name.strip()) for name in fusions.split(",")) if fusions else tuple(Fusion)
    yield from lines(loaded, parse_dtype(dtype), hidden, chosen)


def _machine(tp_size: int | None, machine: str | None, device: str) -> Fingerprint:
    if machine:
        fingerprint = Fingerprint.parse(machine)
        _require_same_world(fingerprint, tp_size, f"--machine {machine}")
        return fingerprint
    if tp_size is None:
        raise OptionError(
            "--tp_size is missing", why="nothing else gives the number of ranks", next="give it, or --machine, or --table"
        )
    return _here(tp_size, device)


def _require_same_world(fingerprint: Fingerprint, tp_size: int | None, flag: str) -> None:
    if tp_size not in (None, fingerprint.world):
        raise OptionError(
            f"--tp_size {tp_size} differs from {flag}",
            held=f"that is of {fingerprint.world} ranks",
            next="give the same number of ranks in both, or leave --tp_size out",
        )


def import_(files: list[Path], link: str, folder: Path | None) -> Iterator[str]:
    """Read every file, then install every table. Yields a line for each, with the number of ranges whose strategy does not run here
    and became NCCL."""
    from phalanx.tune.codegen import decide_benchmarks

    tables: list[Table] = []
    for path in files:
        if path.suffix == ".json":
            yield f"installed {_install_exchange(path, folder)}"
            continue
        if path.suffix == ".csv":
            with _extra():
                tables += [one.table for one in decide_benchmarks([read(path)], link)]
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


def _install_exchange(path: Path, folder: Path | None) -> Path:
    """Decide from times of the exchanges of expert parallel, and install the table; its path."""
    from phalanx.tables import exchange as exchange_tables
    from phalanx.tune import exchange

    fingerprint, times, facts = exchange.read(path)
    installed = exchange_tables.path_of(fingerprint, folder)
    exchange_tables.save(exchange.decide(times, fingerprint, facts), installed)
    return installed


def explain_exchange(ranks: int | None, hidden: int, machine: str | None, table: Path | None, device: str) -> Iterator[str]:
    """The lines of `explain --exchange`. ranks: None where machine or table gives it."""
    from phalanx.tables import exchange as exchange_tables
    from phalanx.tune import exchange

    loaded = exchange_tables.load(table) if table is not None else exchange_tables.table_for(_machine(ranks, machine, device))
    yield from exchange.lines(loaded, hidden)


def _runnable(table: Table) -> tuple[Table, int]:
    """The table with NCCL in place of what Phalanx does not run, and in how many ranges that was."""
    replaced = 0

    def one(span: Span) -> Span:
        nonlocal replaced
        if span.choice.strategy in SUPPORTED or span.choice == HAND_OVER:
            return span
        replaced += 1
        return Span(span.first, span.last, INCUMBENT)

    sections = tuple(
        replace(s, hidden_ranges=tuple(replace(row, spans=tuple(one(span) for span in row.spans)) for row in s.hidden_ranges))
        for s in table.sections
    )
    models = {f: {c: m for c, m in by_choice.items() if c.strategy in SUPPORTED} for f, by_choice in table.seed.models.items()}
    default = shipped.seed_for(table.fingerprint)
    seed = replace(table.seed, models={f: by_choice or default.models[f] for f, by_choice in models.items()})
    return Table(table.fingerprint, sections, seed, table.provenance), replaced


def _device(name: str) -> tuple[str, int]:
    """("cuda" or "cpu", how many ranks on it this machine can form)."""
    if name not in ("auto", "cuda", "cpu"):
        raise OptionError(f"--device {name!r} is unknown", next="use auto, cuda or cpu")
    gpus = 0 if name == "cpu" else _gpu_count()
    if name == "cuda" and not gpus:
        raise OptionError("--device cuda needs a GPU", held="no GPU is visible here", next="use --device cpu")
    if gpus:
        return "cuda", gpus
    return "cpu", max(TP_SIZES)


def _gpu_count() -> int:
    """The number of GPUs that ranks would see. Makes no CUDA context here."""
    from phalanx.hardware.probe import usable_machine

    return len(usable_machine().gpus)


def _tp_sizes(text: str, device: str, count: int) -> list[int]:
    """The sizes to measure. On CPU "all" is the default sizes for which each rank has a core of its own, and at least 2."""
    if count < 2:
        raise OptionError(
            "an all-reduce needs at least two ranks", held=f"{count} GPU here", why="one rank has nothing to reduce",
            next="use --device cpu",
        )  # fmt: skip
    if text != "all":
        return _parse_tp_sizes(text, device, count)
    if device == "cpu":
        from phalanx.hardware.probe import cores

        count = max(2, cores())
    return [size for size in TP_SIZES if size <= count]


def _parse_tp_sizes(text: str, device: str, count: int) -> list[int]:
    """The sizes of a comma-separated list."""
    parts = [part.strip() for part in text.split(",")]
    sizes = [int(part) if part.isdecimal() and len(part) < 10 else 0 for part in parts]
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if not part.isdecimal():
            defect, cure = f"{part!r} is not a number of ranks", "give whole numbers separated by commas, or all"
        elif not 2 <= size <= count:
            defect, cure = f"this machine can form 2 to {count} ranks on {device}, not {part}", f"give 2 to {count}"
        elif size in sizes[:number]:
            defect, cure = f"{part} is given twice", "give each size once"
        else:
            continue
        raise OptionError(f"--tp_size {text}: {defect}", next=cure)
    return sizes


def _here(tp_size: int, device: str) -> Fingerprint:
    """The fingerprint of the first `tp_size` devices of this machine."""
    kind = _device(device)[0]
    if kind == "cpu":
        return Fingerprint(0, "shm", tp_size)
    import torch

    from phalanx.comm.detect import detect_fingerprint

    return detect_fingerprint(torch.device(kind, 0), tp_size)


@contextlib.contextmanager
def _extra() -> Iterator[None]:
    """Inside, a missing package raises an OptionError that names the extra which holds it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("scipy", "pandas", "matplotlib"):
            raise
        alone = package if package == "scipy" else ""  # which tunes without the others; pictures need all
        raise OptionError(f"{package} is not installed", next=f"run: {install_extra('tune', alone)}") from None


@contextlib.contextmanager
def _progress(title: str) -> Iterator[OnProgress]:
    """A progress bar on a terminal; elsewhere a log line at every twentieth."""
    with progress_bar(title) as on_progress:
        yield on_progress or _lines(title)


def _lines(title: str) -> Callable[[int, int, str], None]:
    logged = -1

    def line(done: int, of: int, what: str) -> None:
        nonlocal logged
        step = done * 20 // of if of else 20
        if step != logged:
            logged = step
            _log.info("%s: %d of %d %s", title, done, of, what)

    return line

# SPDX-License-Identifier: Apache-2.0
"""The verbs of `phalanx allreduce`: bench, tune, codegen, plot, explain, import. `python -m phalanx.tune.cli` is the same.

Each stage reads the files of the one before: bench writes CSVs, codegen and plot read them, import reads other people's.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.errors import OptionError, PhalanxError

app = typer.Typer(
    name="allreduce",
    help="Measure the all-reduce on this machine, decide what runs where, and show it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_"), "help_option_names": ["-h", "--help"]},
)

TpSize = Annotated[str, typer.Option("--tp_size", help="Ranks; several separated by commas. all: each size this machine can form.")]
Tokens = Annotated[str | None, typer.Option("--tokens", help="Such as 1,16,256; the guide's 1..16384 otherwise.")]
Hidden = Annotated[str | None, typer.Option("--hidden", help="Such as 4096,8192; the guide's 128..8192 otherwise.")]
Fusions = Annotated[str | None, typer.Option("--fusions", help="By name, separated by commas; all otherwise.")]
Strategies = Annotated[
    str | None, typer.Option("--strategies", help="NCCL (or GLOO), ONESHOT, TWOSHOT, AUTO; the first three otherwise.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="bf16, fp16 or fp32.")]
Auto = Annotated[bool, typer.Option("--enable_auto", help="Measure what the machine's table would choose, too.")]
Folder = Annotated[Path, typer.Option("--save_csv_dir", help="Where CSVs and all that comes of them go.")]
DataDir = Annotated[Path, typer.Option("--data_dir", help="The folder with the CSVs.")]
Device = Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")]
MaxMib = Annotated[float | None, typer.Option("--max_mib", help="Leave out larger tensors (MiB per rank); 4 on CPU otherwise.")]
Calls = Annotated[int, typer.Option("--calls", min=1, help="Calls in one sample.")]
Replays = Annotated[int, typer.Option("--replays", min=1, help="Samples of a candidate.")]
Deadline = Annotated[
    float, typer.Option("--deadline", min=0.1, help="Seconds for one candidate, compiling included; then it is skipped.")
]
StartTimeout = Annotated[float, typer.Option("--start_timeout", min=1, help="Seconds for the ranks to meet.")]
TimeLimit = Annotated[float | None, typer.Option("--time_limit", help="Seconds per TP size, after which what there is is written.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Begin anew: drop what a broken run has measured, and replace the CSV there.")
]
Extend = Annotated[bool, typer.Option("--extend", help="Measure only what the CSV there lacks, and keep the rest of it.")]
Remeasure = Annotated[
    str | None,
    typer.Option("--remeasure", help="Measure these again, such as NCCL, within what is named; the rest of the CSV stays."),
]
Commit = Annotated[str | None, typer.Option("--commit", help="What this is, for the sidecar, where git cannot say.")]
Launched = Annotated[str | None, typer.Option(hidden=True, envvar="TORCHELASTIC_RUN_ID")]
MpiRank = Annotated[int | None, typer.Option(hidden=True, envvar=["OMPI_COMM_WORLD_RANK", "PMI_RANK"])]
MpiWorld = Annotated[int | None, typer.Option(hidden=True, envvar=["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])]
MpiLocal = Annotated[int | None, typer.Option(hidden=True, envvar=["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"])]
EnvRank = Annotated[int | None, typer.Option(hidden=True, envvar="RANK")]
EnvWorld = Annotated[int | None, typer.Option(hidden=True, envvar="WORLD_SIZE")]
EnvLocal = Annotated[int | None, typer.Option(hidden=True, envvar="LOCAL_RANK")]
Restarts = Annotated[int, typer.Option(hidden=True, envvar="TORCHELASTIC_RESTART_COUNT")]
Address = Annotated[str, typer.Option("--master_addr", help="Under mpirun: the host of rank 0, as every host reaches it.")]
Port = Annotated[int, typer.Option("--master_port", help="Under mpirun: a free port there.")]


def _sweep(
    tokens: Tokens = None,
    hidden: Hidden = None,
    fusions: Fusions = None,
    strategies: Strategies = None,
    dtype: Dtype = "bf16",
    enable_auto: Auto = False,
    save_csv_dir: Folder = Path("data"),
    device: Device = "auto",
    max_mib: MaxMib = None,
    calls: Calls = 50,
    replays: Replays = 9,
    deadline: Deadline = 60.0,
    start_timeout: StartTimeout = 180.0,
    time_limit: TimeLimit = None,
    restart: Restart = False,
    extend: Extend = False,
    remeasure: Remeasure = None,
    commit: Commit = None,
) -> Any:
    """What is to be measured, and how: a `stages.Asked`."""
    from phalanx.tune import commands

    return commands.Asked(
        tokens=tokens, hidden=hidden, fusions=fusions, strategies=strategies, dtype=dtype, auto=enable_auto, folder=save_csv_dir,
        device=device, max_mib=max_mib, calls=calls, replays=replays, deadline=deadline, start_timeout=start_timeout,
        time_limit=time_limit, restart=restart, extend=extend, remeasure=remeasure, commit=commit,
    )  # fmt: skip


def _measuring(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb with the options of `_sweep` behind --tp_size; it takes what they ask for as `asked`."""
    shared = inspect.signature(_sweep, eval_str=True).parameters
    own = [one for name, one in inspect.signature(verb, eval_str=True).parameters.items() if name != "asked"]

    @functools.wraps(verb)
    def with_options(**given: Any) -> None:
        asked = _sweep(**{name: given.pop(name) for name in shared})
        verb(asked=asked, **given)

    with_options.__signature__ = inspect.Signature([own[0], *shared.values(), *own[1:]])  # type: ignore[attr-defined]
    return with_options


@app.command()
@_measuring
def bench(
    asked: Any,
    tp_size: TpSize = "all",
    master_addr: Address = "127.0.0.1",
    master_port: Port = 29544,
    elastic: Launched = None,
    mpi_rank: MpiRank = None,
    mpi_world: MpiWorld = None,
    mpi_local: MpiLocal = None,
    env_rank: EnvRank = None,
    env_world: EnvWorld = None,
    env_local: EnvLocal = None,
    restarts: Restarts = 0,
) -> None:
    """Measure: verified, then timed, into benchmark.tp{N}.sm{V}.csv. A broken run resumes; a hang is a recorded skip.

    Starts its own ranks; under torchrun and mpirun the processes there are the ranks.
    """
    from phalanx.tune import commands

    place = commands.place(
        elastic, (env_rank, env_world, env_local), (mpi_rank, mpi_world, mpi_local), f"{master_addr}:{master_port}"
    )
    if restarts:  # torchrun has started the ranks again behind a hang: the journal there is this run's own
        asked = dataclasses.replace(asked, restart=False)
    for path in commands.bench(tp_size, asked, place):
        print(path)


@app.command()
@_measuring
def tune(
    asked: Any,
    tp_size: TpSize = "all",
    install: Annotated[
        bool, typer.Option("--install/--no_install", help="Put the tables where engines on this host find them.")
    ] = True,
) -> None:
    """Measure, decide, generate and draw, in one go; engines on this host then run by the tables."""
    from phalanx.tune import commands

    for path in [*commands.bench(tp_size, asked, None), *commands.codegen(asked.folder), *commands.plot(asked.folder)]:
        print(path)
    if install:
        for path in commands.install(asked.folder):
            print(f"installed {path}")


@app.command()
def codegen(
    data_dir: DataDir = Path("data"),
    sm_version: Annotated[int | None, typer.Option("--sm_version", help="Only this SM version's CSVs.")] = None,
    link: Annotated[
        str | None, typer.Option("--link", help="Link class of CSVs without a sidecar; nvlink on GPUs otherwise.")
    ] = None,
    table: Annotated[
        list[Path] | None, typer.Option("--table", help="From these tables instead of CSVs; may be given again.")
    ] = None,
) -> None:
    """Decide from CSVs, and write tables/*.json, TensorRT-LLM's C++ table and our header."""
    from phalanx.tune import commands

    for path in commands.codegen(data_dir, sm_version=sm_version, link=link, tables=table):
        print(path)


@app.command()
def plot(data_dir: DataDir = Path("data")) -> None:
    """Draw three pictures for every CSV and fusion into viz/, and one HTML report."""
    from phalanx.tune import commands

    for path in commands.plot(data_dir):
        print(path)


@app.command()
def explain(
    tp_size: Annotated[int | None, typer.Option("--tp_size", min=2, help="Ranks; --machine and --table say it, too.")] = None,
    hidden: Annotated[int, typer.Option("--hidden", min=1, help="Hidden size.")] = 8192,
    dtype: Dtype = "bf16",
    fusions: Fusions = None,
    machine: Annotated[str | None, typer.Option("--machine", help="Another one, such as sm90.nvlink.tp4.")] = None,
    table: Annotated[Path | None, typer.Option("--table", help="A table's file instead of the installed or shipped one.")] = None,
    device: Device = "auto",
) -> None:
    """Print what runs at which size, and why."""
    from phalanx.tune import commands

    for line in commands.explain(tp_size, hidden, dtype, fusions, machine, table, device):
        print(line)


@app.command(name="import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="TensorRT-LLM's CSVs (benchmark.tp*.sm*.csv) or C++ tables.")],
    link: Annotated[str, typer.Option("--link", help="The link class that they were measured on.")] = "nvlink",
    folder: Annotated[Path | None, typer.Option("--folder", help="Instead of where engines on this host find tables.")] = None,
) -> None:
    """Make tables of ours from TensorRT-LLM's CSVs and C++ tables, and install them."""
    from phalanx.tune import commands

    for line in commands.import_(files, link, folder):
        print(line)


def main(arguments: list[str] | None = None) -> Any:
    """The command by itself; returns the exit status. One line for a bad option (2) and for any other failure (1)."""
    from phalanx import log

    log.configure("allreduce")
    try:
        return app(arguments, standalone_mode=False, prog_name="phalanx allreduce") or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except PhalanxError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Nothing may be written at the interpreter's end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        print(f"phalanx: {error.format_message()}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

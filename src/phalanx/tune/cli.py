# SPDX-License-Identifier: Apache-2.0
"""The command line of `phalanx allreduce`: bench, tune, codegen, plot, explain, import. `python -m phalanx.tune.cli` is the same.

Each command reads the files of the one before: bench writes CSVs, codegen and plot read them, import reads other people's files.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from phalanx.errors import OptionError, PhalanxError
from phalanx.tune.options import TuneOptions

app = typer.Typer(
    name="allreduce",
    help="Measure the all-reduce strategies on this machine, decide which runs at which size, and show the result.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_"), "help_option_names": ["-h", "--help"]},
)

TpSize = Annotated[
    str, typer.Option("--tp_size", help="Number of ranks; several separated by commas. all: every size this machine can form.")
]
Fusions = Annotated[str | None, typer.Option("--fusions", help=TuneOptions.model_fields["fusions"].description)]
Dtype = Annotated[str, typer.Option("--dtype", help=TuneOptions.model_fields["dtype"].description)]
Device = Annotated[str, typer.Option("--device", help=TuneOptions.model_fields["device"].description)]
DataDir = Annotated[Path, typer.Option("--data_dir", help="Folder that holds the CSVs.")]
Launched = Annotated[str | None, typer.Option(hidden=True, envvar="TORCHELASTIC_RUN_ID")]
MpiRank = Annotated[int | None, typer.Option(hidden=True, envvar=["OMPI_COMM_WORLD_RANK", "PMI_RANK"])]
MpiWorld = Annotated[int | None, typer.Option(hidden=True, envvar=["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])]
MpiLocal = Annotated[int | None, typer.Option(hidden=True, envvar=["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"])]
EnvRank = Annotated[int | None, typer.Option(hidden=True, envvar="RANK")]
EnvWorld = Annotated[int | None, typer.Option(hidden=True, envvar="WORLD_SIZE")]
EnvLocal = Annotated[int | None, typer.Option(hidden=True, envvar="LOCAL_RANK")]
Restarts = Annotated[int, typer.Option(hidden=True, envvar="TORCHELASTIC_RESTART_COUNT")]
Address = Annotated[
    str, typer.Option("--master_addr", help="Under mpirun: address of the host of rank 0, as every host reaches it.")
]
Port = Annotated[int, typer.Option("--master_port", help="Under mpirun: a free port on the host of rank 0.")]


def _takes_tune_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of `TuneOptions` behind its first option; it is called with `options`."""
    own = [one for name, one in inspect.signature(command, eval_str=True).parameters.items() if name != "options"]
    shared = [_flag(name, field) for name, field in TuneOptions.model_fields.items()]

    @functools.wraps(command)
    def with_flags(**values: Any) -> None:
        options = TuneOptions(**{flag.name: values.pop(flag.name) for flag in shared})
        command(options=options, **values)

    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
    with_flags.__signature__ = inspect.Signature([parameters[0], *shared, *parameters[1:]])  # type: ignore[attr-defined]
    return with_flags


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """An option of the model as typer reads it: default, bound and help come from the field."""
    least = next((constraint.ge for constraint in field.metadata if hasattr(constraint, "ge")), None)
    option = typer.Option(f"--{name}", help=field.description, min=least)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[field.annotation, option]
    )  # fmt: skip


@app.command()
@_takes_tune_options
def bench(
    options: TuneOptions,
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
    """Verify, then time every candidate, and write benchmark.tp{N}.sm{V}.csv. An interrupted run resumes; a hang is recorded as a
    skip.

    Starts its own ranks. Under torchrun and mpirun, the processes that they started are the ranks.
    """
    from phalanx.tune import commands

    rank = commands.launched_rank(
        elastic, (env_rank, env_world, env_local), (mpi_rank, mpi_world, mpi_local), f"{master_addr}:{master_port}"
    )
    if restarts:  # torchrun has started the ranks again after a hang: the journal in the folder is this run's own
        options = options.model_copy(update={"restart": False})
    for path in commands.measure(tp_size, options, rank):
        print(path)


@app.command()
@_takes_tune_options
def tune(
    options: TuneOptions,
    tp_size: TpSize = "all",
    install: Annotated[
        bool, typer.Option("--install/--no_install", help="Copy the tables to the folder where engines on this host look for them.")
    ] = True,
) -> None:
    """Measure, decide, generate and plot in one command. Engines on this host then use the tables."""
    from phalanx.tune import commands

    folder = options.save_csv_dir
    commands.require_packages()
    for path in [*commands.measure(tp_size, options, None), *commands.codegen(folder), *commands.plot_where_possible(folder)]:
        print(path)
    if install:
        for path in commands.install(folder):
            print(f"installed {path}")


@app.command()
def codegen(
    data_dir: DataDir = Path("data"),
    sm_version: Annotated[int | None, typer.Option("--sm_version", help="Read only the CSVs of this SM version.")] = None,
    link: Annotated[
        str | None, typer.Option("--link", help="Link class of CSVs that have no sidecar. Default: nvlink on GPUs.")
    ] = None,
    table: Annotated[
        list[Path] | None, typer.Option("--table", help="Read this table instead of CSVs; repeat for several tables.")
    ] = None,
) -> None:
    """Decide from CSVs; write tables/*.json and the C++ table of TensorRT-LLM."""
    from phalanx.tune import commands

    for path in commands.codegen(data_dir, sm_version=sm_version, link=link, tables=table):
        print(path)


@app.command()
def plot(data_dir: DataDir = Path("data")) -> None:
    """Draw three plots for every CSV and fusion into viz/, and one HTML report."""
    from phalanx.tune import commands

    for path in commands.plot(data_dir):
        print(path)


@app.command()
def explain(
    tp_size: Annotated[
        int | None, typer.Option("--tp_size", min=2, help="Number of ranks. Not needed with --machine or --table.")
    ] = None,
    hidden: Annotated[int, typer.Option("--hidden", min=1, help="Hidden size.")] = 8192,
    dtype: Dtype = "bf16",
    fusions: Fusions = None,
    machine: Annotated[str | None, typer.Option("--machine", help="Another machine, such as sm90.nvlink.tp4.")] = None,
    table: Annotated[
        Path | None, typer.Option("--table", help="File of a table to use instead of the installed or shipped one.")
    ] = None,
    device: Device = "auto",
    exchange: Annotated[
        bool, typer.Option("--exchange", help="Explain the exchange of expert parallel between tp_size groups instead.")
    ] = False,
) -> None:
    """Print which strategy runs at which size, and why."""
    from phalanx.tune import commands

    if exchange:
        for line in commands.explain_exchange(tp_size, hidden, machine, table, device):
            print(line)
        return
    for line in commands.explain(tp_size, hidden, dtype, fusions, machine, table, device):
        print(line)


@app.command(name="import")
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="CSVs (benchmark.tp*.sm*.csv), C++ tables of TensorRT-LLM, or JSON of benchmarks.comm.expert_exchange, which a "
            "checkout of the sources has."
        ),
    ],
    link: Annotated[str, typer.Option("--link", help="Link class of the machine that they were measured on.")] = "nvlink",
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Write here instead of where engines on this host look for tables.")
    ] = None,
) -> None:
    """Convert CSVs, C++ tables of TensorRT-LLM and times of exchanges to tables of Phalanx, and install them."""
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

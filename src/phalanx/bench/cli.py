# SPDX-License-Identifier: Apache-2.0
"""The verbs of `phalanx bench`: all, latency, throughput, scaling, serve, shape. The engine's flags come from the command above."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from phalanx.config import EngineOptions
from phalanx.config.sources import RawOptions
from phalanx.errors import OptionError

Verb = Callable[..., None]
Takes = Callable[..., Callable[[Verb], Verb]]

Workloads = Annotated[list[str] | None, typer.Option("--workload", "-w", help="By name; may be given again.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the report there, too: a new file; - for stdout.")]
Commit = Annotated[
    str | None, typer.Option("--commit", envvar="BENCH_COMMIT", help="Of these sources, where they came without their history.")
]

_DECODES = ("decode-1", "decode-64")
_BATCH = "batch-512x1000x1000"


def register(command: typer.Typer, takes: Takes) -> None:
    """Add `bench` to the command. takes: `cli.takes`, which gives a verb the engine's flags."""
    app = typer.Typer(
        name="bench",
        help="How well it runs: latency, throughput, load over HTTP, scaling; each beside its roof.",
        invoke_without_command=True,
        rich_markup_mode=None,
    )
    app.callback()(_help)
    app.command("all")(takes(EngineOptions)(run_all))
    app.command()(takes(EngineOptions)(latency))
    app.command()(takes(EngineOptions)(throughput))
    app.command()(takes(EngineOptions)(scaling))
    app.command()(serve)
    app.command()(shape)
    command.add_typer(app)


def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_all(
    raw_options: RawOptions,
    workload: Workloads = None,
    strategies: Annotated[
        str | None, typer.Option("--strategies", help="All-reduce strategies to set side by side, as AUTO,NCCL: an engine each.")
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Written after each workload; what it holds is not run again.")
    ] = None,
    commit: Commit = None,
) -> None:
    """All workloads through one engine: decode-1, -64, -256, -512 and batch-512x1000x1000, or others by --workload.

    MODEL may be the name of a shape (llama-3-8b, llama-3-70b, llama-3.1-405b): dummy weights, nothing to download.
    """
    from phalanx.bench import all_workloads as bench
    from phalanx.bench import offline, report, workloads

    if strategies is not None and "allreduce_strategy" in raw_options.values:
        raise OptionError(f"--strategies {strategies} was asked for", held="so was --allreduce_strategy", next="give one of them")
    wanted = [workloads.parse(name) for name in workload or workloads.KNOWN]
    file = report.json_path(json, extends=True)
    with offline.target(raw_options, commit) as target:
        chosen = bench.parse_strategies(strategies or target.options.allreduce_strategy)
        document = bench.run(target, wanted, chosen, json_file=file)
    report.give(document, bench.tables(document), json)


def latency(raw_options: RawOptions, workload: Workloads = None, json: Json = None, commit: Commit = None) -> None:
    """Time per token while a fixed number of requests decode: decode-1 and decode-64, or others by --workload.

    MODEL may be the name of a shape (llama-3-8b, llama-3-70b, llama-3.1-405b): dummy weights, nothing to download.
    """
    from phalanx.bench import latency as bench
    from phalanx.bench import offline, report, workloads

    wanted = [workloads.parse(name, "decode") for name in workload or _DECODES]
    report.json_path(json)
    with offline.target(raw_options, commit) as target:
        document = bench.run(target, wanted)
    report.give(document, [bench.table(document)], json)


def throughput(raw_options: RawOptions, workload: Workloads = None, json: Json = None, commit: Commit = None) -> None:
    """Tokens per second with all requests queued at once: batch-512x1000x1000, or others by --workload.

    MODEL may be the name of a shape (llama-3-8b, llama-3-70b, llama-3.1-405b): dummy weights, nothing to download.
    """
    from phalanx.bench import offline, report, workloads
    from phalanx.bench import throughput as bench

    wanted = [workloads.parse(name, "batch") for name in workload or [_BATCH]]
    report.json_path(json)
    with offline.target(raw_options, commit) as target:
        document = bench.run(target, wanted)
    report.give(document, [bench.table(document)], json)


def scaling(
    raw_options: RawOptions,
    sizes: Annotated[str, typer.Option(help="TP or TPxPP, separated by commas.")] = "1,2,4,8,1x2,2x2,4x2",
    workload: Annotated[str, typer.Option("--workload", "-w", help="The throughput's.")] = _BATCH,
    decode: Annotated[
        list[str] | None,
        typer.Option("--decode", help="The latency's workload, decode-1 if none is given; more by giving it again."),
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Written after each size; sizes that it holds are not run again.")
    ] = None,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw it; beside --json's file otherwise.")] = None,
    commit: Commit = None,
) -> None:
    """Throughput, latency and efficiency over sizes, each an engine of its own: the deployment guide's two tables, and a picture.

    A size that does not fit says OOM; one with more ranks than there are GPUs says so. MODEL may be the name of a shape.
    """
    from phalanx.bench import offline, plots, report, workloads
    from phalanx.bench import scaling as bench

    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if name in raw_options.values:
            raise OptionError(
                f"{name}={raw_options.values[name]} was asked for", held=f"by {raw_options.origins[name]}", next="give --sizes instead"
            )
    batch, decodes = workloads.parse(workload, "batch"), [workloads.parse(name, "decode") for name in decode or ["decode-1"]]
    wanted = bench.parse_sizes(sizes)
    file = report.json_path(json, extends=True)
    picture = plots.picture_path(plot, file)
    with offline.target(raw_options, commit) as target:
        document = bench.run(target, wanted, batch, *decodes, json_file=file)
    report.give(document, bench.tables(document), json)
    if picture is not None:
        plots.draw(document, picture)
    if any(row["status"] == bench.FAILED for row in document["rows"] if (row["tp"], row["pp"]) in wanted):
        raise typer.Exit(1)


def serve(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="A running server.")] = "http://localhost:8000",
    rate: Annotated[float | None, typer.Option(help="Requests per second, as a Poisson process; inf: all at once.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Streams, each sending its next request when its last ended.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many in all.")] = 256,
    input_len: Annotated[int, typer.Option("--input_len", min=1, help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option("--output_len", min=1, help="New tokens of each.")] = 128,
    seed: Annotated[int, typer.Option(help="Of arrival times and prompts.")] = 0,
    vocab_size: Annotated[int, typer.Option("--vocab_size", help="Prompts are random token ids below it.")] = 256,
    warmup: Annotated[int, typer.Option(min=0, help="Short requests before the clock starts.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of one request.")] = 600.0,
    model: Annotated[str | None, typer.Option(help="As the server calls it; its first otherwise.")] = None,
    api_key: Annotated[str | None, typer.Option("--api_key", envvar="PHALANX_API_KEY", help="The server's key.")] = None,
    offline: Annotated[
        Path | None, typer.Option("--offline", help="A report of `bench throughput` of the same work, to set it against.")
    ] = None,
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Drive a running OpenAI-compatible server at a request rate or a concurrency: first token, between tokens, whole requests."""
    from phalanx.bench import load, report

    wanted = load.Load(
        requests=requests, input_len=input_len, output_len=output_len, rate=rate, concurrency=concurrency, seed=seed,
        vocab_size=vocab_size, warmup=warmup, timeout=timeout, model=model,
    )  # fmt: skip
    report.json_path(json)
    document = load.run(url, api_key, wanted, offline, commit)
    report.give(document, [load.table(document)], json)
    if document["results"]["failed"]:
        raise typer.Exit(1)


def shape(
    name: Annotated[str, typer.Argument(help="llama-3-8b, llama-3-70b or llama-3.1-405b.")],
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
) -> None:
    """Write a shape's config.json and a stand-in tokenizer, for `phalanx serve FOLDER --load_format dummy`."""
    from phalanx.bench import shapes

    print(shapes.write(name, folder))

# SPDX-License-Identifier: Apache-2.0
"""The commands of `phalanx bench`: all, latency, throughput, scaling, layouts, serve, evidence, shape. `phalanx.cli` adds the
engine's flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from phalanx.config import EngineOptions
from phalanx.config.sources import RawOptions
from phalanx.errors import OptionError
from phalanx.progress import progress_bar

Verb = Callable[..., None]
Takes = Callable[..., Callable[[Verb], Verb]]

Workloads = Annotated[list[str] | None, typer.Option("--workload", "-w", help="Name of a workload; repeat for several.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Also write the report to this new file; - for stdout.")]
Commit = Annotated[
    str | None, typer.Option("--commit", envvar="BENCH_COMMIT", help="Commit id to record when the sources are not a git checkout.")
]

Rate = Annotated[
    float | None, typer.Option(help="Requests, or conversations that begin, per second, as a Poisson process; inf: all at once.")
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Number of streams; each sends its next request when its last one has ended.")
]
LengthRange = Annotated[
    float, typer.Option("--length_range", min=0.0, max=1.0, help="Least length of a prompt and an output, as a part of these.")
]
SkipFirst = Annotated[
    int, typer.Option("--skip_first", min=0, help="Number of requests that are sent first and whose latencies do not count.")
]
Offline = Annotated[
    Path | None, typer.Option("--offline", help="Report of `bench throughput` with the same work, to compare with.")
]
Trace = Annotated[str | None, typer.Option(metavar="FILE", help="Send a trace's requests: .jsonl of Mooncake, .csv of Azure.")]
NumConversations = Annotated[
    int | None,
    typer.Option("--num_conversations", min=1, help="Hold so many conversations: each prompt has all that was said before."),
]
NumTurns = Annotated[
    int | None, typer.Option("--num_turns", min=2, help="Messages of a conversation, the user's and the answers together; 8.")
]
CommonPrefix = Annotated[
    int | None, typer.Option("--common_prefix_num_tokens", min=0, help="Tokens with which all conversations begin; 0.")
]
OwnPrefix = Annotated[
    int | None, typer.Option("--prefix_num_tokens", min=0, help="Tokens that each has of its own before its first message; 0.")
]
ToolCalls = Annotated[
    int | None,
    typer.Option("--tool_calls", min=0, help="Calls of tools behind each message, each with output and answer; 0."),
]
ToolTokens = Annotated[int | None, typer.Option("--tool_num_tokens", min=1, help="Tokens of a tool's output; 256.")]
ToolTime = Annotated[float | None, typer.Option("--tool_time", min=0.0, help="Seconds that a tool takes, on average; 0.")]
ThinkTime = Annotated[
    float | None, typer.Option("--think_time", min=0.0, help="Seconds between an answer and the next message, on average; 0.")
]
MaxActive = Annotated[int | None, typer.Option("--max_active_conversations", min=1, help="Conversations that go on at once; all.")]

_DECODES = ("decode-1", "decode-64")
_BATCH = "batch-512x1000x1000"


def register(command: typer.Typer, takes: Takes) -> None:
    """Add `bench` to the command. takes: `cli.takes`, which gives a verb the engine's flags."""
    app = typer.Typer(
        name="bench",
        help="Measure latency, throughput, load over HTTP and scaling, each beside its roofline.",
        invoke_without_command=True,
        rich_markup_mode=None,
    )
    app.callback()(_help)
    app.command("all")(takes(EngineOptions)(run_all))
    app.command()(takes(EngineOptions)(latency))
    app.command()(takes(EngineOptions)(throughput))
    app.command()(takes(EngineOptions)(scaling))
    app.command()(layouts)
    app.command()(serve)
    app.command()(takes(EngineOptions)(evidence))
    app.command()(shape)
    command.add_typer(app)


def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_all(
    raw_options: RawOptions,
    workload: Workloads = None,
    strategies: Annotated[
        str | None, typer.Option("--strategies", help="All-reduce strategies to compare, such as AUTO,NCCL: one engine for each.")
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the report here after each workload; workloads in it are not run again."
        ),
    ] = None,
    commit: Commit = None,
) -> None:
    """Run all workloads through one engine: decode-1, -64, -256, -512 and batch-512x1000x1000, or those of --workload.

    MODEL may be the name of a shape (llama-3-8b, llama-3-70b, llama-3.1-405b): dummy weights, nothing to download. A colon and a
    number cut it to its first layers: deepseek-v3:20.
    """
    from phalanx.bench import all_workloads as bench
    from phalanx.bench import offline, report, workloads

    if strategies is not None and "allreduce_strategy" in raw_options.values:
        raise OptionError(
            f"--strategies {strategies} and --allreduce_strategy exclude each other", next="give one of them"
        )  # fmt: skip
    wanted = [workloads.parse(name) for name in workload or workloads.KNOWN]
    file = report.json_path(json, extends=True)
    with offline.target(raw_options, commit) as target:
        chosen = bench.parse_strategies(strategies or target.options.allreduce_strategy)
        document = bench.run(target, wanted, chosen, json_file=file)
    report.publish(document, bench.tables(document), json)


def latency(raw_options: RawOptions, workload: Workloads = None, json: Json = None, commit: Commit = None) -> None:
    """Measure the time per token while a fixed number of requests decode: decode-1 and decode-64, or those of --workload.

    MODEL may be the name of a shape (llama-3-8b, llama-3-70b, llama-3.1-405b): dummy weights, nothing to download. A colon and a
    number cut it to its first layers: deepseek-v3:20.
    """
    from phalanx.bench import latency as bench

    _offline(bench, raw_options, "decode", workload or _DECODES, json, commit)


def throughput(raw_options: RawOptions, workload: Workloads = None, json: Json = None, commit: Commit = None) -> None:
    """Measure tokens per second with all requests queued at once: batch-512x1000x1000, or those of --workload.

    MODEL may be the name of a shape (llama-3-8b, llama-3-70b, llama-3.1-405b): dummy weights, nothing to download. A colon and a
    number cut it to its first layers: deepseek-v3:20.
    """
    from phalanx.bench import throughput as bench

    _offline(bench, raw_options, "batch", workload or [_BATCH], json, commit)


def _offline(
    bench: Any, raw_options: RawOptions, kind: Literal["decode", "batch"], names: Sequence[str], json: str | None,
    commit: str | None,
) -> None:  # fmt: skip
    """Measure workloads of one kind in an engine. bench: the module that measures and shows them."""
    from phalanx.bench import offline, report, workloads

    wanted = [workloads.parse(name, kind) for name in names]
    report.json_path(json)
    with offline.target(raw_options, commit) as target:
        document = offline.run(target, wanted, bench.measure)
    report.publish(document, [bench.table(document)], json)


def scaling(
    raw_options: RawOptions,
    sizes: Annotated[str, typer.Option(help="Sizes TP or TPxPP, separated by commas.")] = "1,2,4,8,1x2,2x2,4x2",
    workload: Annotated[str, typer.Option("--workload", "-w", help="Workload of the throughput.")] = _BATCH,
    decode: Annotated[
        list[str] | None,
        typer.Option("--decode", help="Workload of the latency; default decode-1; repeat for several."),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the report here after each size; sizes in it are not run again."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw a plot to this file; default: beside the file of --json.")
    ] = None,
    commit: Commit = None,
) -> None:
    """Measure throughput, latency and efficiency over sizes, each with an engine of its own; print two tables and draw a plot.

    A size that does not fit is shown as OOM, a size with more ranks than GPUs as "no GPUs". MODEL may be the name of a shape.
    """
    from phalanx.bench import offline, plots, report, workloads
    from phalanx.bench import scaling as bench

    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if name in raw_options.values:
            raise OptionError(
                f"{name}={raw_options.values[name]} cannot be combined with --sizes",
                held=f"it comes from {raw_options.origins[name]}",
                next="give --sizes alone",
            )
    batch, decodes = workloads.parse(workload, "batch"), [workloads.parse(name, "decode") for name in decode or ["decode-1"]]
    wanted = bench.parse_sizes(sizes)
    file = report.json_path(json, extends=True)
    plot_path = plots.plot_path(plot, file)
    with offline.target(raw_options, commit) as target:
        document = bench.run(target, wanted, batch, *decodes, json_file=file)
    report.publish(document, bench.tables(document), json)
    if plot_path is not None:
        plots.draw(document, plot_path)
    if any(row["status"] == bench.FAILED for row in document["rows"] if (row["tp"], row["pp"]) in wanted):
        raise typer.Exit(1)


def layouts(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="Reports of `phalanx bench all --json REPORT`.")],
    workload: Workloads = None,
    json: Json = None,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw a plot to this file.")] = None,
) -> None:
    """Put reports of one model in several layouts side by side; name the best layout of each workload.

    Nothing is measured: run `bench all` once for each layout, with --tp_size, --pp_size, --ep_size, --moe_ep_size, --replicas and,
    for mixtures of experts with dummy weights, --expert_traffic. Of repeated runs the median counts.
    """
    from phalanx.bench import layouts as bench
    from phalanx.bench import plots, report, workloads

    wanted = [workloads.parse(name).name for name in workload or []]
    report.json_path(json)
    plot_path = None if plot is None else plots.plot_path(plot, None)
    comparison = bench.compare(reports, wanted)
    report.publish(bench.as_json(comparison), bench.tables(comparison), json)
    if plot_path is not None:
        plots.draw_layouts(comparison, plot_path)


def serve(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="URL of a running server.")] = "http://localhost:8000",
    rate: Rate = None,
    concurrency: Concurrency = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests, or of those of a trace.")] = 256,
    input_len: Annotated[int, typer.Option("--input_len", min=1, help="Tokens of each prompt, or message of a user.")] = 128,
    output_len: Annotated[int, typer.Option("--output_len", min=1, help="New tokens of each request.")] = 128,
    length_range: LengthRange = 1.0,
    skip_first: SkipFirst = 0,
    trace: Trace = None,
    speed: Annotated[float, typer.Option(help="Factor by which requests arrive faster than in the trace.")] = 1.0,
    shorten: Annotated[int, typer.Option(help="Factor by which requests have fewer tokens than in the trace.")] = 1,
    num_conversations: NumConversations = None,
    num_turns: NumTurns = None,
    common_prefix_num_tokens: CommonPrefix = None,
    prefix_num_tokens: OwnPrefix = None,
    tool_calls: ToolCalls = None,
    tool_num_tokens: ToolTokens = None,
    tool_time: ToolTime = None,
    think_time: ThinkTime = None,
    max_active_conversations: MaxActive = None,
    seed: Annotated[int, typer.Option(help="Seed of arrival times, lengths and prompts.")] = 0,
    vocab_size: Annotated[int, typer.Option("--vocab_size", help="Prompts are random token ids below this number.")] = 256,
    warmup: Annotated[int, typer.Option(min=0, help="Short requests before the measurement, but for conversations.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")] = 600.0,
    model: Annotated[str | None, typer.Option(help="Name of the model on the server; default: its first model.")] = None,
    api_key: Annotated[str | None, typer.Option("--api_key", envvar="PHALANX_API_KEY", help="The server's key.")] = None,
    offline: Offline = None,
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Load a running OpenAI-compatible server at a request rate or a concurrency, with a trace, or with conversations; measure time
    to first token, between tokens, and per request."""
    from phalanx.bench import load, report

    common: dict[str, Any] = {
        "input_len": input_len, "output_len": output_len, "rate": rate, "concurrency": concurrency, "seed": seed,
        "vocab_size": vocab_size, "timeout": timeout, "model": model,
    }  # fmt: skip
    of_conversations = {
        "num_turns": num_turns, "common_prefix_num_tokens": common_prefix_num_tokens, "prefix_num_tokens": prefix_num_tokens,
        "tool_calls": tool_calls, "tool_num_tokens": tool_num_tokens, "tool_time": tool_time, "think_time": think_time,
        "max_active_conversations": max_active_conversations,
    }  # fmt: skip
    of_requests: dict[str, Any] = {
        "length_range": length_range, "skip_first": skip_first, "trace": trace, "speed": speed, "shorten": shorten,
    }  # fmt: skip
    report.json_path(json)
    if num_conversations is not None:
        _require_unset("do nothing with --num_conversations", {**of_requests, "offline": offline})
        document, tables = _converse(url, api_key, num_conversations, common, of_conversations, commit)
    else:
        _require_unset("do nothing without --num_conversations", of_conversations)
        chosen = load.Load(requests, warmup=warmup, **common, **of_requests)
        with progress_bar("bench serve") as on_progress:
            document = load.run(url, api_key, chosen, offline, commit, on_progress)
        tables = [load.table(document)]
    report.publish(document, tables, json)
    if document["results"]["failed"]:
        raise typer.Exit(1)


def _require_unset(why: str, options: dict[str, Any]) -> None:
    """Raise OptionError for options that are given and do nothing."""
    names = [f"--{name}" for name, value in options.items() if value not in (None, _UNSET.get(name))]
    if names:
        raise OptionError(f"{', '.join(names)} {why}", next="leave them out, or see `phalanx bench serve --help`")


_UNSET: dict[str, float] = {"length_range": 1.0, "skip_first": 0, "speed": 1.0, "shorten": 1}
"""Values of options that stand for none."""


def _converse(
    url: str, key: str | None, number: int, common: dict[str, Any], own: dict[str, Any], commit: str | None
) -> tuple[dict[str, Any], list[Any]]:  # fmt: skip
    """The report of so many conversations, and its tables."""
    from phalanx.bench import conversations as bench

    chosen = {name: value for name, value in own.items() if value is not None}
    document = bench.run(url, key, bench.Conversations(number, **common, **chosen), commit)
    return document, bench.tables(document)


def evidence(
    raw_options: RawOptions,
    reference_device: Annotated[
        str, typer.Option("--reference_device", help="Where transformers computes: cuda, cpu, or none for no comparison.")
    ] = "cpu",
    lm_eval: Annotated[
        str | None, typer.Option("--lm_eval", metavar="TASKS", help="Tasks of lm-eval, such as gsm8k,mmlu; it must be installed.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Samples of each task.")] = 100,
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Show what a checkpoint does here: a real server beside transformers, its speed, and tasks of lm-eval.

    Log probabilities of fixed texts are compared with those of transformers, which reads the same folder. Exit status 1 where the
    perplexities differ by more than 2 percent.
    """
    from phalanx.bench import evidence as bench
    from phalanx.bench import report

    wanted = bench.Questions(reference_device, [task for task in (lm_eval or "").split(",") if task], limit)
    bench.check(wanted)
    report.json_path(json)
    document = bench.run(raw_options, wanted, commit)
    report.publish(document, bench.tables(document), json)
    if not document["results"]["transformers"].get("agrees", True):
        raise typer.Exit(1)


def shape(
    name: Annotated[str, typer.Argument(help="Such as llama-3-8b, or deepseek-v3:20 for its first 20 layers.")],
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
) -> None:
    """Write the config.json of a shape and a substitute tokenizer, for `phalanx serve FOLDER --load_format dummy`."""
    from phalanx.bench import shapes

    print(shapes.write(name, folder))

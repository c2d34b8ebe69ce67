# SPDX-License-Identifier: Apache-2.0
"""The verbs `topo`, `monitor`, `experts` and `doctor` of the command. The engine's and the server's flags come from the command
above."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import RawOptions, build_options
from phalanx.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

Verb = Callable[..., None]
Takes = Callable[..., Callable[[Verb], Verb]]

Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the report as JSON to this file, which may be an earlier report; - for stdout."
    ),
]


def register(command: typer.Typer, takes: Takes) -> None:
    """Add the verbs to the command. takes: `cli.takes`, which gives a verb the engine's and the server's flags."""
    command.command()(takes(EngineOptions, model_argument=False)(topo))
    command.command()(monitor)
    command.command()(experts)
    command.command()(takes(EngineOptions, ServeOptions, model_argument=False)(doctor))


def topo(
    raw_options: RawOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Also estimate the cost of communication for this model: a folder, a Hub id, or the name of a shape.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no_measure", help="Copy between each pair of GPUs, verify and time it.")
    ] = True,
    json: Json = None,
) -> None:
    """Show how GPUs are connected and the communication cost for a model."""
    from phalanx.health import pairs, topology

    _check_json(json, "pairs")
    subject = _subject(raw_options, model)
    count = len(subject.devices.gpus)
    measured = pairs.measure(count, visible=subject.devices.uuids) if measure and count > 1 else None
    result = topology.survey(subject, measured)
    _give(json, topology.dumps(result), lambda: _console().print(topology.show(result)))


def doctor(
    raw_options: RawOptions,
    target: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL | URL ...]", help="A model with the options of `phalanx serve`, or URLs of servers."),
    ] = None,
    check: Annotated[list[str] | None, typer.Option("--check", help="Run only this check; repeat for several.")] = None,
    peer: Annotated[
        list[Path] | None, typer.Option("--peer", help="Report of another host (--json) to compare with; repeat for several.")
    ] = None,
    quality: Annotated[
        bool,
        typer.Option("--quality", help="Also start an engine of the model, and check its answers by the reference path."),
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Print the commands that would fix the findings, one per line. Nothing is run.")
    ] = False,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks without running them.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show also the checks that found nothing.")] = False,
    json: Json = None,
) -> None:
    """Find what is wrong with this host, a model's options, or running servers, and name the cure. Exit status 0: all is well."""
    from phalanx.health import doctor as examination
    from phalanx.health import registry, servers

    _check_json(json, "checks")
    checks = [registry.named(name) for name in check] if check else registry.every()
    if list_checks:
        _console().print(examination.listing(checks))
        return
    names = target or []
    urls = [name for name in names if servers.is_url(name)]
    models = [name for name in names if not servers.is_url(name)]
    if len(models) > 1:
        raise OptionError(f"several models are named: {', '.join(models)}", next="name one model, or URLs of servers")
    subject = _subject(raw_options, models[0] if models else None)
    if quality and subject.options is None:
        raise OptionError("--quality names no model", next="name one: `phalanx doctor MODEL --quality`")
    subject.quality = quality
    subject.servers = tuple(servers.visit(url) for url in urls)
    subject.peers = tuple(_report(path) for path in peer or [])
    report = examination.examine(subject, checks)
    if fix:
        for command in report.commands():
            print(command)
    else:
        _give(json, examination.dumps(report), lambda: examination.show(report, _console(), verbose=verbose))
    raise typer.Exit(report.status)


def monitor(
    url: Annotated[
        list[str] | None, typer.Argument(metavar="[URL ...]", help="URLs of servers. Default: http://localhost:8000.")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading, over one interval, and exit.")] = False,
    json: Json = None,
) -> None:
    """Show live statistics of running servers, read from /metrics. q or Ctrl-C ends it, h shows the keys."""
    from phalanx.health import monitor as view
    from phalanx.health.monitor_live import live
    from phalanx.health.servers import urls_of

    if not 0 < interval < 1e6:
        raise OptionError(f"interval={interval:g} is no time", next="use a positive number of seconds")
    _check_json(json, "servers")
    with view.ServerWatch(urls_of(url or ["http://localhost:8000"])) as watch:
        if json is None and not once:
            live(watch, interval, _console())
            return
        watch.read()
        time.sleep(interval)
        watch.read()
        _give(json, view.dumps(watch.frame()), lambda: _console().print(view.render(watch.frame())))
        raise typer.Exit(0 if watch.reached else 1)


def experts(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="URL of a server.")] = "http://localhost:8000",
    recent: Annotated[bool, typer.Option("--recent", help="Count the last minute instead of the time since the start.")] = False,
    copies: Annotated[int, typer.Option(help="Also show the effect of N more copies per layer.", metavar="N", min=0)] = 0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.svg", help="Also draw the map to this file.")] = None,
    json: Json = None,
) -> None:
    """Show the load of each expert of a running server as a heat map, and what another placement would give."""
    from phalanx.health import experts as view
    from phalanx.tables.table_file import write_whole

    _check_json(json, "engines")
    engines = view.views(view.read(url), recent=recent, redundant=copies)
    if out is not None:
        write_whole(out, view.picture(engines))
    _give(json, view.dumps(engines), lambda: view.show(engines, _console()))


def _subject(raw_options: RawOptions, model: str | None) -> Any:
    """Of options and a model; a shape's name stands for its published config with dummy weights."""
    from phalanx.bench.shapes import SHAPES
    from phalanx.health.subject import Subject

    values = dict(raw_options.values)
    if model is not None:
        values["model"] = model
    raw_options = RawOptions(values, {"model": "the argument", **raw_options.origins})
    serving = build_options(ServeOptions, raw_options)
    if "model" not in values:
        return Subject(serving=serving)
    options = build_options(EngineOptions, raw_options)
    if options.model in SHAPES:
        return Subject(serving=serving, options=options.model_copy(update={"load_format": "dummy"}), config=SHAPES[options.model])
    return Subject(serving=serving, options=options)


def _report(path: Path) -> dict[str, Any]:
    try:
        document = json_module.loads(path.read_text(encoding="utf-8"))
        assert isinstance(document["host"], dict)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise OptionError(
            f"{path} is no report of a doctor: {error}", next="write one there with `phalanx doctor --json FILE`"
        ) from None
    return dict(document)


def _check_json(json: str | None, key: str) -> None:
    """Raise OptionError where the report cannot be written, or would replace a file that is not an earlier one. Call it before
    anything runs. key: one that every report of the verb has."""
    from phalanx.bench.report import json_path

    path = json_path(json, extends=True)
    if path is None or not path.exists():
        return
    try:
        is_report = key in dict(json_module.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        is_report = False
    if not is_report:
        raise OptionError(
            f"the report cannot be written to {json!r}", held="a file is there that is no earlier report, and would be lost",
            next="name a new file",
        )  # fmt: skip


def _give(json: str | None, text: str, show: Callable[[], None]) -> None:
    if json == "-":
        print(text)
        return
    if json is not None:
        from phalanx.tables.table_file import write_whole

        write_whole(Path(json), text + "\n")
    show()


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)

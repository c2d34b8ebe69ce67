# SPDX-License-Identifier: Apache-2.0
"""The verb `deploy ray-serve` of the command. The engine's and the server's flags come from the command above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import RawOptions, build_options

Verb = Callable[..., None]
Takes = Callable[..., Callable[[Verb], Verb]]


def register(command: typer.Typer, takes: Takes) -> None:
    """Add `deploy ray-serve` to the command. takes: `cli.takes`, which gives a verb the engine's and the server's flags."""
    groups = [group.typer_instance for group in command.registered_groups]
    deploy = next((group for group in groups if group is not None and group.info.name == "deploy"), None)
    if deploy is None:
        deploy = typer.Typer(name="deploy", rich_markup_mode=None, no_args_is_help=True, help="Deploy servers.")
        command.add_typer(deploy)
    deploy.command("ray-serve")(takes(EngineOptions, ServeOptions)(ray_serve))


def ray_serve(
    raw_options: RawOptions,
    name: Annotated[str, typer.Option("--name", help="Name of the application in Ray Serve.")] = "phalanx",
    route_prefix: Annotated[str, typer.Option("--route_prefix", help="Prefix of the paths of this application.")] = "/",
    min_replicas: Annotated[int, typer.Option("--min_replicas", help="Minimum number of servers.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option("--max_replicas", help="Maximum number of servers. None: min_replicas.")
    ] = None,
    target_requests: Annotated[
        int | None, typer.Option("--target_requests", help="Target number of running requests per server. None: max_batch_size.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the application instead of deploying it.")] = False,
) -> None:
    """Run servers on a Ray cluster behind Ray Serve: phalanx deploy ray-serve MODEL --tp_size 4 --max_replicas 4"""
    from phalanx.deploy import ray_serve as application

    if stop:
        application.stop(name)
        print(f"{name} is ended")
        return
    engine, serving = build_options(EngineOptions, raw_options), build_options(ServeOptions, raw_options)
    scaling = application.Scaling(min_replicas, min_replicas if max_replicas is None else max_replicas, target_requests)
    url = application.deploy(engine, serving, scaling, name=name, route_prefix=route_prefix)
    print(f"{engine.model} is served at {url}; `phalanx deploy ray-serve --stop --name {name}` ends it")

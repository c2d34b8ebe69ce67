# SPDX-License-Identifier: Apache-2.0
"""Commands of `phalanx` read as the command line reads them, without running them."""

from __future__ import annotations

from functools import cache

import typer

from phalanx.cli import every_verb
from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import build_options, read_sources


@cache
def command_line():
    return typer.main.get_command(every_verb())


def require_parsed(arguments: list[str]) -> None:
    """By the command line's own parser, up to but without the verb; engine and server options are then validated."""
    command = command_line()
    context = command.make_context("phalanx", list(arguments))
    while hasattr(command, "commands"):
        if arguments[0] not in command.commands and hasattr(command, "default_verb"):
            arguments = [command.default_verb, *arguments]
        name, *arguments = arguments
        assert name in command.commands, f"phalanx has no verb {name}"
        command = command.commands[name]
        context = command.make_context(name, list(arguments), parent=context)
    options = EngineOptions.model_fields | ServeOptions.model_fields
    raw = read_sources({name: value for name, value in context.params.items() if name in options and value is not None}, environ={})
    if "model" in raw.values and name != "shape":
        build_options(EngineOptions, raw)
    build_options(ServeOptions, raw)

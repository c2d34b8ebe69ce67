# SPDX-License-Identifier: Apache-2.0
"""The command `phalanx`: its subcommands, without logic of their own.

The flags of the engine and the server are derived from the option models. Each flag is accepted with `_` or `-`, by its long name
and by the short one of `config.sources.ALIASES`. A bad option prints one line and exits with status 2; any other failure prints one
line and exits with 1.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from phalanx import log
from phalanx.config import EngineOptions, SamplingParams
from phalanx.config.home import ensure_home
from phalanx.config.options import refuse_unknown
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import ALIASES, RawOptions, build_options, read_sources
from phalanx.errors import OptionError, PhalanxError, UnknownOption, file_named
from phalanx.launch import importing
from phalanx.version import __version__

logger = log.get_logger(__name__)

app = typer.Typer(
    name="phalanx",
    help="Phalanx serves large language models on many GPUs, or on any CPU.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_"), "help_option_names": ["-h", "--help"]},
)
"""With the verbs of this module, and once `every_verb` was called with all."""

Command = Callable[..., None]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"phalanx {__version__}")
        raise typer.Exit


@app.callback()
def phalanx(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.", show_default=False)
    ] = False,
) -> None:
    """Phalanx serves large language models on many GPUs, or on any CPU."""


def takes(*models: type[BaseModel], model_argument: bool = True) -> Callable[[Command], Command]:
    """Give a command the flags of these option models, the argument MODEL and `--config FILE`.

    The command gets `raw_options`: the values of file, environment and flags. They stay text here; the option models validate them,
    whichever source they come from.
    """

    def with_flags(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "raw_options"]
        fields = {name: field for model in models for name, field in model.model_fields.items() if name != "model"}
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters = [*([_optional("model", _MODEL)] if model_argument else []), *parameters, _optional("config", _CONFIG)]
        parameters += [_flag(name, field) for name, field in fields.items()]

        def run(**arguments: Any) -> None:
            own_arguments = {parameter.name: arguments.pop(parameter.name) for parameter in own}
            file = arguments.pop("config")
            raw_options = read_sources(arguments, file=file)
            if raw_options.values.get("log_format") == "json":  # also of the lines before the options are built
                log.choose(form="json")
                log.configure()
            if raw_options.origins.get("cluster_token") == "--cluster_token":
                logger.warning(
                    "--cluster_token stands in the process list of this host: use PHALANX_CLUSTER_TOKEN or --cluster_token_file"
                )
            command(raw_options=raw_options, **own_arguments)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return with_flags


_CONFIG = Annotated[
    Path | None, typer.Option("--config", help="YAML file with options. Environment variables and flags override it.")
]
_MODEL = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The model: a local folder, a Hugging Face Hub id, or 'demo'.", show_default=False),
]


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    names = [f"--{name}", *(f"--{short}" for short, long in ALIASES.items() if long == name)]
    help_text = str(field.description) + ("" if field.default is None or field.is_required() else f" [default: {field.default}]")
    if field.annotation is bool:
        option = typer.Option(f"--{name}/--no_{name}", help=help_text, show_default=False)
        return _optional(name, Annotated[bool | None, option])
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    metavar = "|".join(choices) if choices else _type_name(field.annotation)
    option = typer.Option(*names, help=help_text, metavar=metavar, show_default=False)
    return _optional(name, Annotated[str | None, option])


def _optional(name: str, annotation: Any) -> inspect.Parameter:
    """A parameter whose default is None."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _type_name(annotation: Any) -> str:
    names = {int: "INT", float: "NUMBER", str: "TEXT"}
    return next((name for type_, name in names.items() if annotation is type_ or type_ in get_args(annotation)), "VALUE")


class GroupedCommand(TyperCommand):
    """A command whose help has its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        title = "Options"
        groups: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            if parameter.param_type_name != "argument":
                title = GROUPS.get(str(parameter.name), title)
            if (record := parameter.get_help_record(ctx)) is not None:
                name = "Arguments" if parameter.param_type_name == "argument" else title if parameter.name != "help" else "Options"
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


GROUPS = {
    "tokenizer": "Model", "plan": "Layout", "nnodes": "Hosts", "max_batch_size": "Batch and KV cache", "max_loras": "Adapters",
    "allreduce_strategy": "Kernels and all-reduce", "stall_timeout": "Limits of time", "host": "Address and access",
    "metrics_prefix": "Queue and metrics", "reasoning_parser": "Outputs", "open_metrics": "Further access",
    "log_format": "Logs and traces", "header_timeout": "Requests",
}  # fmt: skip
"""The first option of each group of the help -> its title. Options have the order of the option models."""


@app.command(cls=GroupedCommand)
@takes(EngineOptions, ServeOptions)
def serve(raw_options: RawOptions) -> None:
    """Serve a model with the OpenAI API over HTTP."""
    engine, serving = build_options(EngineOptions, raw_options), build_options(ServeOptions, raw_options)
    if raw_options.origins.get("api_key") == "--api_key":
        log.get_logger(__name__).warning(
            "the API key stands in the process list for a moment; give it by --api_key_file or PHALANX_API_KEY instead"
        )
    with importing():
        from phalanx.serve.app import run

    raise typer.Exit(run(engine, serving))


@app.command(cls=GroupedCommand)
@takes(EngineOptions)
def generate(
    raw_options: RawOptions,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="The prompt; - reads it from stdin. Can be repeated.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max_tokens", help="Maximum number of new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 always picks the most likely token.")] = 0.0,
    top_p: Annotated[
        float,
        typer.Option("--top_p", help="Nucleus sampling: keep the smallest set of tokens with cumulative probability >= top_p."),
    ] = 1.0,
    top_k: Annotated[int, typer.Option("--top_k", help="Keep the k most likely tokens; 0 disables.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text. Can be repeated.")] = None,
) -> None:
    """Complete prompts, and print the text as it is generated."""
    from phalanx.serve.cli_chat import complete

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop)
    prompts = [sys.stdin.read() if text == "-" else text for text in prompt or ["-"]]
    complete(build_options(EngineOptions, raw_options), prompts, params)


@app.command(cls=GroupedCommand)
@takes(EngineOptions, ServeOptions, model_argument=False)
def chat(
    raw_options: RawOptions,
    target: Annotated[str, typer.Argument(metavar="[URL|MODEL]", help="URL of a server, or a model to load in this process.")] = (
        "http://localhost:8000"
    ),
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max_tokens", help="Maximum number of new tokens per answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 always picks the most likely token.")] = 0.0,
) -> None:
    """Chat with a server, or with a model loaded in this process. /help lists what else a line may be; Ctrl-D ends it."""
    from phalanx.serve.cli_chat import talk

    raise typer.Exit(talk(target, raw_options, system=system, max_tokens=max_tokens, temperature=temperature))


@app.command()
def version() -> None:
    """Print the version."""
    print(f"phalanx {__version__}")


@cache
def every_verb() -> typer.Typer:
    """`app` with the verbs of other packages. To import them and to build their flags takes a fifth of a second of CPU time, for
    which the verbs above do not wait."""
    from phalanx.bench.cli import register as register_bench
    from phalanx.bench.prediction.cli import register as register_plan
    from phalanx.deploy.cli import register as register_deploy
    from phalanx.deploy.ray_serve_cli import register as register_ray_serve
    from phalanx.health.cli import register as register_health
    from phalanx.tune.cli import app as allreduce

    app.add_typer(allreduce, name="allreduce")
    register_bench(app, takes)
    register_health(app, takes)
    register_plan(app)
    register_ray_serve(app, takes)
    register_deploy(app, takes)
    return app


def _joined(arguments: list[str]) -> list[str]:
    """The arguments; several values of --lora_modules, as vLLM takes them, are one."""
    joined: list[str] = []
    for argument in arguments:
        several = len(joined) > 1 and joined[-2].replace("-", "_") == "__lora_modules"
        if several and not argument.startswith("-") and ("=" in argument or argument.startswith("{")):
            joined[-1] += f",{argument}"
        else:
            joined.append(argument)
    return joined


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    log.configure()
    ensure_home()
    try:
        words = _joined(sys.argv[1:] if arguments is None else arguments) or ["--help"]
        known = any(command.callback is not None and command.callback.__name__ == words[0] for command in app.registered_commands)
        status = int((app if known else every_verb())(words, standalone_mode=False) or 0)
        _flush()  # so that a full disk is an error here, not when the interpreter exits
        return status
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of stdout has gone (`| head`)
        _mute()
        return 1
    except PhalanxError as error:
        return _fail(str(error), 2 if isinstance(error, OptionError) else 1)
    except OSError as error:
        try:
            _flush()
        except OSError:
            _mute()
        if sys.flags.dev_mode:
            raise
        message = str(error) or type(error).__name__
        return _fail(f"{message}; raised at {_place(error)}; with PYTHONDEVMODE=1 the whole traceback is shown", 1)
    except Exception as error:
        # typer raises this for a command line that it cannot parse; the module of the class depends on typer's version.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help of a group of verbs, in lines
            print(error.format_message())
            return 2
        return _fail(_of_unknown_flag(error, words) or _of_extra_argument(error, words) or error.format_message(), 2)


def _of_unknown_flag(error: Any, words: list[str]) -> str:
    """The message about a flag of several letters that the verb does not have; "" for any other error of a command line."""
    flag = getattr(error, "option_name", "")
    if not flag.startswith("--"):  # of -tp 2, the parser names -t
        flag = next((f"-{word.partition('=')[0]}" for word in words if flag and word.startswith(flag) and len(word) > 2), "")
    if not hasattr(error, "possibilities") or not flag:
        return ""
    verb = error.ctx.command
    known = [option[2:] for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)]
    try:
        refuse_unknown({flag[2:]: None}, known, what="flag", spell="--{}".format)
    except UnknownOption as unknown:
        if not unknown.next.startswith("known: "):
            return str(unknown)
        verbs = [context.info_name for context in _contexts(error.ctx) if context.parent is not None]
        return f"{unknown.failure}; `{' '.join(['phalanx', *reversed(verbs)])} --help` lists those that are"
    return ""


def _of_extra_argument(error: Any, words: list[str]) -> str:
    """The message about a word that the verb has no place for, by the flag before it; "" for any other error."""
    match = re.match(r"Got unexpected extra arguments?(?:\(s\))? \((\S+?)(?: .*)?\)", error.format_message())
    if match is None or match[1] not in words:
        return ""
    before = [word for word in words[: words.index(match[1])] if word.startswith("--")]
    flag = before[-1].replace("-", "_").replace("__", "--", 1) if before else ""
    parameters = [one for one in error.ctx.command.params if flag in (*one.opts, *one.secondary_opts)]
    if not parameters:
        return f"argument {match[1]!r} is one too many"
    if not parameters[0].is_flag:
        return f"argument {match[1]!r} is one too many; {flag} takes one value"
    off = (parameters[0].secondary_opts or [""])[0]
    switch = f"; {off} switches it off" if off and off != flag else ""
    return f"argument {match[1]!r} is one too many; {flag} takes no value{switch}"


def _contexts(context: Any) -> Iterator[Any]:
    """A context of typer's, and those around it: of the verb, its group and the program."""
    while context is not None:
        yield context
        context = context.parent


def _flush() -> None:
    if sys.stdout is not None:  # None if the parent process closed it
        with file_named("standard output"):
            sys.stdout.flush()


def _mute() -> None:
    """Drop what is still buffered for stdout, and send everything later to /dev/null, also when the interpreter exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _place(error: OSError) -> str:
    """The innermost line of this package in the traceback, for example "bench/shapes.py:56"."""
    here = Path(__file__).parent
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    path, line = [(path, line) for path, line in frames if path.is_relative_to(here)][-1]
    return f"{path.relative_to(here)}:{line}"


def _fail(message: str, status: int) -> int:
    print(f"phalanx: {' '.join(message.split())}", file=sys.stderr)
    return status

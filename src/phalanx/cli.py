# SPDX-License-Identifier: Apache-2.0
"""The command `phalanx`: verbs only, no logic.

Flags of the engine and the server are made from the option models, so that a flag is there as soon as its option is. Each is taken
with `_` or `-`, by its long name and by the short one of `config.sources.ALIASES`. A bad option is one line and exit status 2, any
other failure one line and 1.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from phalanx import log
from phalanx.bench.prediction.verbs import register as register_plan
from phalanx.bench.verbs import register as register_bench
from phalanx.config import EngineOptions, SamplingParams
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import ALIASES, Asked, build, gather
from phalanx.errors import OptionError, PhalanxError
from phalanx.tune.verbs import app as allreduce
from phalanx.version import __version__

app = typer.Typer(
    name="phalanx",
    help="Serves large language models over many GPUs, and on any CPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_"), "help_option_names": ["-h", "--help"]},
)
app.add_typer(allreduce, name="allreduce")

Verb = Callable[..., None]


def takes(*models: type[BaseModel], model_argument: bool = True) -> Callable[[Verb], Verb]:
    """Give a verb the flags of option models, the argument MODEL and `--config FILE`.

    It is called with what was `asked` in file, environment and flags. Values stay text here: the option models say what is taken,
    whichever source it came from.
    """

    def with_flags(verb: Verb) -> Verb:
        own = [parameter for name, parameter in inspect.signature(verb, eval_str=True).parameters.items() if name != "asked"]
        fields = {name: field for model in models for name, field in model.model_fields.items() if name != "model"}
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters = [*([_none("model", _MODEL)] if model_argument else []), *parameters, _none("config", _CONFIG)]
        parameters += [_flag(name, field) for name, field in fields.items()]

        def run(**given: Any) -> None:
            mine = {parameter.name: given.pop(parameter.name) for parameter in own}
            file = given.pop("config")
            verb(asked=gather(given, file=file), **mine)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = verb.__name__, verb.__doc__
        return run

    return with_flags


_CONFIG = Annotated[Path | None, typer.Option("--config", help="A YAML file with options; environment and flags win over it.")]
_MODEL = Annotated[str | None, typer.Argument(metavar="MODEL", help="A folder, a Hub id, or 'demo'.", show_default=False)]


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    names = [f"--{name}", *(f"--{short}" for short, long in ALIASES.items() if long == name)]
    help_text = str(field.description) + ("" if field.default is None or field.is_required() else f" [default: {field.default}]")
    if field.annotation is bool:
        option = typer.Option(f"--{name}/--no_{name}", help=help_text, show_default=False)
        return _none(name, Annotated[bool | None, option])
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    kind = "|".join(choices) if choices else _kind(field.annotation)
    option = typer.Option(*names, help=help_text, metavar=kind, show_default=False)
    return _none(name, Annotated[str | None, option])


def _none(name: str, annotation: Any) -> inspect.Parameter:
    """A parameter that is None unless it is given."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _kind(annotation: Any) -> str:
    named = {int: "INT", float: "NUMBER", str: "TEXT"}
    return next((word for kind, word in named.items() if annotation is kind or kind in get_args(annotation)), "VALUE")


@app.command()
@takes(EngineOptions, ServeOptions)
def serve(asked: Asked) -> None:
    """Serve a model over the OpenAI API."""
    engine, serving = build(EngineOptions, asked), build(ServeOptions, asked)
    from phalanx.serve.app import run

    raise typer.Exit(run(engine, serving))


@app.command()
@takes(EngineOptions)
def generate(
    asked: Asked,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="May be given again; - reads one from stdin.")] = None,
    max_tokens: Annotated[int, typer.Option("--max_tokens", help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top_p", help="Of the likeliest tokens that add up to so much.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top_k", help="Of so many likeliest tokens; 0: of all.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be given again.")] = None,
) -> None:
    """Complete prompts, and print the text while it comes."""
    from phalanx.serve.terminal import complete

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop)
    complete(build(EngineOptions, asked), [sys.stdin.read() if text == "-" else text for text in prompt or ["-"]], params)


@app.command()
@takes(EngineOptions, ServeOptions, model_argument=False)
def chat(
    asked: Asked,
    target: Annotated[str, typer.Argument(metavar="[URL|MODEL]", help="A server's URL, or a model to load here.")] = (
        "http://localhost:8000"
    ),
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max_tokens", help="New tokens at most, in each answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
) -> None:
    """Talk to a server, or to a model loaded here. End with Ctrl-D."""
    from phalanx.serve.terminal import talk

    raise typer.Exit(talk(target, asked, system=system, max_tokens=max_tokens, temperature=temperature))


@app.command()
def version() -> None:
    """Print the version."""
    print(f"phalanx {__version__}")


register_bench(app, takes)
register_plan(app)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    log.configure()
    try:
        status = int(app((sys.argv[1:] if arguments is None else arguments) or ["--help"], standalone_mode=False) or 0)
        _flush()  # a full disk is an error here, not at the interpreter's end
        return status
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        _mute()
        return 1
    except PhalanxError as error:
        return _say(str(error), 2 if isinstance(error, OptionError) else 1)
    except OSError as error:
        try:
            _flush()
        except OSError:
            _mute()
        if sys.flags.dev_mode:
            raise
        words = str(error) or type(error).__name__
        return _say(f"{words}; raised at {_place(error)}; with PYTHONDEVMODE=1 the whole traceback is shown", 1)
    except Exception as error:
        # What typer raises for a command line that it does not understand; where the class lives depends on its version.
        if not hasattr(error, "format_message"):
            raise
        return _say(error.format_message(), 2)


def _flush() -> None:
    if sys.stdout is not None:  # so it is where whoever started us had closed it
        sys.stdout.flush()


def _mute() -> None:
    """What stdout did not take is let go, and nothing is written to it any more: not at the interpreter's end either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _place(error: OSError) -> str:
    """The last line of ours that an error passed, as "bench/shapes.py:56"."""
    here = Path(__file__).parent
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    path, line = [(path, line) for path, line in frames if path.is_relative_to(here)][-1]
    return f"{path.relative_to(here)}:{line}"


def _say(message: str, status: int) -> int:
    print(f"phalanx: {' '.join(message.split())}", file=sys.stderr)
    return status

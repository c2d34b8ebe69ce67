# SPDX-License-Identifier: Apache-2.0
"""The verbs `deploy k8s` and `deploy compose` of the command. The engine's and the server's flags come from the command above."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import RawOptions, build_options
from phalanx.deploy.options import ComposeOptions, K8sOptions
from phalanx.deploy.serve_flags import ServeFlags
from phalanx.errors import OptionError

Verb = Callable[..., None]
Takes = Callable[..., Callable[[Verb], Verb]]

Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write the files to this folder instead of printing them.")]


def register(command: typer.Typer, takes: Takes) -> None:
    """Add `deploy` to the command. takes: `cli.takes`, which gives a verb the engine's and the server's flags."""
    groups = [group.typer_instance for group in command.registered_groups]
    deploy = next((group for group in groups if group is not None and group.info.name == "deploy"), None)
    if deploy is None:
        deploy = typer.Typer(name="deploy", rich_markup_mode=None, no_args_is_help=True, help="Deploy servers.")
        command.add_typer(deploy)
    deploy.command()(takes(EngineOptions, ServeOptions)(_with_flags(k8s, K8sOptions)))
    deploy.command()(takes(EngineOptions, ServeOptions)(_with_flags(compose, ComposeOptions)))


def k8s(raw_options: RawOptions, options: K8sOptions, out: Path | None) -> None:
    """Print the Kubernetes manifest of a server: phalanx deploy k8s MODEL --image NAME | kubectl apply -f -"""
    from phalanx.deploy import k8s as manifest
    from phalanx.deploy.ray_application import require_replicas

    if options.with_ == "ray":
        require_replicas()
    if out is None:
        sys.stdout.write(manifest.text(_flags(raw_options), options))
        return
    from phalanx.deploy.folder import write

    for path in write(*manifest.manifest(_flags(raw_options), options), out):
        print(path)


def compose(raw_options: RawOptions, options: ComposeOptions, out: Path | None) -> None:
    """Print the Compose file of a server: phalanx deploy compose MODEL --tp_size 4 > compose.yaml"""
    from phalanx.deploy import compose as manifest

    text = manifest.text(_flags(raw_options), options)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "compose.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"the folder {out} cannot be written", why=str(error), next="give another --out") from None
    print(out / "compose.yaml")


def _flags(raw_options: RawOptions) -> ServeFlags:
    return ServeFlags(build_options(EngineOptions, raw_options), build_options(ServeOptions, raw_options))


def _with_flags(verb: Verb, model: type[BaseModel]) -> Verb:
    """Give a verb the flags of the manifest's options; the verb gets them as one model."""

    def run(raw_options: RawOptions, out: Path | None = None, **values: Any) -> None:
        verb(raw_options, _build(model, {name: value for name, value in values.items() if value is not None}), out)

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("raw_options", kind, annotation=RawOptions), inspect.Parameter("out", kind, default=None, annotation=Out)
    ]  # fmt: skip
    parameters += [
        inspect.Parameter(name, kind, default=None, annotation=_annotation(name, field))
        for name, field in model.model_fields.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = verb.__name__, verb.__doc__
    return run


def _annotation(name: str, field: FieldInfo) -> Any:
    flag = f"--{name.rstrip('_')}"
    default = "" if field.default in (None, ()) else f" [default: {field.default}]"
    help_text = f"{field.description}{default}"
    if field.annotation is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no_{name}", help=help_text, show_default=False)]
    if field.default == ():
        return Annotated[list[str] | None, typer.Option(flag, help=help_text, metavar="TEXT", show_default=False)]
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    return Annotated[str | None, typer.Option(flag, help=help_text, metavar="|".join(choices) or "TEXT", show_default=False)]


def _build(model: type[BaseModel], values: dict[str, Any]) -> Any:
    if not issubclass(model, (K8sOptions, ComposeOptions)):
        raise OptionError(f"{model.__name__} is no model of a manifest")
    return model.of(**values)

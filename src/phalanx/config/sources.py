# SPDX-License-Identifier: Apache-2.0
"""Where options come from: file < environment < flags. This is the only reader of the environment.

A file is YAML: option -> value. A variable is PHALANX_<OPTION>, for example PHALANX_TENSOR_PARALLEL_SIZE=4. A flag is --<option>.
All three know the short names of `ALIASES`, and take `-` for `_`. What nobody knows is an error that names the nearest name.
(HF_HOME, HF_HUB_OFFLINE and their like are read by huggingface_hub itself.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from phalanx.config.options import EngineOptions, option_error, refuse_unknown
from phalanx.config.serving import ServeOptions
from phalanx.errors import LayoutError, OptionError, UnknownOption

ALIASES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "ep_size": "expert_parallel_size",
    "moe_ep_size": "moe_expert_parallel_size",
    "num_workers": "nnodes",
}
"""Short name -> option."""

PREFIX = "PHALANX_"
_SECRET = {"api_key"}

# A Kubernetes Service that is called "phalanx" puts these into every pod of its namespace; nobody asked for anything with them.
_SERVICE_LINKS = re.compile(r"PHALANX_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_PORT = re.compile(r"(tcp|udp|sctp)://")

Options = TypeVar("Options", bound=BaseModel)


@dataclass(frozen=True)
class RawOptions:
    """Options by name, and for each where it was said (for errors), for example "PHALANX_PORT"."""

    values: dict[str, Any]
    origins: dict[str, str]


def read_sources(flags: Mapping[str, Any], *, file: str | Path | None = None, environ: Mapping[str, str] | None = None) -> RawOptions:
    """Everything that was asked for, the strongest source winning. `flags` that are None were not given.

    Raises UnknownOption or OptionError naming the source.
    """
    known = {*EngineOptions.model_fields, *ServeOptions.model_fields}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    given = {name: value for name, value in flags.items() if value is not None}
    for source, names in (
        (_from_file(Path(file), known) if file is not None else {}, f"the file {file}"),
        (_from_environment(os.environ if environ is None else environ, known), PREFIX + "{upper}"),
        (_canonical(given, known, "flag", "--"), "--{name}"),
    ):
        for name, value in source.items():
            values[name] = value
            origins[name] = names.format(name=name, upper=name.upper()) if "{" in names else names
    return RawOptions(values, origins)


def build_options(options: type[Options], raw_options: RawOptions) -> Options:
    """The options of one model out of everything that was asked. Raises OptionError naming option, value and source."""
    mine = {name: value for name, value in raw_options.values.items() if name in options.model_fields}
    try:
        return options(**mine)
    except ValidationError as error:
        complaint = option_error(error)
        name = str(error.errors(include_url=False)[0]["loc"][0])
        if name in _SECRET:
            complaint = OptionError(f"this {name} cannot be used", why="a key is a text of at least one character")
        if name not in raw_options.origins:
            raise OptionError(
                f"{name} was not given", why="it has no default", next=f"give one: {options.model_fields[name].description}"
            ) from None
        raise OptionError(complaint.failure, held=f"by {raw_options.origins[name]}", why=complaint.why, next=complaint.next) from None


def long_option_name(name: str) -> str | None:
    """The option that a short name stands for, for errors where only long names are taken."""
    return ALIASES.get(name.replace("-", "_"))


@dataclass(frozen=True)
class Torchrun:
    """What torchrun tells each of the processes that it starts."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


def torchrun(environ: Mapping[str, str] | None = None) -> Torchrun | None:
    """None where torchrun did not start this process. Raises OptionError when what it said is not numbers."""
    found = os.environ if environ is None else environ
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    # RANK and its like are set by other tools too; only torchrun sets its own variables beside them.
    if "TORCHELASTIC_RUN_ID" not in found or not all(name in found for name in names):
        return None
    try:
        rank, world, local, port = (int(found[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    except ValueError as error:
        raise OptionError(
            "torchrun's variables were read", held=str(error), why=f"{', '.join(names)} say where a rank stands"
        ) from None
    return Torchrun(rank, world, local, found["MASTER_ADDR"], port)


def place_process(options: EngineOptions, environ: Mapping[str, str] | None = None) -> tuple[EngineOptions, int]:
    """The options of this process, and the first GPU that it may use.

    Under torchrun each process is a node of one rank; otherwise the options stand, and the GPU is 0. Raises LayoutError when
    torchrun started another number of processes than the layout has ranks.
    """
    run = torchrun(environ)
    if run is None or run.world_size == 1:
        return options, 0
    if run.world_size != options.world_size:
        raise LayoutError(
            f"torchrun started {run.world_size} processes", held=f"the layout has {options.world_size} ranks",
            why="each is one rank", next=f"start {options.world_size}, or choose sizes whose product is {run.world_size}",
        )  # fmt: skip
    # torchrun itself listens on MASTER_PORT.
    where = {"node_rank": run.rank, "master_addr": run.master_addr, "master_port": run.master_port + 1}
    return options.model_copy(update={"nnodes": run.world_size, **where}), run.local_rank


def differing_variables(wanted: Mapping[str, str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of these variables, those that the environment sets to something else, and to what."""
    found = os.environ if environ is None else environ
    return {name: found[name] for name, value in wanted.items() if found.get(name, value) != value}


def _from_file(path: Path, known: Iterable[str]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the options of {path} were asked for", why=str(error), next="name a readable YAML file") from None
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise OptionError(f"the options of {path} were asked for", why=" ".join(str(error).split())) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise OptionError(f"the options of {path} were asked for", why="the file must hold lines of the form option: value")
    return _canonical(content, known, f"option in {path}", "")


def _from_environment(environ: Mapping[str, str], known: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX) or _SERVICE_LINKS.fullmatch(name):
            continue
        if name == "PHALANX_PORT" and _SERVICE_PORT.match(value):
            continue
        found[name.removeprefix(PREFIX).lower()] = value
    return _canonical(found, known, "environment variable", PREFIX)


def _canonical(given: Mapping[str, Any], known: Iterable[str], what: str, prefix: str) -> dict[str, Any]:
    """Long names for short ones and `_` for `-`. Raises for what is unknown, and for one option that was given under two names."""
    names = sorted({*known, *ALIASES})
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for spelling, value in given.items():
        name = spelling.replace("-", "_")
        name = ALIASES.get(name, name)
        if prefix == PREFIX:
            _refuse_variable(name, names)
        else:
            refuse_unknown({name: value}, names, what=what)
        if name in found:
            raise OptionError(f"{what} {spelling!r} was given", held=f"{spelled[name]!r} was given too", why="both are one option")
        found[name], spelled[name] = value, spelling
    return found


def _refuse_variable(name: str, known: Iterable[str]) -> None:
    try:
        refuse_unknown({name.upper(): None}, [n.upper() for n in known], what="environment variable")
    except UnknownOption as error:
        hint = re.sub(r"'([A-Z_]+)'", rf"'{PREFIX}\1'", error.next)
        raise UnknownOption(f"environment variable {PREFIX}{name.upper()} is unknown", next=hint) from None


class _StrictLoader(yaml.SafeLoader):
    """A key that stands twice is an error, not a silent last word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

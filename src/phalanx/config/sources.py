# SPDX-License-Identifier: Apache-2.0
"""The sources of options: file < environment < flags. No other module reads the environment.

A file is YAML: option -> value. A variable is PHALANX_<OPTION>, for example PHALANX_TENSOR_PARALLEL_SIZE=4. A flag is --<option>.
All three take the short names of `ALIASES`, and `-` for `_`. An unknown name is an error that names the nearest known one.
(huggingface_hub itself reads HF_HOME, HF_HUB_OFFLINE and the like.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from phalanx.config.options import EngineOptions, option_error, refuse_unknown
from phalanx.config.serving import ServeOptions, bad_api_key
from phalanx.errors import LayoutError, OptionError
from phalanx.log import get_logger

logger = get_logger(__name__)

ALIASES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "ep_size": "expert_parallel_size",
    "moe_ep_size": "moe_expert_parallel_size",
    "dcp_size": "decode_context_parallel_size",
    "num_workers": "nnodes",
}
"""Short name -> option."""

PREFIX = "PHALANX_"
_SECRET = {"api_key"}

# Variables that Kubernetes sets in every pod beside a Service whose name is "phalanx" or begins with "phalanx-": no options.
_SERVICE_LINKS = re.compile(
    r"PHALANX_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_PORT = re.compile(r"PHALANX_([A-Z0-9_]+_)?PORT=(tcp|udp|sctp)://.*", re.DOTALL)

Options = TypeVar("Options", bound=BaseModel)


@dataclass(frozen=True)
class RawOptions:
    """Values of options by name, not yet validated. origins: where each value comes from, for errors: "PHALANX_PORT"."""

    values: dict[str, Any]
    origins: dict[str, str]


def read_sources(
    flags: Mapping[str, Any], *, file: str | Path | None = None, environ: Mapping[str, str] = os.environ
) -> RawOptions:
    """The options of all sources. Flags override the environment, which overrides the file. A flag of None was not given.

    Raises UnknownOption or OptionError naming the source.
    """
    known = {*EngineOptions.model_fields, *ServeOptions.model_fields}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    set_flags = {name: value for name, value in flags.items() if value is not None}
    for source, names in (
        (_from_file(Path(file), known) if file is not None else {}, f"the file {file}"),
        (_from_environment(environ, known), PREFIX + "{upper}"),
        (_canonical(set_flags, known, "flag", "--"), "--{name}"),
    ):
        for name, value in source.items():
            values[name] = value
            origins[name] = names.format(name=name, upper=name.upper()) if "{" in names else names
    return RawOptions(values, origins)


def build_options(options: type[Options], raw_options: RawOptions) -> Options:
    """Build one options model from the values that belong to it. Raises OptionError naming option, value and source."""
    values = {name: value for name, value in raw_options.values.items() if name in options.model_fields}
    try:
        return options(**values)
    except ValidationError as error:
        name = str(error.errors(include_url=False)[0]["loc"][0])
        problem = bad_api_key() if name in _SECRET else option_error(error)
        if name not in raw_options.origins:
            described = str(options.model_fields[name].description)
            raise OptionError(
                f"option {name} is missing",
                why="it has no default",
                next=f"give {described[:1].lower()}{described[1:].rstrip('.')}",
            ) from None
        origin = f"it comes from {raw_options.origins[name]}"
        raise OptionError(problem.failure, held=origin, why=problem.why, next=problem.next) from None


def client_api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The API key with which this process asks a server, of PHALANX_API_KEY or PHALANX_API_KEY_FILE. Raises OptionError."""
    names = {name: environ.get(PREFIX + name.upper()) or None for name in ("api_key", "api_key_file")}
    return next(iter(ServeOptions.of(**names).read_api_keys()), None)


def long_option_name(name: str) -> str | None:
    """The option that a short name stands for, for errors where only long names are allowed. None for any other name."""
    return ALIASES.get(name.replace("-", "_"))


@dataclass(frozen=True)
class Torchrun:
    """What torchrun tells each process that it starts."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


def torchrun(environ: Mapping[str, str] = os.environ) -> Torchrun | None:
    """None if torchrun did not start this process. Raises OptionError if its variables are not numbers."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    # Other tools set RANK and the like, too; only torchrun sets its own variables beside them.
    if "TORCHELASTIC_RUN_ID" not in environ or not all(name in environ for name in names):
        return None
    try:
        rank, world, local, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    except ValueError as error:
        raise OptionError(
            "an environment variable of torchrun is not a number", held=str(error), why=f"{', '.join(names)} place this rank"
        ) from None
    return Torchrun(rank, world, local, environ["MASTER_ADDR"], port)


def place_process(options: EngineOptions, environ: Mapping[str, str] = os.environ) -> tuple[EngineOptions, int]:
    """The options of this process, and the index of its first GPU.

    Under torchrun, each process is a node of one rank. Otherwise the options stay as they are, and the GPU is 0. Raises
    LayoutError if the number of processes that torchrun started is not the number of ranks of the layout. launcher="auto" becomes
    "ray" where one command on a host of a Ray cluster asks for several hosts.
    """
    run = torchrun(environ)
    if run is None or run.world_size == 1:
        return _choose_launcher(options, environ), 0
    if run.world_size != options.world_size:
        raise LayoutError(
            f"torchrun started {run.world_size} processes", held=f"the layout has {options.world_size} ranks",
            why="each process is one rank", next=f"start {options.world_size}, or choose sizes whose product is {run.world_size}",
        )  # fmt: skip
    # torchrun itself listens on MASTER_PORT.
    address = {"node_rank": run.rank, "master_addr": run.master_addr, "master_port": run.master_port + 1}
    return options.model_copy(update={"nnodes": run.world_size, **address}), run.local_rank


def _choose_launcher(options: EngineOptions, environ: Mapping[str, str]) -> EngineOptions:
    """With launcher "auto": Ray's where it is meant, else the options as they are."""
    default = EngineOptions.model_fields["master_addr"].default
    if options.launcher != "auto" or options.nnodes == 1 or options.node_rank > 0 or options.master_addr != default:
        return options
    address = ray_address(environ)
    if address is None:
        return options
    logger.info("launcher = ray: this host belongs to the Ray cluster at %s, and nnodes is %d", address, options.nnodes)
    return options.model_copy(update={"launcher": "ray"})


def ray_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """The Ray cluster that this host belongs to: RAY_ADDRESS, else what `ray start` wrote on this host; None without one."""
    if environ.get("RAY_ADDRESS", "auto") not in ("", "auto"):
        return environ["RAY_ADDRESS"]
    folder = Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp")
    try:
        return (folder / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


PASSED_ON = (
    "CUDA_", "FLASHINFER_", "GLOO_", "HF_", "HUGGING_FACE_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TOKENIZERS_", "TORCH",
    "TRITON_", "UCX_",
)  # fmt: skip
"""Beginnings of the variables that ranks on other hosts get from the host of the command."""
_OF_THE_HOST = {"CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"}
_FORCED_BY_RAY = {"OMP_NUM_THREADS"}


def variables_to_pass_on(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process that its ranks on other hosts get, too; none that describes this host, and no option.

    (A token of the Hub is passed on: the other hosts download the model with it.)
    """
    return {name: value for name, value in environ.items() if name.startswith(PASSED_ON) and name not in _OF_THE_HOST}


def adopt_variables(passed: Mapping[str, str], environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set the variables that another host passed on, in the process of a Ray actor: its children inherit them. Returns those that
    this host sets to another value, with that value: this host's own value stays, since an interface may have another name here.

    Ray itself sets OMP_NUM_THREADS in each actor, for one core: it is replaced, or removed where nothing is passed on.
    """
    for name in _FORCED_BY_RAY - passed.keys():
        environ.pop(name, None)
    differing = {}
    for name, value in passed.items():
        if name in _FORCED_BY_RAY:
            environ[name] = value
        elif environ.setdefault(name, value) != value:
            differing[name] = environ[name]
    return differing


def differing_variables(wanted: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of `wanted` that the environment sets to another value, with that value."""
    return {name: environ[name] for name, value in wanted.items() if environ.get(name, value) != value}


def _from_file(path: Path, known: Iterable[str]) -> dict[str, Any]:
    from phalanx.config import options_file  # and the YAML parser

    return _canonical(options_file.read(path), known, f"option in {path}", "")


def _from_environment(environ: Mapping[str, str], known: Iterable[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX) or is_service_link(name, value):
            continue
        options[name.removeprefix(PREFIX).lower()] = value
    return _canonical(options, known, "environment variable", PREFIX)


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes has set a variable for a Service whose name begins with "phalanx": it is no option."""
    return bool(_SERVICE_LINKS.fullmatch(name) or _SERVICE_PORT.fullmatch(f"{name}={value}"))


def variables_that(fit: Callable[[str, str], bool]) -> dict[str, str]:
    """The variables of this process that a condition on name and value fits."""
    return {name: value for name, value in os.environ.items() if fit(name, value)}


def _canonical(values: Mapping[str, Any], known: Iterable[str], what: str, prefix: str) -> dict[str, Any]:
    """Replace short names by long ones and `-` by `_`. Raises for unknown names, and for one option given under two names."""
    names = sorted({*known, *ALIASES})
    options: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for spelling, value in values.items():
        name = spelling.replace("-", "_")
        name = ALIASES.get(name, name)
        refuse_unknown({name: value}, names, what=what, spell=_variable if prefix == PREFIX else repr)
        if name in options:
            raise OptionError(
                f"{what} {spelling!r} repeats {spellings[name]!r}", why="both are one option", next="give one of them"
            )
        options[name], spellings[name] = value, spelling
    return options


def _variable(name: str) -> str:
    return PREFIX + name.upper()

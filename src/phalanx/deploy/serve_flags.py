# SPDX-License-Identifier: Apache-2.0
"""The server's options as the arguments of a container, and back. What a manifest sets itself, or cannot carry, is an error."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from phalanx.config import EngineOptions
from phalanx.config.model import ModelShape
from phalanx.config.resolve import require_one_host
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import RawOptions, build_options
from phalanx.errors import OptionError
from phalanx.executor.launcher import host_ranks
from phalanx.layout import Layout
from phalanx.layout.families import known
from phalanx.layout.layout import require_suits

MODELS_MOUNT = "/models"
"""Where checkpoints of a claim or of the host are mounted, read-only."""
CACHE = "/cache"
KERNELS = f"{CACHE}/kernels"

_OF_MANIFEST = {
    "host": "a container listens at every address of its own",
    "node_rank": "each pod has its own",
    "master_addr": "it is the address of the first pod of a group",
    "master_addr_timeout": "it is start_timeout: the name of a pod is published late",
    "launcher": "the manifest chooses it",
    "kernel_cache_dir": f"it is {KERNELS}, in the volume of the cache",
}
_SECRETS = {
    "api_key": ("the key would stand in the manifest", "create a Secret or a file, and name that"),
    "api_key_file": ("it is a file of this machine", "create a Secret or name the file by the manifest's own option"),
    "cluster_token": ("the token would stand in the manifest", "create a Secret and give --cluster_token_secret NAME"),
    "cluster_token_file": (
        "it is a file of this machine",
        "kubectl create secret generic NAME --from-file=cluster-token=FILE, and give --cluster_token_secret NAME",
    ),
}
_LOWEST_PORT = 1024
LONGEST_SECONDS = 86400
"""Of a time that becomes a field of a manifest: a day."""


class ServeFlags(NamedTuple):
    """The options of a server, as a user gives them."""

    engine: EngineOptions
    serving: ServeOptions


def require_portable(flags: ServeFlags, *, folder: bool) -> None:
    """Raise OptionError or LayoutError for options that no container can run with. folder: MODEL lies in a mounted folder."""
    engine, serving = flags
    for name in (*_OF_MANIFEST, *_SECRETS):
        value = getattr(engine if name in EngineOptions.model_fields else serving, name)
        model = EngineOptions if name in EngineOptions.model_fields else ServeOptions
        if value != model.model_fields[name].default:
            why, cure = _SECRETS.get(name, (_OF_MANIFEST.get(name, ""), "leave it out"))
            raise OptionError(f"{name} cannot be an option of a manifest", why=why, next=cure)
    if engine.plan != "off":
        raise OptionError(
            f"plan={engine.plan!r} cannot be an option of a manifest", why="the number of GPUs must be known before a pod runs",
            next="run phalanx plan MODEL --gpu GPU, and give the sizes that it chooses",
        )  # fmt: skip
    require_one_host(engine)
    if engine.skip_tokenizer_init:
        raise OptionError("skip_tokenizer_init is not possible here", why="a server reads and writes text", next="remove it")
    for name, seconds in (("shutdown_timeout", serving.shutdown_timeout), ("start_timeout", engine.start_timeout)):
        if seconds > LONGEST_SECONDS:
            raise OptionError(f"{name}={seconds:g} is too long for a manifest", next=f"give at most {LONGEST_SECONDS}")
    _require_ports(flags)
    _require_model(engine.model, folder=folder)
    if engine.tokenizer is not None and (local := _local(engine.tokenizer)) and not (folder and _mounted(engine.tokenizer)):
        raise OptionError(
            f"tokenizer={engine.tokenizer!r} is not in the container",
            why=local,
            next=f"give a Hub id, or a path below {MODELS_MOUNT}",
        )
    if serving.chat_template is not None and "{" not in serving.chat_template and not (folder and _mounted(serving.chat_template)):
        raise OptionError(
            f"chat_template={serving.chat_template!r} is not in the container", why="it names a file of this machine",
            next=f'give the template itself, as --chat_template "$(cat FILE)", or a path below {MODELS_MOUNT}',
        )  # fmt: skip
    for options in flags:
        for name, value in options:
            if isinstance(value, str) and "\0" in value:
                raise OptionError(f"{name} has a NUL character", why="no argument of a process can carry it")
    host_ranks(engine, 0)
    config = known(engine.model)
    if config is not None:
        require_suits(Layout.of(engine), ModelShape.from_config(config, file=f"config.json of {engine.model}"))


def _require_ports(flags: ServeFlags) -> None:
    engine, port = flags.engine, flags.serving.port
    if port < _LOWEST_PORT:
        raise OptionError(
            f"port={port} cannot be used in a container", why="it does not run as root", next=f"give {_LOWEST_PORT} or more"
        )
    if engine.nnodes == 1:
        return
    if engine.master_port < _LOWEST_PORT:
        raise OptionError(f"master_port={engine.master_port} cannot be used in a container", next=f"give {_LOWEST_PORT} to 65535")
    if port == engine.master_port:
        raise OptionError(f"port={port} is also the port of the ranks", next="give another --port or --master_port")


def _require_model(model: str, *, folder: bool) -> None:
    if model.startswith("-"):
        raise OptionError(f"model {model!r} begins with '-'", why="the server would take it for a flag")
    if folder:
        parts = model.split("/")
        if model == "demo" or model.startswith(("/", "~")) or any(part in ("", ".", "..") for part in parts):
            raise OptionError(
                f"model {model!r} is no folder below the mounted one",
                why=f"the claim or folder of the host is {MODELS_MOUNT} there",
                next="give the path inside it, without a leading '/'",
            )  # fmt: skip
        return
    if why := _local(model):
        raise OptionError(
            f"model {model!r} is not in the container", why=why,
            next="mount the folder that has it (--model_claim, --model_host_path, --model_path), and give the path inside it",
        )  # fmt: skip


def _local(path: str) -> str:
    """Why a path names a folder of this machine; "" for a Hub id."""
    if path.startswith(("/", ".", "~")):
        return "it is a path of this machine"
    return "" if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) else "it is no Hub id"


def _mounted(path: str) -> bool:
    return path.startswith(f"{MODELS_MOUNT}/") and ".." not in path.split("/")


def arguments(flags: ServeFlags, *, folder: bool, own: dict[str, str]) -> list[str]:
    """The arguments of `phalanx serve`: the model, what the manifest sets (own, by option), then the options that are not at their
    default, in the order of the option models. `$` is doubled, since Kubernetes and Compose replace variables in arguments."""
    model = f"{MODELS_MOUNT}/{flags.engine.model}" if folder else flags.engine.model
    words = [escaped(model), *(f"--{name}={value}" for name, value in own.items())]
    for options in flags:
        for name, field in type(options).model_fields.items():
            value = getattr(options, name)
            if name != "model" and value != field.default:
                words.append(_flag(name, value))
    return words


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name}={escaped(repr(value) if isinstance(value, float) else str(value))}"


def read_arguments(words: list[str]) -> ServeFlags:
    """The options of `arguments`. Raises OptionError for arguments that it does not write."""
    if not words:
        raise OptionError("the container has no arguments", why="the first one is the model")
    values: dict[str, Any] = {"model": words[0].replace("$$", "$")}
    for word in words[1:]:
        flag = re.fullmatch(r"--(\w+)(?:=(.*))?", word, re.S)
        if flag is None:
            raise OptionError(f"the argument {word!r} is not understood", next="write it as --option=value")
        name, text = flag.groups()
        if text is None:
            values[name.removeprefix("no_")] = not name.startswith("no_")
        else:
            values[name] = text.replace("$$", "$")
    for name in values:
        if name not in EngineOptions.model_fields and name not in ServeOptions.model_fields:
            raise OptionError(f"the argument --{name} is no option of the server")
    raw = RawOptions(values, dict.fromkeys(values, "the arguments of the container"))
    return ServeFlags(build_options(EngineOptions, raw), build_options(ServeOptions, raw))


def escaped(text: str) -> str:
    return text.replace("$", "$$")

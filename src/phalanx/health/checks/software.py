# SPDX-License-Identifier: Apache-2.0
"""Installed libraries, environment variables and caches."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from phalanx.config.home import temporary_home, without_home
from phalanx.health.check import Finding, check, error, note, ok, warning
from phalanx.health.subject import Subject


@check(
    why="another program's upgrade in the same environment replaces torch or transformers: import errors, or an "
    "unknown tokenizer class",
    cure="install the versions that Phalanx names",
    threads=("vllm-project/vllm/issues/7074", "vllm-project/vllm/issues/12670"),
    symptoms=(r"ImportError", r"ModuleNotFoundError", r"AttributeError: module", r"[Tt]okenizer class", r"undefined symbol"),
    fine="the installed libraries are those that Phalanx needs",
)
def library_versions(subject: Subject) -> Iterator[Finding]:
    """versions of the installed libraries"""
    for requirement in requires("phalanx") or []:
        text, _, marker = requirement.partition(";")
        if "extra" in marker or "platform" in marker:
            continue
        name = re.split(r"[\[<>=!~ ]", text, maxsplit=1)[0]
        bounds = re.findall(r"(>=|<=|<|>|==)\s*([\d.]+)", text)
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield error(f"{name} is not installed", "install what Phalanx needs", f"pip install '{text.strip()}'")
            continue
        if not all(_holds(installed, sign, bound) for sign, bound in bounds):
            yield error(
                f"{name} {installed} is installed, and {text.strip()} is needed", "install it", f"pip install '{text.strip()}'"
            )
    written = _written_by(subject)
    if written and not _holds(version("transformers"), ">=", written):
        summary = f"the checkpoint was written by transformers {written}, and {version('transformers')} is installed"
        yield note(summary, "upgrade transformers where its tokenizer fails to load", f"pip install 'transformers>={written}'")


def _written_by(subject: Subject) -> str | None:
    """The version of transformers that wrote the checkpoint."""
    folder = subject.folder
    if folder is None:
        return None
    try:
        text = json.loads((folder / "config.json").read_text()).get("transformers_version")
    except (OSError, ValueError):
        return None
    return text if isinstance(text, str) and re.fullmatch(r"[\d.]+", text) else None


def _holds(installed: str, sign: str, bound: str) -> bool:
    a, b = _numbers(installed), _numbers(bound)
    width = max(len(a), len(b))
    a, b = a + [0] * (width - len(a)), b + [0] * (width - len(b))
    return {">=": a >= b, "<=": a <= b, "<": a < b, ">": a > b, "==": a == b}[sign]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.match(r"[\d.]*", text)[0].strip(".").split(".") if part]  # type: ignore[index]


SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": ("1", "waits for every kernel: steps get several times slower"),
    "NCCL_P2P_DISABLE": ("1", "sends what GPUs exchange through host memory: TP gets several times slower"),
    "NCCL_SHM_DISABLE": ("1", "sends what ranks of one host exchange over the network"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "checks every collective on all ranks: steps get slower"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "waits for every collective on the host, and excludes CUDA graphs"),
}
LOUD_VARIABLES = {"NCCL_DEBUG": ("INFO", "TRACE")}
PINNED_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO")


@check(
    why="a stopgap of another day, such as NCCL_P2P_DISABLE=1, stays in a profile or an image and makes TP slow",
    cure="unset what is not needed",
    threads=("vllm-project/vllm/issues/5484", "NVIDIA/nccl/issues/631"),
    fine="no variable slows collectives",
)
def variables(subject: Subject) -> Iterator[Finding]:
    """variables of NCCL, torch and CUDA"""
    environment = subject.host.environment
    for name, (value, effect) in SLOW_VARIABLES.items():
        if environment.get(name) == value:
            yield warning(
                f"{name}={value} {effect}", f"unset {name}, unless it works around a fault of this machine", f"unset {name}"
            )
    several_hosts = subject.options is not None and subject.options.nnodes > 1
    if environment.get("NCCL_IB_DISABLE") == "1" and several_hosts and subject.host.rdma_devices:
        summary = f"NCCL_IB_DISABLE=1 keeps NCCL off {', '.join(subject.host.rdma_devices)}: hosts exchange data over TCP"
        yield warning(summary, "unset it", "unset NCCL_IB_DISABLE")
    for name in PINNED_VARIABLES:
        if environment.get(name):
            yield note(f"{name}={environment[name]} pins NCCL's own choice", f"unset {name} where it was set for another machine")
    for name, values in LOUD_VARIABLES.items():
        if environment.get(name) in values:
            yield note(f"{name}={environment[name]} writes a log line for each communicator", f"unset {name} in production")


@check(
    why="containers run as another user, or mount the cache read-only: "
    "'Permission denied' or 'Read-only file system' at the first download or kernel",
    cure="name a folder that can be written",
    threads=("kserve/kserve/issues/3562", "huggingface/huggingface_hub/issues/4304"),
    symptoms=(r"Permission denied", r"Read-only file system", r"PermissionError", r"cannot be written"),
)
def cache_writable(subject: Subject) -> list[Finding]:
    """whether the model cache and the kernel cache can be written"""
    environment = subject.host.environment
    folders = {"HF_HOME": subject.hub_cache}
    if subject.options is not None and subject.options.kernel_cache_dir:
        folders["--kernel_cache_dir"] = Path(subject.options.kernel_cache_dir).expanduser()
    elif subject.on_gpu:
        folders["TRITON_CACHE_DIR"] = Path(environment.get("TRITON_CACHE_DIR") or "~/.triton/cache").expanduser()
    findings = []
    for name, folder in folders.items():
        failure = _unwritable(folder)
        if failure is None:
            continue
        needed = name != "HF_HOME" or (subject.options is not None and subject.folder is None)
        summary = f"{folder} cannot be written: {failure}"
        cure, command = f"name a folder that this user may write as {name}", _cache_command(name)
        findings.append(error(summary, cure, command) if needed else note(f"{summary}; the model needs no download", cure, command))
    return findings or [ok(f"{', '.join(str(folder) for folder in folders.values())} can be written")]


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written there, or in the nearest folder above that exists; None where it can."""
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as failure:
        return failure.strerror or str(failure)
    return None


def _cache_command(name: str) -> str:
    return (
        f"phalanx serve ... {name} /path/that/can/be/written"
        if name.startswith("--")
        else f"export {name}=/path/that/can/be/written"
    )


@check(
    why="a pod may run as any uid: libraries then find neither HOME nor the user's name, and end in a traceback",
    cure="set HOME to a folder that this user may write",
    threads=("vllm-project/vllm/issues/12670", "kserve/kserve/issues/3562"),
    symptoms=(r"home directory", r"getpwuid", r"uid not found"),
)
def home_folder(subject: Subject) -> Finding:
    """whether this user has a home folder"""
    home = subject.host.environment.get("HOME", "")
    if home and Path(home) != temporary_home() and not home.startswith(f"{temporary_home()}-"):
        return ok(f"HOME is {home}")
    if not home and not without_home({}):
        return ok("the users' list names a home folder")
    return warning(
        f"user {os.getuid()} has no home folder: {home or temporary_home()} is used, and lost with the container",
        "set HOME to a folder that stays", "export HOME=/path/that/stays",
    )  # fmt: skip

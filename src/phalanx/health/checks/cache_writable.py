# SPDX-License-Identifier: Apache-2.0
"""Whether the folders that keep models and kernels can be written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from phalanx.health.check import Check, Finding, error, note, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    environment = subject.host.environment
    folders = {"HF_HOME": subject.hub_cache}
    if subject.options is not None and subject.options.kernel_cache_dir:
        folders["--kernel_cache_dir"] = Path(subject.options.kernel_cache_dir).expanduser()
    elif subject.on_gpu:
        folders["TRITON_CACHE_DIR"] = Path(environment.get("TRITON_CACHE_DIR", "~/.triton/cache")).expanduser()
    findings = []
    for name, folder in folders.items():
        failure = _failure(folder)
        if failure is None:
            continue
        needed = name != "HF_HOME" or (subject.options is not None and subject.folder is None)
        summary = f"{folder} cannot be written: {failure}"
        cure, command = f"name a folder that this user may write as {name}", _command(name)
        findings.append(error(summary, cure, command) if needed else note(f"{summary}; the model needs no download", cure, command))
    return findings or [ok(f"{', '.join(str(folder) for folder in folders.values())} can be written")]


def _failure(folder: Path) -> str | None:
    """Why nothing can be written there, or in the nearest folder above that exists; None where it can."""
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as failure:
        return failure.strerror or str(failure)
    return None


def _command(name: str) -> str:
    return (
        f"phalanx serve ... {name} /path/that/can/be/written"
        if name.startswith("--")
        else f"export {name}=/path/that/can/be/written"
    )


CHECK = Check(
    name="cache_writable",
    what="whether the model cache and the kernel cache can be written",
    why="containers run as another user, or mount the cache read-only: "
    "'Permission denied' or 'Read-only file system' at the first download or kernel",
    cure="name a folder that can be written",
    threads=("https://github.com/kserve/kserve/issues/3562", "https://github.com/huggingface/huggingface_hub/issues/4304"),
    examine=examine,
    symptoms=(r"Permission denied", r"Read-only file system", r"PermissionError", r"cannot be written"),
)

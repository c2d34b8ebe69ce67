# SPDX-License-Identifier: Apache-2.0
"""Whether the model cache and the folder of temporary files have space."""

from __future__ import annotations

import tempfile
from pathlib import Path

from phalanx.health.check import Check, Finding, error, ok, size
from phalanx.health.subject import Subject
from phalanx.plan.weight_tensors import layer_bytes

LEAST = 512 << 20
"""Kernels, sockets, and a log."""


def examine(subject: Subject) -> list[Finding]:
    findings = []
    cache = _existing(subject.hub_cache)
    need = LEAST
    if subject.options is not None and subject.config is None and subject.folder is None and subject.model_shape is not None:
        layers, embedding, head = layer_bytes(subject.model_shape, "bf16")
        need += sum(layers) + embedding + head
    places = {"the model cache": (cache, need), "the folder of temporary files": (Path(tempfile.gettempdir()), 64 << 20)}
    for what, (folder, wanted) in places.items():
        space = subject.host.space(folder)
        if space.free < wanted:
            cure = (
                "free space, or name a larger disk as HF_HOME"
                if "cache" in what
                else "free space, or name another folder as TMPDIR"
            )
            command = "export HF_HOME=/path/on/a/larger/disk" if "cache" in what else "export TMPDIR=/path/on/a/larger/disk"
            summary = f"{what}, {folder}, has {size(space.free)} free, and {size(wanted)} are needed"
            findings.append(
                error(summary, cure, f"du -xh --max-depth=2 {folder} | sort -h | tail", command, free=space.free, need=wanted)
            )
    return findings or [ok(f"the model cache has {size(subject.host.space(cache).free)} free")]


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return folder if folder.exists() or folder.parent == folder else _existing(folder.parent)


CHECK = Check(
    name="disk_space",
    what="free bytes of the model cache and of the folder of temporary files",
    why="a download or a compiled kernel ends with 'No space left on device'",
    cure="free space, or move HF_HOME or TMPDIR",
    threads=("https://github.com/huggingface/huggingface_hub/issues/4304",),
    examine=examine,
    symptoms=(r"No space left", r"ENOSPC", r"[Dd]isk quota"),
)

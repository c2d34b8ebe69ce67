# SPDX-License-Identifier: Apache-2.0
"""Whether the checkpoint is complete."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.health.check import Check, Finding, Need, error, note, ok, size
from phalanx.health.subject import Subject

_HEADER_LIMIT = 100 << 20


def examine(subject: Subject) -> Finding:
    assert subject.options is not None
    folder, shape = subject.folder, subject.shape
    if isinstance(shape, PhalanxError):
        return error(f"the model cannot be used: {shape}", shape.next or "name another checkpoint")
    if subject.config is not None:
        return ok(f"{subject.options.model} is a published shape, with dummy weights")
    if folder is None:
        if subject.host.environment.get("HF_HUB_OFFLINE", "0") not in ("", "0", "false", "no"):
            command = f"HF_HUB_OFFLINE=0 hf download {subject.options.model}"
            return error(
                f"{subject.options.model} is not on this host, and HF_HUB_OFFLINE forbids to download it",
                "download it first",
                command,
            )
        return note(f"{subject.options.model} is not on this host yet: the start downloads it")
    if subject.options.load_format == "dummy":
        return ok(f"{folder} is read for its config alone (dummy weights)")
    return _weights(folder, subject.options.model)


def _weights(folder: Path, model: str) -> Finding:
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    again = f"hf download {model} --force-download" if "/" in model and not Path(model).exists() else f"ls -l {folder}"
    if index.is_file():
        try:
            named = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
            return error(f"{index.name} cannot be read: {type(failure).__name__}: {failure}", "copy or download it again", again)
        # The index comes from whoever wrote the checkpoint: a path could lead to any file of this host.
        outside = [name for name in named if Path(name).name != name or not name.endswith(".safetensors")]
        if outside:
            return error(
                f"{index.name} names {outside[0]!r}, which is no *.safetensors file of its folder",
                "do not use this checkpoint unless you know where it comes from",
            )
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            return error(
                f"{len(missing)} of {len(named)} weight files are missing: {', '.join(missing[:3])}",
                "copy or download them again",
                again,
            )
        files = [folder / name for name in named]
    if not files:
        return error(f"{folder} has no .safetensors file", "name a checkpoint in the safetensors format", again)
    for file in files:
        damage = _damage(file)
        if damage:
            return error(f"{file.name} is damaged: {damage}", "copy or download it again", again)
    return ok(f"{len(files)} weight files, {size(sum(file.stat().st_size for file in files))}")


def _damage(file: Path) -> str | None:
    """What is wrong with a safetensors file by its header and its length; None for nothing."""
    length = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            return f"it has {length} bytes"
        (header,) = struct.unpack("<Q", head)
        if header > min(length - 8, _HEADER_LIMIT):
            return "its header is cut off, or it is a pointer of Git LFS"
        try:
            tensors = json.loads(stream.read(header))
        except ValueError:
            return "its header is no JSON"
    try:
        end = max((int(entry["data_offsets"][1]) for name, entry in tensors.items() if name != "__metadata__"), default=0)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return "its header describes no tensors"
    return None if 8 + header + end == length else f"it has {length} bytes, and its header promises {8 + header + end}"


CHECK = Check(
    name="model_files",
    what="config.json, and the lengths of the weight files",
    why="an interrupted download or a full disk leaves files that are cut off, which fails minutes into the start",
    cure="download the checkpoint again",
    threads=("https://github.com/QwenLM/Qwen3-VL/issues/264", "https://github.com/gpustack/gpustack/issues/815"),
    examine=examine,
    needs=(Need.MODEL,),
    symptoms=(
        r"safetensors",
        r"config\.json",
        r"\.safetensors",
        r"incomplete",
        r"no such folder",
        r"there is no folder",
        r"truncated",
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""The model's files, its layout and its time limits."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from phalanx.config.locate import may_be_hub_id
from phalanx.config.quantization import loaded_as, on_load
from phalanx.config.resolve import resolve
from phalanx.errors import PhalanxError
from phalanx.health.check import Finding, Need, check, error, note, ok, size, skipped, warning
from phalanx.health.subject import Subject
from phalanx.layout.layout import Layout, require_suits
from phalanx.layout.weights import weight_bytes

HEADER_LIMIT = 100 << 20


@check(
    why="an interrupted download or a full disk leaves files that are cut off, which fails minutes into the start",
    cure="download the checkpoint again",
    threads=("QwenLM/Qwen3-VL/issues/264", "gpustack/gpustack/issues/815"),
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
def model_files(subject: Subject) -> Finding:
    """config.json, and the lengths of the weight files"""
    assert subject.options is not None
    folder, shape = subject.folder, subject.shape
    if isinstance(shape, PhalanxError):
        return error(f"the model cannot be used: {shape}", shape.next or "name another checkpoint")
    if subject.config is not None:
        return ok(f"{subject.options.model} is a published shape, with dummy weights")
    if folder is None:
        if not may_be_hub_id(subject.options.model):
            return error(
                f"there is no folder {subject.options.model}", "give a folder with a checkpoint, or a Hub id such as org/name"
            )
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
    if index.is_file() and not (folder / "model.safetensors").is_file():  # which counts before the index
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
    dangling = [file.name for file in files if not file.is_file()]
    if dangling:
        summary = f"{len(dangling)} of {len(files)} weight files are links to nothing: {', '.join(dangling[:3])}"
        return error(summary, "copy or download them again", again)
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
        if header > min(length - 8, HEADER_LIMIT):
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


@check(
    why="heads that do not divide, more stages than layers, or a length beyond the model's end a start at once",
    cure="use sizes that divide",
    threads=("vllm-project/vllm/issues/1435", "vllm-project/vllm/issues/367"),
    needs=(Need.MODEL,),
    symptoms=(r"divide", r"parallel_size", r"max_seq_len", r"layers", r"nnodes"),
)
def layout(subject: Subject) -> Finding:
    """the model's sizes against the layout"""
    options, shape = subject.options, subject.model_shape
    assert options is not None
    if shape is None:
        return skipped("the model's shape is not known on this host")
    ranks = subject.ranks_here
    try:
        require_suits(Layout.of(options), shape)
        resolve(options, shape, max(ranks, len(subject.devices.gpus)) if subject.on_gpu else 0)
    except PhalanxError as failure:
        return error(str(failure), failure.next or "choose other sizes")
    old = [gpu for gpu in subject.gpus_in_use if gpu.sm < 89]
    quantization = loaded_as(shape.quantization, on_load(options.dtype))
    if quantization is not None and quantization.stored == "FP8" and old:
        return note(
            f"{old[0].name} has no FP8 arithmetic: weights take one byte, and GEMMs compute in 16 bit",
            "use dtype='bf16' where memory suffices",
        )
    ep = f", ep {options.expert_parallel_size}" if options.expert_parallel_size > 1 else ""
    return ok(f"{ranks} ranks on this host, tp {options.tensor_parallel_size}, pp {options.pipeline_parallel_size}{ep}")


SLOW_DISK = 200e6
"""Bytes per second of a network disk, by which a load is bounded from above."""


@check(
    why="survivors of a lost rank wait ten minutes in a collective where nothing ends it earlier",
    cure="keep stall_timeout well below step_timeout",
    threads=("sgl-project/sglang/issues/3932", "sgl-project/sglang/issues/3784", "sgl-project/sglang/issues/10216"),
    needs=(Need.MODEL,),
    symptoms=(r"s to start", r"start_timeout", r"step_timeout", r"stands still"),
)
def timeouts(subject: Subject) -> list[Finding]:
    """stall_timeout, step_timeout and start_timeout"""
    options = subject.options
    assert options is not None
    findings = []
    if options.stall_timeout >= options.step_timeout:
        findings.append(
            warning(
                f"stall_timeout={options.stall_timeout:g} is not below step_timeout={options.step_timeout:g}: a step that hangs is"
                " reported late, and without its rank's name",
                "use a stall_timeout below step_timeout",
                f"phalanx serve ... --stall_timeout {options.step_timeout / 3:g}",
            )
        )
    shape = subject.model_shape
    if shape is not None and options.load_format != "dummy":
        (total,) = weight_bytes(shape, "bf16", Layout())
        seconds = total / SLOW_DISK
        if seconds > options.start_timeout:
            findings.append(
                note(
                    f"{total / 1e9:.0f} GB of weights take {seconds:.0f} s from a disk of {SLOW_DISK / 1e6:.0f} MB/s, and"
                    f" start_timeout is {options.start_timeout:g} s",
                    "raise it where the checkpoint lies on a network disk",
                    f"phalanx serve ... --start_timeout {2 * seconds:.0f}",
                )
            )
    return findings or [ok(f"a hang is named after {options.stall_timeout:g} s, and a start may take {options.start_timeout:g} s")]

# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a checkpoint: which file has which tensor, and reading a part of one. Every error names its file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.errors import WeightError
from phalanx.models.slices import Scale, Slice, Stacked

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

_READ_DTYPES = ("F64", "F32", "F16", "BF16")
_FP8 = "F8_E4M3"
_MXFP4 = "U8"

_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")
"""Buffers that old versions of transformers saved with the weights; config.json implies them."""


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> its file, by the index, else by the contents of model.safetensors, else of every *.safetensors.

    Raises WeightError for a folder without weights, a faulty index, a missing file that the index names, and a tensor in two files.
    """
    index = folder / INDEX
    if index.exists():
        return _by_index(index)
    files = [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))
    # Mistral ships a second copy in its own format under this name.
    files = [file for file in files if not file.name.startswith("consolidated")]
    if not files:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        raise WeightError(
            f"{folder} holds no *.safetensors", held=f"the folder holds {', '.join(others)}" if others else "",
            why="weights are read from safetensors only", next="convert the checkpoint, or download its safetensors",
        )  # fmt: skip
    located: dict[str, Path] = {}
    for file in files:
        with opened(file) as reader:
            for name in reader.keys():  # noqa: SIM118, a reader is no mapping
                if name in located:
                    raise WeightError(f"{name} is in {located[name].name} and in {file.name}", held=f"folder {folder}")
                located[name] = file
    return located


def _by_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        located = {str(name): index.parent / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{index} cannot be read", why=f"{type(error).__name__}: {error}", next="download it again") from None
    for file in sorted(set(map(str, weight_map.values()))):
        # The index comes from whoever wrote the checkpoint: a path could lead to any file of this host.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightError(
                f"{index} names {file!r}, which is no *.safetensors file of its folder", why="an index may name plain files only",
                next="do not use this checkpoint unless you know where it comes from",
            )  # fmt: skip
    for file in sorted(set(located.values())):
        if not file.is_file():
            missing = [name for name, path in located.items() if path == file]
            raise WeightError(
                f"{index.name} names {file.name}", held=f"{index.parent} does not hold it",
                why=f"{len(missing)} tensors are there, {missing[0]} among them", next="download the checkpoint again",
            )  # fmt: skip
    return located


def require_known(located: dict[str, Path], known: Collection[str], *, tied_head: str | None) -> None:
    """Raise WeightError for a tensor that the model does not have. A tied LM head may be stored a second time."""
    unknown = [name for name in located if name not in known and name != tied_head and not _IGNORED.search(name)]
    if unknown:
        raise WeightError(
            f"{located[unknown[0]]} holds {unknown[0]}"
            + (f" and {len(unknown) - 1} more tensors" if len(unknown) > 1 else ""),
            why="the model that config.json describes has no such tensor", next="check that config.json belongs to these weights",
        )  # fmt: skip


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors reader. Any error of the file, now or while it is read, becomes a WeightError that names the file."""
    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            yield reader
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.exists() else 0
        raise WeightError(
            f"{file} cannot be read", held=f"it has {size:,} bytes", why=f"{error}; it is truncated or damaged",
            next="download it again",
        ) from None  # fmt: skip


def read(reader: Any, part: Slice, file: Path, stacked: Stacked | None = None) -> Tensor:
    """The slice's values in the dtype of the file. stacked: they are read from there. Raises WeightError where the
    stored tensor contradicts config.json."""
    name, expected = (part.name, part.shape) if stacked is None else (stacked.name, stacked.shape)
    stored = reader.get_slice(name)
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if shape != expected:
        raise WeightError(
            f"{name} in {file} has shape {list(shape)}", held=f"config.json implies {list(expected)}",
            why="the two contradict each other", next="check that config.json belongs to these weights",
        )  # fmt: skip
    in_fp8 = part.dequantize is not None or (part.target.dtype == torch.float8_e4m3fn and part.scale is None)
    readable = (_FP8,) if in_fp8 else (_MXFP4,) if part.target.dtype == torch.uint8 else _READ_DTYPES
    if dtype not in readable:
        raise WeightError(
            f"{name} in {file} has dtype {dtype}", held=f"read here: {', '.join(readable)}",
            why="by its quantization_config this tensor is quantized" if readable != _READ_DTYPES
            else "no quantization_config that is read makes this tensor a quantized one",
            next="check that config.json belongs to these weights, or use the checkpoint in bf16, fp16 or fp32",
        )  # fmt: skip
    if part.at:
        return part.arrange(stored[part.at])
    if stacked is not None and len(shape) == 3:
        rows = slice(stacked.row, stacked.row + part.shape[0])
        columns = slice(0, part.shape[1])
        if part.dim == 0:
            rows = slice(stacked.row + part.begin, stacked.row + part.end)
        else:
            columns = slice(part.begin, part.end)
        expert: Tensor = stored[stacked.expert : stacked.expert + 1, rows, columns]
        return expert[0]
    values: Tensor = stored[part.begin : part.end] if part.dim == 0 else stored[:, part.begin : part.end]
    return values


def read_scale(reader: Any, scale: Scale, file: Path) -> Tensor:
    """The scale in fp32, of one of `scale.shapes`. Raises WeightError for another shape or dtype, and for values that are neither
    finite and positive nor `scale.unset`."""
    stored: Tensor = reader.get_tensor(scale.name)
    if tuple(stored.shape) not in scale.shapes:
        raise WeightError(
            f"{scale.name} in {file} has shape {list(stored.shape)}",
            held=f"config.json implies {' or '.join(str(list(shape)) for shape in scale.shapes)}",
            next="check that config.json belongs to these weights",
        )  # fmt: skip
    if not stored.is_floating_point() or stored.element_size() < 2:
        raise WeightError(f"{scale.name} in {file} has dtype {stored.dtype}", held="scales are read in 16 and 32 bit")
    values = stored.float()
    usable = torch.isfinite(values) & ((values > 0) | (values == 0) & scale.may_be_zero)
    if scale.unset is not None:
        usable |= values == scale.unset
    if not bool(usable.all()):
        raise WeightError(
            f"{scale.name} in {file} holds a value that is not finite and positive", why="it cannot be used as a scale",
            next="download the checkpoint again",
        )  # fmt: skip
    return values

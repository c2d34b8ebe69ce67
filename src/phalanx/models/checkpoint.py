# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a checkpoint: which file has which tensor, and reading a part of one. Every error names its file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.config.json_fields import FieldTable
from phalanx.config.mistral_format import PARAMS, WEIGHTS, WEIGHTS_INDEX, tensor_name
from phalanx.config.model import config_file
from phalanx.config.text_tower import PREFIXES, WRAPPERS
from phalanx.errors import WeightError
from phalanx.log import get_logger
from phalanx.models.slices import Scale, Slice, Stacked

logger = get_logger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
INDEX_TABLE = FieldTable.of("weight_map", "metadata")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SCALE_NAMES = {
    "weight_scale_inv": ("weight_scale",), "weight_scale": ("weight_scale_inv",), "activation_scale": ("input_scale",),
    "input_scale_inv": ("input_scale",),
}  # fmt: skip
"""The end of a scale's name -> the ends of the same scale's name in other tools: all of them multiply the stored value."""
_OF_QUANTIZATION = (
    ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_shape", ".weight_scale", ".weight_scale_inv",
    ".weight_scale_2", ".weight_zero_point", ".input_scale", ".activation_scale", ".absmax", ".quant_map", "_blocks", "_scales",
)  # fmt: skip

_READ_DTYPES = ("F64", "F32", "F16", "BF16")
_FP8 = "F8_E4M3"
_MXFP4 = "U8"

_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")
"""Buffers that old versions of transformers saved with the weights; config.json implies them."""


class StoredTensor(NamedTuple):
    """Where a tensor is: its file, and its name in it."""

    file: Path
    name: str


Located = dict[str, StoredTensor]
"""Name of a tensor, as the model has it -> where it is."""


def locate_tensors(folder: Path) -> Located:
    """The tensors of a folder, by their names on disk: of model.safetensors, else of the files that the index names, else of every
    *.safetensors. In Mistral's format (`mistral_format`), by the names of transformers. The files tell which tensor is where: an
    index that names the wrong one of them misleads nobody.

    Raises WeightError for a folder without weights, a faulty index, a file or tensor of the index that is missing, and a tensor in
    two files.
    """
    own = config_file(folder).name == PARAMS
    index, single = folder / (WEIGHTS_INDEX if own else INDEX), folder / SINGLE
    weight_map = {} if single.exists() or not index.exists() else _read_index(index)
    files = [single] if single.exists() else [folder / name for name in sorted(set(weight_map.values()))]
    if single.exists() and index.exists():
        logger.info("%s is read, and not the files that %s names, as transformers does", single, INDEX)
    if not files:
        # Mistral ships a copy in its own format under this name.
        files = [file for file in sorted(folder.glob("*.safetensors")) if own or not file.match(WEIGHTS)]
    if not files:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        raise WeightError(
            f"{folder} holds no *.safetensors", held=f"the folder holds {', '.join(others)}" if others else "",
            why="weights are read from safetensors only", next="convert the checkpoint, or download its safetensors",
        )  # fmt: skip
    located: Located = {}
    for file in files:
        with opened(file) as reader:
            for name in reader.keys():  # noqa: SIM118, a reader is no mapping
                if name in located and file.name != weight_map.get(name) != located[name].file.name:
                    raise WeightError(f"{name} is in {located[name].file.name} and in {file.name}", held=f"folder {folder}")
                if name not in located or file.name == weight_map.get(name):
                    located[name] = StoredTensor(file, name)
    absent = next((name for name in weight_map if name not in located), None)
    if absent is not None:
        raise WeightError(
            f"{index} says that {absent} is in {weight_map[absent]}", held="neither this nor another file that it names has it",
            why="index and files are of different checkpoints", next="download both again",
        )  # fmt: skip
    return {tensor_name(name): place for name, place in located.items()} if own else located


def _read_index(index: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file, which is there."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        weight_map = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{index} cannot be read", why=f"{type(error).__name__}: {error}", next="download it again") from None
    if additions := INDEX_TABLE.unknown(content):
        logger.warning("%s: Phalanx knows nothing of %s: not used", index, ", ".join(additions))
    for file in sorted(set(weight_map.values())):
        # The index comes from whoever wrote the checkpoint: a path could lead to any file of this host.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightError(
                f"{index} names {file!r}, which is no *.safetensors file of its folder", why="an index may name plain files only",
                next="do not use this checkpoint unless you know where it comes from",
            )  # fmt: skip
        if not (index.parent / file).is_file():
            missing = [name for name, place in weight_map.items() if place == file]
            raise WeightError(
                f"{index.name} names {file}", held=f"{index.parent} does not hold it",
                why=f"{len(missing)} tensors are there, {missing[0]} among them", next="download the checkpoint again",
            )  # fmt: skip
    return weight_map


def text_tensors(located: Located, wrapper: str) -> Located:
    """The tensors of the text model of a multimodal architecture, by the names that the text model alone has. A log line counts
    those of its other towers (`TextTower.towers`)."""
    towers, renamed, skipped = WRAPPERS[wrapper].towers, Located(), dict[str, int]()
    for name, stored in located.items():
        tower = next((tower for tower in towers if name.removeprefix("model.").startswith(tower)), None)
        if tower is not None:
            skipped[tower] = skipped.get(tower, 0) + 1
            continue
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        full = PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        if full in renamed:
            raise WeightError(f"{name} and {renamed[full].name} are two names of one tensor", held=f"file {stored.file}")
        renamed[full] = stored
    if skipped:
        counts = ", ".join(f"{count} of {tower.rstrip('.')}" for tower, count in skipped.items())
        logger.info("tensors of other towers than the text model are not loaded: %s", counts)
    return renamed


def respelled(located: Located, spellings: Mapping[str, str]) -> Located:
    """The tensors by the names that their family declares. spellings: see `LayerDeclaration`; the first that a name has counts."""
    renamed: Located = {}
    for name, stored in located.items():
        own = next((part for part in spellings if part in name), "")
        full = name.replace(own, spellings[own]) if own else name
        if full in renamed:
            raise WeightError(f"{name} and {renamed[full].name} are two names of one tensor", held=f"file {stored.file}")
        renamed[full] = stored
    return renamed


def by_model_names(located: Located, known: Collection[str], *, tied: bool) -> Located:
    """The tensors by the names that the model has for them.

    A checkpoint of transformers' base class has them without "model.". Tools have several names for one scale (`_SCALE_NAMES`). Of
    tied weights (embedding, head) a checkpoint may have either.
    """
    prefix = "" if any(name.startswith("model.") for name in located) else "model."
    renamed: Located = {}
    for name, stored in located.items():
        full = name if name.startswith("lm_head.") else prefix + name
        if full not in known:
            stem, _, end = full.rpartition(".")
            full = next((f"{stem}.{alias}" for alias in _SCALE_NAMES.get(end, ()) if f"{stem}.{alias}" in known), full)
        if full in renamed:
            raise WeightError(f"{name} and {renamed[full].name} are two names of one tensor", held=f"file {stored.file}")
        renamed[full] = stored
    if tied and EMBEDDING not in renamed and HEAD in renamed:
        renamed[EMBEDDING] = renamed.pop(HEAD)
    return renamed


def require_known(located: Located, known: Collection[str], layers: int) -> None:
    """Raise WeightError for a tensor that the model, of so many layers, does not have."""
    unknown = [name for name in located if name not in known and not _IGNORED.search(name)]
    if unknown:
        name, (file, stored) = unknown[0], located[unknown[0]]
        raise WeightError(
            f"{file} holds {stored}" + (f" and {len(unknown) - 1} more tensors" if len(unknown) > 1 else ""),
            why=_why_unknown(name, layers), next="check that config.json belongs to these weights",
        )  # fmt: skip


def _why_unknown(name: str, layers: int) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None and int(layer[1]) >= layers:
        return f"config.json has num_hidden_layers={layers}"
    if name.startswith("lm_head.") and name != HEAD:
        return "by config.json the output head is in 16 or 32 bit, without scales; it has no bias"
    if name.endswith(_OF_QUANTIZATION):
        return "it belongs to a quantization, and by config.json this layer has none, or another one"
    if name.endswith(".bias"):
        return "by config.json this layer has no bias"
    return "the model that config.json describes has no such tensor"


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


def read(reader: Any, part: Slice, place: StoredTensor, stacked: Stacked | None = None) -> Tensor:
    """The slice's values in the dtype of the file. place: of its tensor, or of the stacked one. Raises WeightError where the stored
    tensor contradicts config.json."""
    expected, (file, name) = part.shape if stacked is None else stacked.shape, place
    stored = reader.get_slice(name)
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    as_declared = len(shape) == 3 and shape != expected and shape == (expected[0], *expected[:0:-1])
    if stacked is not None and stacked.transposed and as_declared:
        stacked, expected = replace(stacked, transposed=False), shape
    if shape != expected:
        raise WeightError(
            f"{name} in {file} has shape {list(shape)}", held=f"config.json implies {list(expected)}",
            why="the two contradict each other", next="check that config.json belongs to these weights",
        )  # fmt: skip
    in_fp8 = part.target.dtype == torch.float8_e4m3fn and part.scale is None
    readable = part.dtypes or ((_FP8,) if in_fp8 else (_MXFP4,) if part.target.dtype == torch.uint8 else _READ_DTYPES)
    if dtype not in readable:
        raise WeightError(
            f"{name} in {file} has dtype {dtype}", held=f"read here: {', '.join(readable)}",
            why="by its quantization_config this tensor is quantized" if readable != _READ_DTYPES
            else "no quantization_config that is read makes this tensor a quantized one",
            next="check that config.json belongs to these weights, or use the checkpoint in bf16, fp16 or fp32",
        )  # fmt: skip
    if part.at and stacked is None:
        return part.arrange(stored[part.at])
    first, own = 0 if stacked is None else stacked.row, slice(part.begin, part.end)
    rows, columns = part.at or ((own, slice(0, part.shape[-1])) if part.dim == 0 else (slice(0, part.shape[0]), own))
    rows = slice(first + rows.start, first + rows.stop)
    if stacked is not None and len(shape) == 3:
        own = slice(stacked.expert, stacked.expert + 1)
        expert: Tensor = stored[own, columns, rows].mT if stacked.transposed else stored[own, rows, columns]
        return expert[0].contiguous()
    if stacked is not None and stacked.transposed:
        return torch.as_tensor(stored[columns, rows]).mT.contiguous()
    values: Tensor = stored[rows] if len(shape) == 1 or (part.dim == 0 and not part.at) else stored[rows, columns]
    return values


def read_scale(reader: Any, scale: Scale, place: StoredTensor) -> Tensor:
    """The scale in fp32, of one of `scale.shapes`. Raises WeightError for another shape or dtype, and for values that are neither
    finite and positive nor `scale.unset`."""
    file, name = place
    stored: Tensor = reader.get_tensor(name)
    if tuple(stored.shape) not in scale.shapes:
        raise WeightError(
            f"{name} in {file} has shape {list(stored.shape)}",
            held=f"config.json implies {' or '.join(str(list(shape)) for shape in scale.shapes)}",
            next="check that config.json belongs to these weights",
        )  # fmt: skip
    if not stored.is_floating_point() or stored.element_size() < 2:
        raise WeightError(f"{name} in {file} has dtype {stored.dtype}", held="scales are read in 16 and 32 bit")
    values = stored.float()
    usable = torch.isfinite(values) & ((values > 0) | (values == 0) & scale.may_be_zero)
    if scale.unset is not None:
        usable |= values == scale.unset
    if not bool(usable.all()):
        raise WeightError(
            f"{name} in {file} holds a value that is not finite and positive", why="it cannot be used as a scale",
            next="download the checkpoint again",
        )  # fmt: skip
    return values

# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a model: what a folder of peft's format has, checked whole against the declared tensors (`read_adapter`), and
the bytes of the slots that hold adapters on a device (`slot_bytes`).

    base_model.model.<module>.lora_A.weight [rank, in], base_model.model.<module>.lora_B.weight [out, rank]

A module is one declared tensor, or several that one tensor of a checkpoint holds (`declare.Fused`): qkv_proj of Phi-3.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from phalanx.config.adapter import CONFIG, AdapterConfig, json_object
from phalanx.config.model import ModelShape
from phalanx.config.text_tower import PREFIXES
from phalanx.errors import WeightError
from phalanx.layout.families import WeightTensor, layer_tensors
from phalanx.layout.layout import Layout
from phalanx.layout.weights import itemsize, stage_layers

WEIGHTS, ADDED_TOKENS = "adapter_model.safetensors", "added_tokens.json"
RANK_UNIT = 16
"""Slots have room for ranks in multiples of so many: kernels multiply no fewer at a time."""

_PEFT = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_DTYPES = ("F64", "F32", "F16", "BF16")
_ADAPTED = ("attention", "mlp", "shared")
_CHUNK = 16 << 20  # bytes that are hashed together


class AdapterPart(NamedTuple):
    """What an adapter adds to checkpoint layer `layer`: scale * B A, of this rank.

    a, b: the names of the tensors in the adapter's file. row: of b, the first row that is this layer's.
    """

    layer: str
    a: str
    b: str
    rank: int
    scale: float
    row: int = 0


@dataclass(frozen=True)
class AdapterFile:
    """An adapter that the model can take. digest: of all that changes its output, and of the file. rank: the largest."""

    folder: str
    digest: bytes
    rank: int
    parts: tuple[AdapterPart, ...]


def takes_adapters(tensor: WeightTensor) -> bool:
    """Whether adapters of this tensor are computed: of the linear layers of attention and of dense and shared MLPs. kv_b_proj of
    latent attention is multiplied by parts of each head, and so it is none of them."""
    return bool(tensor.gemm) and tensor.part in _ADAPTED and tensor.gemm != "kv_b"


def read_adapter(folder: Path, shape: ModelShape, *, max_rank: int) -> AdapterFile:
    """The adapter in a folder, for a model. Reads all of it, which takes a second for a gigabyte.

    Raises ModelError, and WeightError for its tensors: for each that the model has no place for, for one of another shape or dtype,
    for a rank above max_rank, for half a pair, and for an adapter that changes nothing.
    """
    config, file = require_files(folder)
    _require_known_tokens(folder / ADDED_TOKENS, shape.vocab_size)
    modules, pairs = _modules(shape), dict[str, dict[str, str]]()
    stored = _stored(file)
    for name in stored:
        module, factor = _place(name, modules, shape, file)
        if factor in pairs.setdefault(module, {}):
            raise WeightError(f"{name} and {pairs[module][factor]} in {file} are two names of one tensor")
        pairs[module][factor] = name
    if not pairs:
        raise WeightError(f"{file} adapts no module", why="it holds no tensor", next="check what it was trained for")
    parts = tuple(part for module, pair in pairs.items() for part in _parts(module, pair, modules[module], stored, config, file))
    layers = [part.layer for part in parts]
    twice = next((layer for layer in layers if layers.count(layer) > 1), None) if len(set(layers)) < len(layers) else None
    if twice is not None:
        raise WeightError(f"{file} adapts {twice} twice", why="by its own name, and by that of the tensor that it is a part of")
    rank = max(part.rank for part in parts)
    if rank > max_rank:
        raise WeightError(
            f"{file} has rank {rank}", held=f"max_lora_rank is {max_rank}", next=f"start with max_lora_rank={rank} or more"
        )
    return AdapterFile(str(folder), _digest(file, parts), rank, parts)


def require_files(folder: Path) -> tuple[AdapterConfig, Path]:
    """The config and the file of tensors of the adapter in a folder: what can be known of it without a model. Raises ModelError."""
    if not folder.is_dir():
        next = f"give the folder that holds {CONFIG} and {WEIGHTS}; one of a hub must be downloaded before"
        raise WeightError(f"{folder} is no folder", next=next)
    config, file = AdapterConfig.from_folder(folder), folder / WEIGHTS
    if not file.is_file():
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        raise WeightError(
            f"{folder} holds no {WEIGHTS}", held=f"it holds {', '.join(others)}" if others else "",
            why="weights are read from safetensors only", next="convert the adapter: load it with peft, and save it again",
        )  # fmt: skip
    return config, file


def _require_known_tokens(file: Path, vocab_size: int) -> None:
    """Raise ModelError for tokens of an adapter's own tokenizer that the model has no embedding for: requests could not give them,
    and it was trained for prompts that have them. Tokens of the base are listed there, too."""
    if not file.is_file():
        return
    beyond = {name: token for name, token in json_object(file).items() if not isinstance(token, int) or token >= vocab_size}
    for name, token in beyond.items():
        raise WeightError(
            f"{file} has token {name[:40]!r}: {token!r}", held=f"the model has vocab_size={vocab_size}",
            why="their embeddings would come with the adapter, and these are not read", next="merge the adapter into the model",
        )  # fmt: skip


def _modules(shape: ModelShape) -> dict[str, list[WeightTensor]]:
    """The modules of all layers that can be adapted, by their names, with the declared tensors that each consists of."""
    modules: dict[str, list[WeightTensor]] = {}
    for layer in range(shape.num_layers):
        for tensor in filter(takes_adapters, layer_tensors(shape, layer)):
            modules[tensor.name.removesuffix(".weight")] = [tensor]
            if tensor.fused is not None:
                modules.setdefault(tensor.fused.name.removesuffix(".weight"), []).append(tensor)
    return modules


def _stored(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> shape and dtype of each tensor."""
    try:
        with safe_open(file, framework="np") as reader:
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118, a reader is no mapping
            return {name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}
    except (SafetensorError, OSError) as error:
        raise WeightError(
            f"{file} cannot be read", held=f"it has {file.stat().st_size:,} bytes" if file.exists() else "",
            why=f"{error}; it is truncated or damaged", next="download it again",
        ) from None  # fmt: skip


def _place(name: str, modules: Mapping[str, Any], shape: ModelShape, file: Path) -> tuple[str, str]:
    """The module that a tensor of the file belongs to, and "A" or "B"."""
    match = _FACTOR.fullmatch(name)
    module = _module_name(name if match is None else match["module"])
    if match is None or module not in modules:
        raise WeightError(
            f"{file} holds {name}", why=_why_refused(module, match is not None, shape),
            next="train the adapter for linear layers of attention and dense MLPs alone, or merge it into the model",
        )  # fmt: skip
    return module, match["factor"]


def _module_name(name: str) -> str:
    name = name.removeprefix(_PEFT)
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return PREFIXES.get(prefix, "") + name.removeprefix(prefix)


_KINDS = (
    ("lora_embedding_", "adapters of embeddings are not computed"),
    ("lora_magnitude_vector", "it belongs to DoRA, which is not computed"),
    ("modules_to_save", "whole copies of modules (modules_to_save) are not read"),
    (".experts", "adapters of experts are not computed"),
    ("kv_b_proj", "adapters of kv_b_proj are not computed: decodes absorb it into their queries"),
    ("lm_head", "adapters of the output head are not computed"),
    ("embed_tokens", "adapters of embeddings are not computed"),
    (".bias", "trained biases are not read"),
)  # fmt: skip


def _why_refused(module: str, factor: bool, shape: ModelShape) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", module)
    if layer is not None and int(layer[1]) >= shape.num_layers:
        return f"the model has num_hidden_layers={shape.num_layers}"
    why = next((why for text, why in _KINDS if text in module), None)
    other = f"the model, a {shape.architecture}, has no such linear layer" if factor else "it is no tensor of a LoRA adapter"
    return why or other


def _parts(
    module: str, pair: Mapping[str, str], tensors: Sequence[WeightTensor], stored: Mapping[str, tuple[tuple[int, ...], str]],
    config: AdapterConfig, file: Path,
) -> Iterator[AdapterPart]:  # fmt: skip
    """What a module's pair of tensors is to the declared ones, once its shapes are checked."""
    if missing := {"A", "B"} - set(pair):
        (name,), (other,) = pair.values(), missing
        raise WeightError(f"{file} holds {name} without its lora_{other}", why="the two are multiplied", next="download it again")
    name = _module_name(_FACTOR.fullmatch(pair["A"])["module"])  # type: ignore[index]
    if not config.targets(name):
        raise WeightError(
            f"{file} holds {pair['A']}", held=f"target_modules of {CONFIG} is {list(config.target_modules or ())}",
            why="the two contradict each other", next="check that both are of one adapter",
        )  # fmt: skip
    first, rank = tensors[0], config.rank_of(name)
    alone = first.name.removesuffix(".weight") == module
    rows = first.shape[0] if alone or first.fused is None else first.fused.rows
    for key, expected in (("A", (rank, first.shape[1])), ("B", (rows, rank))):
        dims, dtype = stored[pair[key]]
        if dims != expected:
            raise WeightError(
                f"{pair[key]} in {file} has shape {list(dims)}", held=f"rank {rank} and the model imply {list(expected)}",
                why="the adapter is of another model, or its config of another adapter", next="check what it was trained for",
            )  # fmt: skip
        if dtype not in _DTYPES:
            raise WeightError(f"{pair[key]} in {file} has dtype {dtype}", held=f"read here: {', '.join(_DTYPES)}")
    for tensor in tensors:
        row = 0 if alone or tensor.fused is None else tensor.fused.row
        yield AdapterPart(tensor.name.removesuffix(".weight"), pair["A"], pair["B"], rank, config.scale_of(name), row)


def _digest(file: Path, parts: Sequence[AdapterPart]) -> bytes:
    """Of what the parts are, and of the file. Raises WeightError where every B is zero."""
    digest = hashlib.blake2b(repr(sorted(parts)).encode(), digest_size=16)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        for at in range(0, len(data), _CHUNK):
            digest.update(data[at : at + _CHUNK])
        for name in dict.fromkeys(part.b for part in parts):
            first, end = header[name]["data_offsets"]
            if data[begin + first : begin + end].strip(b"\x00\x80"):  # 80: of a negative zero
                return digest.digest()
    raise WeightError(
        f"{file} changes nothing", why="every lora_B in it is zero, as before the first step of training", next="train it"
    )


def file_digest(folder: str, parts: Sequence[AdapterPart]) -> bytes:
    """As in `AdapterFile`, of the file as it is now."""
    return _digest(Path(folder) / WEIGHTS, parts)


def slot_rank(max_rank: int) -> int:
    """The rank that a slot has room for."""
    return -(-max_rank // RANK_UNIT) * RANK_UNIT


def slot_bytes(shape: ModelShape, dtype: str, layout: Layout, max_rank: int) -> tuple[int, ...]:
    """Bytes of one slot for adapters on a rank of each stage. dtype: of the model's arithmetic."""
    size, rank = itemsize(dtype), slot_rank(max_rank)
    stages = []
    for layers in stage_layers(shape, dtype, layout.pp):
        tensors = [tensor for layer in layers for tensor in layer_tensors(shape, layer) if takes_adapters(tensor)]
        stages.append(size * rank * sum(sum(tensor.local(layout.tp)) for tensor in tensors))
    return tuple(stages)

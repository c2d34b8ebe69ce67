# SPDX-License-Identifier: Apache-2.0
"""Fill a model: from a checkpoint, of which each rank reads its own slices, or with seeded random values."""

from __future__ import annotations

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from phalanx.config.model import ModelShape
from phalanx.config.quantization import GROUP_UNIT
from phalanx.errors import WeightError
from phalanx.layout import weight_tensors as catalog
from phalanx.layout.families.registry import declaration
from phalanx.log import get_logger
from phalanx.models import kv_scales
from phalanx.models.checkpoint import (
    HEAD,
    Located,
    StoredTensor,
    by_model_names,
    locate_tensors,
    opened,
    read,
    read_scale,
    require_known,
    respelled,
    text_tensors,
)
from phalanx.models.decoder import Decoder
from phalanx.models.layers.embedding import ParallelLMHead, QuantizedVocabulary
from phalanx.models.layers.kv_store import KvStore
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.slices import LayerContext, Scale, Slice, Sliced

logger = get_logger(__name__)

FP8_MAX = 448.0  # the largest e4m3
TILE = 4096  # rows and columns of dummy FP8 weights that are generated at once
NAN_CHUNK = 2**26  # FP8 weights that are looked through at once
E2M1_DEVIATION = 2.926  # standard deviation of the 16 values of e2m1
ACTIVATION_MAX = 32.0  # the largest activation, as dummy static scales assume it

Progress = Callable[[int, int], None]
"""Called with (bytes read or generated so far, bytes in all), both of this rank, in the model's dtype."""


def slices(model: nn.Module) -> Iterator[Slice]:
    """The slices that this rank's part of a model, or of a layer, reads."""
    for module in model.modules():
        if isinstance(module, Sliced):
            yield from module.slices()


def scales(model: nn.Module) -> Iterator[Scale]:
    """The quantization scales that it reads."""
    for module in model.modules():
        if isinstance(module, Sliced):
            yield from module.scales()


def _kv_stores(module: nn.Module) -> Iterator[KvStore]:
    return (each for each in module.modules() if isinstance(each, KvStore))


def require_complete(model: Decoder, folder: Path) -> None:
    """Raise WeightError as `files_of`, and for a missing tensor."""
    _parts_by_file(model, files_of(model, folder), folder)


def files_of(model: Decoder, folder: Path) -> Located:
    """Where the tensors are in a folder. Raises WeightError for a missing or truncated file, and for a tensor that the model
    does not have."""
    shape = model.shape
    known = catalog.tensors(shape).keys() | catalog.scales(shape)
    for layer in range(shape.num_layers):
        known |= catalog.fused_experts(shape, layer).keys()
    tied = shape.tie_word_embeddings
    located = locate_tensors(folder)
    if shape.wrapper is not None:
        located = text_tensors(located, shape.wrapper)
    located = respelled(located, declaration(shape).spellings)
    files = _without_mtp(by_model_names(located, known, tied=tied), shape)
    files = _without_zeros(_without_unread(files, shape), known, shape)
    _take_plain_layers(model, files, folder)
    require_known(files, known | {HEAD} if tied else known, shape.num_layers)
    return files


def load(model: Decoder, folder: Path, progress: Progress | None = None) -> None:
    """Read this rank's slices from the safetensors of `folder` into the model, cast to its dtype or quantized to its FP8.

    Raises WeightError before anything is read for a missing file or tensor and for a tensor that the model does not have; while
    reading, for a truncated file, a shape that contradicts config.json, a dtype that is not supported, or scales for a part of an
    FP8 cache.
    """
    shape, files = model.shape, files_of(model, folder)
    if model.context.kv_cache_dtype == "fp8" and shape.latent is None:
        scales_by_layer = kv_scales.read(files, shape.num_layers)
        for index, decoder_layer in zip(model.layer_range, model.layers, strict=True):
            for store in _kv_stores(decoder_layer):
                store.read_scales = scales_by_layer.get(shape.kv_layer(index))
    read_parts(model, files, folder, progress)
    if shape.tie_word_embeddings and HEAD in files:
        _require_tied(model, files[HEAD])
    _warn_of_nonfinite(model, folder)


def read_parts(model: nn.Module, files: Located, folder: Path, progress: Progress | None = None) -> None:
    """Read the slices and scales of a model, or of a part of one, from the files of a folder. Raises WeightError before anything is
    read where a tensor is missing."""
    by_file, stacked, absent = _parts_by_file(model, files, folder)
    for module in model.modules():
        if isinstance(module, Sliced):
            module.reading()
    for act in absent:
        act()
    total = sum(part.target.nbytes for parts in by_file.values() for part in parts if isinstance(part, Slice))
    done = 0
    for file, parts in sorted(by_file.items()):
        with opened(file) as reader:
            for part in parts:
                if isinstance(part, Scale):
                    part.store(read_scale(reader, part, files[part.name]))
                    continue
                source = part.stacked if part.name in stacked else None
                part.store(read(reader, part, files[part.name if source is None else source.name], source))
                done += part.target.nbytes
                if progress is not None:
                    progress(done, total)
    for module in model.modules():
        if isinstance(module, Sliced):
            module.loaded()


_ByFile = dict[Path, list[Slice | Scale]]


def _parts_by_file(model: nn.Module, files: Located, folder: Path) -> tuple[_ByFile, set[str], list[Callable[[], None]]]:
    """What to read from each file, the names of those parts that are in stacked tensors, and what to call for tensors that are
    absent and may be. Raises WeightError where a tensor is missing."""
    absent: list[Callable[[], None]] = []
    by_file: dict[Path, list[Slice | Scale]] = defaultdict(list)
    stacked: set[str] = set()
    parts_to_read: list[Slice | Scale] = [*slices(model), *scales(model)]
    for part in parts_to_read:
        if part.name in files:
            by_file[files[part.name].file].append(part)
        elif isinstance(part, Slice) and part.stacked is not None and part.stacked.name in files:
            by_file[files[part.stacked.name].file].append(part)
            stacked.add(part.name)
        elif isinstance(part, Slice) and part.absent is not None:
            absent.append(part.absent)
        else:
            raise WeightError(
                f"{part.name} is missing", held=f"{folder} holds {len(files)} tensors",
                why="config.json has tie_word_embeddings=false, so that the output head has a tensor of its own"
                if part.name == HEAD else "config.json implies it", next="check that config.json belongs to these weights",
            )  # fmt: skip
    return by_file, stacked, absent


def _require_tied(model: Decoder, place: StoredTensor) -> None:
    """Raise WeightError where the checkpoint stores an output head that is not the embedding."""
    parts = [] if model.lm_head is None else list(model.lm_head.table.slices())
    for part in parts:
        with opened(place.file) as reader:
            values = read(reader, part, place)
        equal = all(
            torch.equal(part.target[at : at + TILE], values[at : at + TILE].to(part.target.device, part.target.dtype))
            for at in range(0, len(values), TILE)
        )
        if not equal:
            raise WeightError(
                f"{place.name} in {place.file} differs from {part.name}", held="config.json has tie_word_embeddings=true",
                why="the model has one tensor for both, and transformers uses the stored head",
                next="set tie_word_embeddings to false in config.json, or remove the head from the checkpoint",
            )  # fmt: skip


def _warn_of_nonfinite(model: Decoder, folder: Path) -> None:
    """Name the tensors of which this rank holds a value that is NaN or infinite. Waits for the device once, if there is none."""
    if _all_finite(model.parameters()):
        return
    faulty = sorted({part.name for part in slices(model) if part.take is None and not _all_finite([part.target])})
    logger.warning(
        "%d tensors of %s hold values that are NaN or infinite, so that logits may be: %s", len(faulty), folder,
        ", ".join(faulty[:8]) + (", ..." if len(faulty) > 8 else ""),
    )  # fmt: skip


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    finite = [_is_finite(tensor) for tensor in tensors if tensor.numel()]
    return not finite or bool(torch.stack(finite).all())


def _is_finite(values: Tensor) -> Tensor:
    """One truth value on the device. The values are read once, and no more than a part of them is copied."""
    if not values.is_floating_point():  # values of 4 bits are finite
        return torch.ones((), dtype=torch.bool, device=values.device)
    if values.dtype == torch.float8_e4m3fn:  # without infinities; all bits but the sign set is NaN
        bits = torch.split(values.view(torch.uint8).reshape(-1), NAN_CHUNK)
        return torch.stack([(part & 0x7F).amax() for part in bits]).amax() < 0x7F
    low, high = torch.aminmax(values)
    return torch.isfinite(low) & torch.isfinite(high)


def _without_mtp(files: Located, shape: ModelShape) -> Located:
    """The tensors without those of the multi-token prediction layers, which lie behind the last layer or, of Qwen3-Next, in
    "mtp.", of Ernie in "model.mtp_"; a log line counts these."""
    layers = set(range(shape.num_layers, shape.num_layers + shape.mtp_layers))
    layers |= {int(match[1]) for name in files if (match := re.match(r"model\.layers\.(\d+)\.eh_proj\.", name))}
    prefixes = ("mtp.", "model.mtp_", *(f"model.layers.{layer}." for layer in sorted(layers) if layer >= shape.num_layers))
    skipped = {name for name in files if name.startswith(prefixes)}
    if skipped:
        logger.info(
            "%d tensors of multi-token prediction (%s) are not loaded with the model: see method 'mtp' of speculative_config",
            len(skipped), ", ".join(prefix.rstrip(".") for prefix in prefixes if any(name.startswith(prefix) for name in skipped)),
        )  # fmt: skip
    return {name: file for name, file in files.items() if name not in skipped}


def _take_plain_layers(model: Decoder, files: Located, folder: Path) -> None:
    """Dense layers and a head in 16 bit stay so, also where the configuration forgets to except them: files tell. Those that are so
    from an earlier read keep their memory: captured graphs read it."""
    quantization = model.context.quantization
    if quantization is None:
        return
    layers: list[tuple[ColumnParallelLinear | RowParallelLinear | ParallelLMHead, list[str]]] = [
        (layer, [part.name for part in layer.parts])
        for layer in model.modules()
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        and layer.context.quantization is not None and layer.method.input_quantizer is None
    ]  # fmt: skip
    if model.lm_head is not None and isinstance(model.lm_head.table, QuantizedVocabulary):
        layers.append((model.lm_head, ["lm_head"]))
    plain = []
    for layer, names in layers:
        scheme = quantization.of(names[0])
        if scheme is None or scheme.on_load:
            continue
        ends = (scheme.copied or scheme).beside_weight
        if all(f"{name}.weight" in files and not any(f"{name}.{end}" in files for end in ends) for name in names):
            layer.take_plain()
            plain += [f"{name}.weight" for name in names]
    if plain:
        logger.warning(
            "%s has %d weights in 16 bit that its quantization does not except, %s among them: they stay in 16 bit", folder,
            len(plain), plain[0],
        )  # fmt: skip


def _without_unread(files: Located, shape: ModelShape) -> Located:
    """The tensors without those of layers that their family does not load; a log line counts these."""
    unread = declaration(shape).unread
    if unread is None:
        return files
    prefixes = tuple(name for layer in range(shape.num_layers) for name in unread(shape, layer))
    left = {name: place for name, place in files.items() if not name.startswith(prefixes)}
    if len(left) < len(files):
        first = next(name for name in files if name not in left)
        logger.info("%d tensors that no layer reads are not loaded, %s among them", len(files) - len(left), first)
    return left


def _without_zeros(files: Located, known: Collection[str], shape: ModelShape) -> Located:
    """The tensors without those of zeros that tools write for layers that have none: biases of GPTQ, and zero points of symmetric
    layers of compressed-tensors."""
    ends = {"gptq": (".bias",), "compressed-tensors": (".weight_zero_point", ".input_zero_point")}
    method = None if shape.quantization is None else shape.quantization.method
    extra = [name for name in files if name.endswith(ends.get(method or "", ())) and name not in known]
    zero = set()
    for name in extra:
        with opened(files[name].file) as reader:
            if not reader.get_tensor(files[name].name).any():
                zero.add(name)
    return {name: place for name, place in files.items() if name not in zero}


def dummy(model: nn.Module, seed: int, progress: Progress | None = None) -> None:
    """Random weights of a decoder, or of a head with a `context`, generated on its device. The values depend on the seed and a
    tensor's name only: any layout of ranks on devices of one kind holds parts of the same model. Weights in FP8 are generated in
    FP8, tile by tile.

    A GEMM keeps the magnitude of its input (standard deviation 1 / sqrt(inputs)), so that activations stay in range.
    """
    context = cast(LayerContext, model.context)
    for scale in scales(model):
        inputs = scale.inputs
        scale.store(torch.full(scale.shapes[0], _bound(inputs) / scale.largest if inputs else ACTIVATION_MAX / FP8_MAX))
    quantization = context.quantization
    if context.kv_cache_dtype == "fp8" and quantization is not None and quantization.kv:
        for store in _kv_stores(model):
            store.read_scales = ACTIVATION_MAX / FP8_MAX, ACTIVATION_MAX / FP8_MAX
    by_name: dict[str, list[Slice]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, Sliced):
            for part in module.dummy_slices():
                by_name[part.name].append(part)
    done, total = 0, sum(part.target.nbytes for parts in by_name.values() for part in parts)
    for name, parts in by_name.items():
        if parts[0].target.dtype == torch.float8_e4m3fn:
            for part in parts:
                _fill_fp8(part, seed)
        elif parts[0].target.is_meta:
            like = torch.empty(0, dtype=parts[0].target.dtype, device=context.device)
            values = _random(name, parts[0].shape, seed, like=like)
            for part in parts:
                part.store(values[part.at])
        elif parts[0].at:
            for part in parts:
                part.store(part.arrange(_random_part(part, seed)))
        else:
            values = _random(name, parts[0].shape, seed, like=parts[0].target)
            for part in parts:
                part.target.copy_(values.narrow(part.dim, part.begin, part.target.shape[part.dim]))
        done += sum(part.target.nbytes for part in parts)
        if progress is not None:
            progress(done, total)


def _random(name: str, shape: tuple[int, ...], seed: int, *, like: Tensor) -> Tensor:
    # A generator on CPU uses 32 bits of its seed only, so the seed and the name are hashed together.
    generator = torch.Generator(like.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.empty(shape, dtype=like.dtype, device=like.device)
    if not like.is_floating_point():
        limits = torch.iinfo(like.dtype)
        return values.random_(limits.min, limits.max, generator=generator)
    if len(shape) == 2:
        bound = _bound(shape[1])
        return values.uniform_(-bound, bound, generator=generator)
    center = 0.0 if name.endswith(".bias") else 1.0
    return values.uniform_(center - 0.1, center + 0.1, generator=generator)


def _random_part(part: Slice, seed: int) -> Tensor:
    """What `part.at` says of a tensor of all experts, of which it has one. In MXFP4 the 16 values of 4 bits are drawn alike, and
    all scales are the power of 2 that comes nearest to a GEMM's bound."""
    expert, *rest = part.at
    shape, target = part.shape[1:], part.target
    generator = torch.Generator(target.device).manual_seed(zlib.crc32(f"{seed} {part.name} {expert.start}".encode()))
    values = torch.empty(shape, dtype=target.dtype, device=target.device)
    if target.dtype != torch.uint8:
        bound = 0.1 if len(shape) == 1 else _bound(shape[0])
        values.uniform_(-bound, bound, generator=generator)
    elif len(shape) == 3:
        values.random_(0, 256, generator=generator)
    else:
        values.fill_(127 + round(math.log2(1.0 / (E2M1_DEVIATION * math.sqrt(shape[1] * GROUP_UNIT)))))
    return values[tuple(rest)].unsqueeze(0)


def _bound(inputs: int) -> float:
    """The bound of uniform values with the standard deviation 1 / sqrt(inputs)."""
    return math.sqrt(3.0 / inputs)


def _fill_fp8(part: Slice, seed: int) -> None:
    """Uniform over e4m3's range, by tiles of the unsplit tensor, so that no more than a tile exists in 16 bit. The scale of a row
    that is quantized on load gives it the bound."""
    device = part.target.device
    first_row, first_column = (part.begin, 0) if part.dim == 0 else (0, part.begin)
    rows, columns = part.target.shape
    for top in range(first_row // TILE * TILE, first_row + rows, TILE):
        for left in range(first_column // TILE * TILE, first_column + columns, TILE):
            generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {part.name} {top} {left}".encode()))
            tile = torch.empty(
                min(TILE, part.shape[0] - top), min(TILE, part.shape[1] - left), dtype=torch.bfloat16, device=device
            )  # fmt: skip
            tile.uniform_(-FP8_MAX, FP8_MAX, generator=generator)
            from_row, to_row = max(top, first_row), min(top + tile.shape[0], first_row + rows)
            from_column, to_column = max(left, first_column), min(left + tile.shape[1], first_column + columns)
            target = part.target[from_row - first_row : to_row - first_row, from_column - first_column : to_column - first_column]
            target.copy_(tile[from_row - top : to_row - top, from_column - left : to_column - left])
    if part.scale is not None:
        part.scale.fill_(_bound(part.shape[1]) / FP8_MAX)

# SPDX-License-Identifier: Apache-2.0
"""Fill a model: from a checkpoint, of which each rank reads its own slices, or with seeded random values."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from phalanx.config.model import ModelShape
from phalanx.errors import WeightError
from phalanx.log import get_logger
from phalanx.models import kv_scales
from phalanx.models.checkpoint import locate_tensors, opened, read, read_scale, require_known
from phalanx.models.registry import Model
from phalanx.models.slices import Scale, Slice, Sliced
from phalanx.plan import weight_tensors as catalog
from phalanx.plan.families.declare import MXFP4_BLOCK

logger = get_logger(__name__)

FP8_MAX = 448.0  # the largest e4m3
TILE = 4096  # rows and columns of dummy FP8 weights that are generated at once
E2M1_DEVIATION = 2.926  # standard deviation of the 16 values of e2m1
ACTIVATION_MAX = 32.0  # the largest activation, as dummy static scales assume it

Progress = Callable[[int, int], None]
"""Called with (bytes read or generated so far, bytes in all), both of this rank, in the model's dtype."""


def slices(model: Model) -> Iterator[Slice]:
    """The slices that this rank's part of a model reads."""
    for module in model.modules():
        if isinstance(module, Sliced):
            yield from module.slices()


def scales(model: Model) -> Iterator[Scale]:
    """The quantization scales that it reads."""
    for module in model.modules():
        if isinstance(module, Sliced):
            yield from module.scales()


def load(model: Model, folder: Path, progress: Progress | None = None) -> None:
    """Read this rank's slices from the safetensors of `folder` into the model, cast to its dtype or quantized to its FP8.

    Raises WeightError before anything is read for a missing file or tensor and for a tensor that the model does not have; while
    reading, for a truncated file, a shape that contradicts config.json, a dtype that is not supported, or scales for a part of an
    FP8 cache.
    """
    shape = model.shape
    files = _without_mtp(locate_tensors(folder), shape)
    known = catalog.tensors(shape).keys() | catalog.scales(shape)
    for layer in range(shape.num_layers):
        known |= catalog.fused_experts(shape, layer).keys()
    require_known(files, known, tied_head=catalog.HEAD if shape.tie_word_embeddings else None)
    by_file: dict[Path, list[Slice | Scale]] = defaultdict(list)
    stacked: set[str] = set()
    parts_to_read: list[Slice | Scale] = [*slices(model), *scales(model)]
    for part in parts_to_read:
        if part.name in files:
            by_file[files[part.name]].append(part)
        elif isinstance(part, Slice) and part.stacked is not None and part.stacked.name in files:
            by_file[files[part.stacked.name]].append(part)
            stacked.add(part.name)
        else:
            raise WeightError(
                f"{part.name} is missing", held=f"{folder} holds {len(files)} tensors",
                why="config.json implies it", next="check that config.json belongs to these weights",
            )  # fmt: skip
    if model.context.fp8_cache and shape.latent is None:
        scales_by_layer = kv_scales.read(files, shape.num_layers)
        for index, decoder in zip(model.layer_range, model.layers, strict=True):
            decoder.self_attn.kv_store.read_scales = scales_by_layer.get(index)
    total = sum(part.target.nbytes for parts in by_file.values() for part in parts if isinstance(part, Slice))
    done = 0
    for file, parts in sorted(by_file.items()):
        with opened(file) as reader:
            for part in parts:
                if isinstance(part, Scale):
                    part.store(read_scale(reader, part, file))
                    continue
                part.store(read(reader, part, file, part.stacked if part.name in stacked else None))
                done += part.target.nbytes
                if progress is not None:
                    progress(done, total)


def _without_mtp(files: dict[str, Path], shape: ModelShape) -> dict[str, Path]:
    """The tensors without those of the multi-token prediction layers, which lie behind the last layer; a log line counts these."""
    layers = range(shape.num_layers, shape.num_layers + shape.mtp_layers)
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    skipped = {name for name in files if prefixes and name.startswith(prefixes)}
    if skipped:
        logger.info(
            "%d tensors of multi-token prediction (layers %d..%d) are skipped: Phalanx predicts one token at a time", len(skipped),
            layers.start, layers.stop - 1,
        )  # fmt: skip
    return {name: file for name, file in files.items() if name not in skipped}


def dummy(model: Model, seed: int, progress: Progress | None = None) -> None:
    """Random weights, generated on the model's device. The values depend on the seed and a tensor's name only: any layout of ranks
    on devices of one kind holds parts of the same model. Weights in FP8 are generated in FP8, tile by tile.

    A GEMM keeps the magnitude of its input (standard deviation 1 / sqrt(inputs)), so that activations stay in range.
    """
    for scale in scales(model):
        inputs = scale.inputs
        scale.store(torch.full(scale.shapes[0], _bound(inputs) / FP8_MAX if inputs else ACTIVATION_MAX / FP8_MAX))
    quantization = model.context.quantization
    if model.context.fp8_cache and quantization is not None and quantization.kv and model.shape.latent is None:
        for layer in model.layers:
            layer.self_attn.kv_store.read_scales = ACTIVATION_MAX / FP8_MAX, ACTIVATION_MAX / FP8_MAX
    by_name: dict[str, list[Slice]] = defaultdict(list)
    for part in slices(model):
        by_name[part.name].append(part)
    done, total = 0, sum(part.target.nbytes for parts in by_name.values() for part in parts)
    for name, parts in by_name.items():
        if parts[0].target.dtype == torch.float8_e4m3fn:
            for part in parts:
                _fill_fp8(part, seed)
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
        values.fill_(127 + round(math.log2(1.0 / (E2M1_DEVIATION * math.sqrt(shape[1] * MXFP4_BLOCK)))))
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

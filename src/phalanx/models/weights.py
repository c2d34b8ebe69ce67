# SPDX-License-Identifier: Apache-2.0
"""Fill a model: from a checkpoint, each rank reading its own slices, or with seeded random values."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import WeightError
from phalanx.models.checkpoint import locate_tensors, opened, read, require_known
from phalanx.models.registry import Model
from phalanx.models.slices import Slice, Sliced
from phalanx.plan import weights as catalog

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes to read), both of this rank, in the model's dtype."""


def slices(model: Model) -> Iterator[Slice]:
    """What this rank's part of a model reads."""
    for module in model.modules():
        if isinstance(module, Sliced):
            yield from module.slices()


def load(model: Model, folder: Path, progress: Progress | None = None) -> None:
    """Read this rank's slices from the safetensors of `folder` into the model, cast to its dtype.

    Raises WeightError before anything is read for a missing file or tensor, or one that the model has no place for; and while
    reading for a truncated file, a shape that contradicts config.json, or a dtype that is not read.
    """
    files = locate_tensors(folder)
    shape = model.shape
    require_known(files, catalog.tensors(shape), tied_head=catalog.HEAD if shape.tie_word_embeddings else None)
    by_file: dict[Path, list[Slice]] = defaultdict(list)
    for part in slices(model):
        if part.name not in files:
            raise WeightError(
                f"{part.name} is missing", held=f"{folder} holds {len(files)} tensors",
                why="config.json implies it", next="check that config.json belongs to these weights",
            )  # fmt: skip
        by_file[files[part.name]].append(part)
    total = sum(part.target.nbytes for parts in by_file.values() for part in parts)
    done = 0
    for file, parts in sorted(by_file.items()):
        with opened(file) as reader:
            for part in parts:
                part.target.copy_(read(reader, part, file))
                done += part.target.nbytes
                if progress is not None:
                    progress(done, total)


def dummy(model: Model, seed: int) -> None:
    """Random weights, made on the model's device. The values depend on the seed and a tensor's name only: any layout of ranks over
    devices of one kind holds parts of the same model.

    Products keep the size of what they are given (standard deviation 1 / sqrt(inputs)), so that activations stay sane.
    """
    by_name: dict[str, list[Slice]] = defaultdict(list)
    for part in slices(model):
        by_name[part.name].append(part)
    for name, parts in by_name.items():
        whole = _random(name, parts[0].shape, seed, like=parts[0].target)
        for part in parts:
            part.target.copy_(whole.narrow(part.dim, part.begin, part.target.shape[part.dim]))


def _random(name: str, shape: tuple[int, ...], seed: int, *, like: Tensor) -> Tensor:
    # A generator on CPU heeds 32 bits of its seed only, so the two are hashed together.
    generator = torch.Generator(like.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    whole = torch.empty(shape, dtype=like.dtype, device=like.device)
    if len(shape) == 2:
        bound = (3.0 / shape[1]) ** 0.5
        return whole.uniform_(-bound, bound, generator=generator)
    center = 0.0 if name.endswith(".bias") else 1.0
    return whole.uniform_(center - 0.1, center + 0.1, generator=generator)

# SPDX-License-Identifier: Apache-2.0
"""The scales of keys and values that a checkpoint brings for a cache in FP8, whatever its configuration says of a cache.

All ranks read those of all layers, so that all of them take the same, or refuse the same.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from phalanx.errors import WeightError
from phalanx.log import get_logger
from phalanx.models.checkpoint import opened, read_scale
from phalanx.models.slices import Scale
from phalanx.plan import weight_tensors as catalog

logger = get_logger(__name__)

UNSET = -1.0
"""What such a scale holds where nobody has found it: vLLM begins with it, and takes 1 where it stays."""

Pair = tuple[float, float]
"""What keys and what values are to be multiplied by when they are read from the cache."""


def read(files: dict[str, Path], layers: int) -> dict[int, Pair]:
    """Of each layer that has other scales than 1. files: those that hold the checkpoint's tensors, by name.

    Raises WeightError where only some layers, or only keys or values, have a scale; where a scale has two names and two values; and
    for values that are not finite and positive (-1, which stands for none, is as if it were not there).
    """
    asked = [(layer, kind, names) for layer in range(layers) for kind, names in catalog.kv_scales(layer).items()]
    held = _values(files, [name for _, _, names in asked for name in names if name in files])
    given = {name: value for name, value in held.items() if value != UNSET}
    if not given:
        told = f"are all {UNSET:g} in the checkpoint, which stands for none" if held else "are not in the checkpoint"
        logger.info("scales of keys and values %s: they go into the FP8 cache as they are", told)
        return {}
    found = {(layer, kind): _chosen(names, given, held) for layer, kind, names in asked}
    logger.info("keys and values go into the FP8 cache with the checkpoint's scales")
    pairs = {layer: (found[layer, "k"], found[layer, "v"]) for layer in range(layers)}
    return {layer: pair for layer, pair in pairs.items() if pair != (1.0, 1.0)}


def _values(files: dict[str, Path], names: list[str]) -> dict[str, float]:
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):  # that of keys and values together is asked for twice
        by_file[files[name]].append(name)
    values: dict[str, float] = {}
    for file, here in sorted(by_file.items()):
        with opened(file) as reader:
            for name in here:
                scale = Scale(name, ((), (1,)), lambda _: None, unset=UNSET)
                values[name] = float(read_scale(reader, scale, file))
    return values


def _chosen(names: tuple[str, ...], given: dict[str, float], held: dict[str, float]) -> float:
    """The scale of one layer's keys, or of its values, by these names of it: the last is that of both together, and counts where
    there is no other."""
    own = [name for name in names[:-1] if name in given] or [name for name in names[-1:] if name in given]
    if not own:
        unset = next((name for name in names if name in held), None)
        raise WeightError(
            f"{names[0]} is missing" if unset is None else f"{unset} holds {UNSET:g}, which stands for no scale",
            held=f"the checkpoint has {next(iter(given))}" + (f" and {len(given) - 1} more" if len(given) > 1 else ""),
            why="with a cache in FP8, keys and values of all layers have scales, or none",
            next="download the checkpoint again, or use kv_cache_dtype='model'",
        )  # fmt: skip
    other = next((name for name in own if given[name] != given[own[0]]), None)
    if other is not None:
        raise WeightError(
            f"{own[0]} and {other} differ", held=f"{given[own[0]]:g} and {given[other]:g}",
            why="they are two names for one scale", next="download the checkpoint again, or use kv_cache_dtype='model'",
        )  # fmt: skip
    return given[own[0]]

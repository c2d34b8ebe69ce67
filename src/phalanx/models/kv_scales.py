# SPDX-License-Identifier: Apache-2.0
"""The scales of keys and values that a checkpoint has for a cache in FP8, whether or not its configuration mentions a cache.

All ranks read the scales of all layers, so that all accept or reject the same.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from phalanx.errors import WeightError
from phalanx.layout import weight_tensors as catalog
from phalanx.log import get_logger
from phalanx.models.checkpoint import Located, opened, read_scale
from phalanx.models.slices import Scale

logger = get_logger(__name__)

UNSET = -1.0
"""The value of a scale that was not calibrated: vLLM initializes with it, and uses 1 where it remains."""

Pair = tuple[float, float]
"""The factors of keys and of values when they are read from the cache."""


def read(files: Located, layers: int) -> dict[int, Pair]:
    """The scales of each layer that has others than 1. files: those of the checkpoint's tensors, by name.

    Raises WeightError where only some layers, or only keys or values, have a scale; where a scale has two names and two values; and
    for values that are not finite and positive (-1 stands for no scale).
    """
    known = [(layer, kind, names) for layer in range(layers) for kind, names in catalog.kv_scales(layer).items()]
    stored = _values(files, [name for _, _, names in known for name in names if name in files])
    calibrated = {name: value for name, value in stored.items() if value != UNSET}
    if not calibrated:
        reason = f"all scales in the checkpoint are {UNSET:g}, which stands for none" if stored else "the checkpoint has no scales"
        logger.info("keys and values are stored in the FP8 cache without scales: %s", reason)
        return {}
    scales = {(layer, kind): _choose(names, calibrated, stored) for layer, kind, names in known}
    logger.info("keys and values are stored in the FP8 cache with the checkpoint's scales")
    pairs = {layer: (scales[layer, "k"], scales[layer, "v"]) for layer in range(layers)}
    return {layer: pair for layer, pair in pairs.items() if pair != (1.0, 1.0)}


def _values(files: Located, names: list[str]) -> dict[str, float]:
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):  # the scale of keys and values together is listed twice
        by_file[files[name].file].append(name)
    values: dict[str, float] = {}
    for file, here in sorted(by_file.items()):
        with opened(file) as reader:
            for name in here:
                scale = Scale(name, ((), (1,)), lambda _: None, unset=UNSET)
                values[name] = float(read_scale(reader, scale, files[name]))
    return values


def _choose(names: tuple[str, ...], calibrated: dict[str, float], stored: dict[str, float]) -> float:
    """The scale of one layer's keys, or of its values, by its possible names: the last is that of both together, and counts where
    there is no other."""
    own = [name for name in names[:-1] if name in calibrated] or [name for name in names[-1:] if name in calibrated]
    if not own:
        unset = next((name for name in names if name in stored), None)
        raise WeightError(
            f"{names[0]} is missing" if unset is None else f"{unset} holds {UNSET:g}, which stands for no scale",
            held=f"the checkpoint has {next(iter(calibrated))}"
            + (f" and {len(calibrated) - 1} more" if len(calibrated) > 1 else ""),
            why="with a cache in FP8, either the keys and values of all layers have scales, or none have",
            next="download the checkpoint again, or use kv_cache_dtype='model'",
        )  # fmt: skip
    other = next((name for name in own if calibrated[name] != calibrated[own[0]]), None)
    if other is not None:
        raise WeightError(
            f"{own[0]} and {other} differ", held=f"{calibrated[own[0]]:g} and {calibrated[other]:g}",
            why="they are two names for one scale", next="download the checkpoint again, or use kv_cache_dtype='model'",
        )  # fmt: skip
    return calibrated[own[0]]

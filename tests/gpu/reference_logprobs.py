# SPDX-License-Identifier: Apache-2.0
"""Reference log probabilities: a model on a CPU, in plain torch, over as many in-process ranks as the engine has.

Weights and activations are quantized as the engine's are (row-parallel weights of a rank have scales of their own, so the layout
matters). Everything else is in the given dtype: fp32 gives the exact result, 16 bit the effect of rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.fp8_error import BLOCK, prefill
from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.models import registry, weights
from phalanx.models.cache import empty_caches
from phalanx.models.decoder import Decoder
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.slices import LayerContext

CPU = torch.device("cpu")
TOKENS_AT_ONCE = 4096

Change = Callable[[Decoder], object]
"""Applied to each rank's model once it is loaded."""

GEMMS: dict[str, Callable[[Any], Any]] = {
    "qkv": lambda layer: layer.self_attn.qkv_proj,
    "out": lambda layer: layer.self_attn.o_proj,
    "gate_up": lambda layer: layer.mlp.gate_up_proj,
    "down": lambda layer: layer.mlp.down_proj,
}
"""The GEMMs of a decoder layer, by name."""


@torch.inference_mode()
def log_probabilities(
    folder: Path, rows: Sequence[Sequence[int]], *, tp: int, dtype: torch.dtype, change: Change | None = None, **options: bool
) -> list[Tensor]:
    """Log probabilities of the next token at each token of each row: [tokens, vocabulary] fp32. options: of `registry.build`, for
    FP8."""
    shape = ModelShape.from_folder(folder)
    world = LocalWorld(tp)

    def load(group: Group) -> Decoder:
        model = registry.build(shape, range(shape.num_layers), LayerContext(group, dtype, CPU, **options))
        weights.load(model, folder)
        if change is not None:
            change(model)
        return model

    models = world.run(load)
    logprobs_of: dict[int, Tensor] = {}
    for part in _parts(rows):
        read = [list(rows[index]) for index in part]

        def act(group: Group, read: list[list[int]] = read) -> Tensor:
            model = models[group.rank]
            batch, blocks = prefill(read, CPU)
            batch.attention = select_backend(CPU, dtype, shape.head_dim, shape.latent).plan(batch)
            caches = empty_caches(model.declared_caches(), blocks, BLOCK, CPU)
            logits: Tensor = model(batch, caches)
            return logits

        each = torch.split(world.run(act)[0].log_softmax(-1), [len(row) for row in read])
        logprobs_of.update(zip(part, each, strict=True))
    return [logprobs_of[index] for index in range(len(rows))]


def _parts(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The rows' numbers, sorted by length, in parts of a bounded number of tokens."""
    parts: list[list[int]] = []
    count = TOKENS_AT_ONCE
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        if count + len(rows[index]) > TOKENS_AT_ONCE:
            parts.append([])
            count = 0
        parts[-1].append(index)
        count += len(rows[index])
    return parts


def scaled(gemm: str, by: float) -> Change:
    """A change that multiplies the output of one GEMM of every layer by `by`."""

    def change(model: Decoder) -> None:
        for layer in model.layers:
            linear = GEMMS[gemm](layer)
            getattr(linear.method, "weight_scale", linear.method.weight).mul_(by)

    return change


def sensitivities(folder: Path, rows: Sequence[Sequence[int]], exact: Sequence[Tensor], step: float = 0.01) -> dict[str, Tensor]:
    """Derivatives of the log probabilities by the scale of each GEMM: [all tokens, vocabulary]. exact: of the unquantized model in
    fp32, so that the difference is smooth."""
    logprobs = torch.cat(list(exact))
    return {
        gemm: torch.cat(
            log_probabilities(folder, rows, tp=1, dtype=torch.float32, change=scaled(gemm, 1 + step))
        ).sub_(logprobs).div_(step)
        for gemm in GEMMS
    }  # fmt: skip

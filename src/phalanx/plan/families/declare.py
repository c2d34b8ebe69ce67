# SPDX-License-Identifier: Apache-2.0
"""One declared tensor of a checkpoint: its name, its whole shape, and how tensor and expert parallelism split it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.plan import shard

Split = Literal["replicated", "column", "row", "heads", "kv_heads", "vocabulary"]
"""Megatron's terms for a weight [out, in] (arXiv 1909.08053): "column" splits `out` (dim 0), "row" splits `in` (dim 1). "heads" and
"kv_heads" split dim 0 by whole attention heads, the latter with copies where tp exceeds them. "vocabulary" splits dim 0, padded."""

MXFP4_BLOCK = 32
"""Values that share a scale (OCP Microscaling formats 1.0)."""
BLOCKS, SCALES = "_blocks", "_scales"
"""What is appended to the name of a tensor in MXFP4: of its values, uint8 [..., blocks, 16], and of their scales, [..., blocks]."""

Part = Literal["attention", "mlp", "experts", "shared", "router", "norm", "embedding", "head"]


@dataclass(frozen=True)
class Tensor:
    """name: as the checkpoint has it, with {expert} for each of `experts` tensors of this shape (0: it is none of an expert).
    gemm: the GEMM that it belongs to; tensors of one name are one GEMM, as "qkv". heads, kv_heads: for the splits by heads. unit:
    of a dim that is split, elements that stay together, so that ranks may hold unequal parts; 0: ranks hold equal parts. form: how
    a tensor of all experts is on disk, [experts, *shape], with its last two dims "transposed", or in "mxfp4". kept: the dtype in
    which a rank holds it: by the quantization where there is one, never in fewer than "16 bit", or in "fp32"."""

    name: str
    shape: tuple[int, ...]
    split: Split
    part: Part
    gemm: str = ""
    experts: int = 0
    heads: int = 0
    kv_heads: int = 0
    unit: int = 0
    form: Literal["plain", "transposed", "mxfp4"] = "plain"
    kept: Literal["quantized", "16 bit", "fp32"] = "quantized"

    def expand(self) -> Iterator[str]:
        """The names on disk: one for each expert where the name says {expert}, else one tensor [experts, ...]."""
        split = self.experts and "{expert}" in self.name
        yield from (self.name.format(expert=number) for number in range(self.experts)) if split else (self.name,)

    def on_disk(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each tensor of a checkpoint. MXFP4 has two values in a byte, and a scale for 32 of them."""
        if not self.experts or "{expert}" in self.name:
            yield from ((name, self.shape) for name in self.expand())
        elif self.form == "mxfp4":
            out, inputs = self.shape
            yield f"{self.name}{BLOCKS}", (self.experts, out, -(-inputs // MXFP4_BLOCK), MXFP4_BLOCK // 2)
            yield f"{self.name}{SCALES}", (self.experts, out, -(-inputs // MXFP4_BLOCK))
        else:
            yield self.name, (self.experts, *(self.shape[::-1] if self.form == "transposed" else self.shape))

    @property
    def elements(self) -> int:
        """Of all its experts."""
        return math.prod(self.shape) * max(self.experts, 1)

    def local(self, tp: int) -> tuple[int, ...]:
        """The shape on one of tp ranks, the largest where they differ. Raises LayoutError where tp does not divide."""
        if self.split == "replicated" or (tp == 1 and self.split != "vocabulary"):
            return self.shape
        first, *rest = self.shape
        if self.split == "vocabulary":
            return (len(shard.vocabulary(first, tp, 0)), *rest)
        if self.unit:
            dim = 1 if self.split == "row" else 0
            part = len(shard.in_runs(self.name, self.shape[dim], self.unit, tp, 0))
            return (*self.shape[:dim], part, *self.shape[dim + 1 :])
        if self.split == "row":
            shard.require_divides(f"columns of {self.name}", rest[0], tp)
            return (first, rest[0] // tp, *rest[1:])
        if self.split == "kv_heads":
            own_heads = shard.heads(self.heads, self.kv_heads, tp, 0)
            return (first // self.kv_heads * len(own_heads.kv), *rest)
        shard.require_divides("num_attention_heads" if self.split == "heads" else f"rows of {self.name}", self.heads or first, tp)
        return (first // tp, *rest)

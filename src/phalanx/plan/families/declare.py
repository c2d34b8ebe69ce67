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

Part = Literal["attention", "mlp", "experts", "shared", "router", "norm", "embedding", "head"]


@dataclass(frozen=True)
class Tensor:
    """name: as the checkpoint has it, with {expert} for each of `experts` tensors of this shape (0: it is none of an expert).
    gemm: the GEMM that it belongs to; tensors of one name are one GEMM, as "qkv". heads, kv_heads: for the splits by heads."""

    name: str
    shape: tuple[int, ...]
    split: Split
    part: Part
    gemm: str = ""
    experts: int = 0
    heads: int = 0
    kv_heads: int = 0

    def expand(self) -> Iterator[str]:
        """The names on disk: one for each expert where the name says {expert}, else one tensor [experts, ...]."""
        split = self.experts and "{expert}" in self.name
        yield from (self.name.format(expert=number) for number in range(self.experts)) if split else (self.name,)

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
        if self.split == "row":
            shard.require_divides(f"columns of {self.name}", rest[0], tp)
            return (first, rest[0] // tp, *rest[1:])
        if self.split == "kv_heads":
            own_heads = shard.heads(self.heads, self.kv_heads, tp, 0)
            return (first // self.kv_heads * len(own_heads.kv), *rest)
        shard.require_divides("num_attention_heads" if self.split == "heads" else f"rows of {self.name}", self.heads or first, tp)
        return (first // tp, *rest)

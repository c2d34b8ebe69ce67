# SPDX-License-Identifier: Apache-2.0
"""One declared tensor of a checkpoint: its name, its whole shape, and how tensor and expert parallelism split it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import phalanx.layout.shard as shard

Split = Literal["replicated", "column", "row", "heads", "kv_heads", "vocabulary"]
"""Megatron's terms for a weight [out, in] (arXiv 1909.08053): "column" splits `out` (dim 0), "row" splits `in` (dim 1). "heads" and
"kv_heads" split dim 0 by whole attention heads, the latter with copies where tp exceeds them. "vocabulary" splits dim 0, padded."""

Part = Literal["attention", "mlp", "experts", "shared", "router", "norm", "embedding", "layer_inputs", "head"]


class Fused(NamedTuple):
    """Another place of a tensor on disk: in `name`, which has `rows` rows, from row `row` on.

    Of a tensor of each expert, transformers 5 writes all experts into one, [experts, rows, columns]. Phi-3 has the projections of
    one input in one tensor. A tensor that is alone there has another name only. transposed: [experts, columns, rows] (Llama-4), or
    as without it, where the shape says so: transformers 5 may write it so; or [columns, rows] (Ernie 4.5 VL)."""

    name: str
    rows: int
    row: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class WeightTensor:
    """A tensor of a checkpoint.

    name: as the checkpoint has it, with {expert} for each of `experts` tensors of this shape (0: it is none of an expert).
    gemm: the GEMM that it belongs to; tensors of one name are one GEMM, as "qkv".
    heads, kv_heads: for the splits by heads.
    unit: of a dim that is split, elements that stay together, so that ranks may hold unequal parts; 0: ranks hold equal parts.
    transposed: the last two dims of a tensor of all experts, [experts, *shape], are so on disk.
    kept: the dtype in which a rank holds it: by the quantization where there is one, never in fewer than "16 bit", or in "fp32".
    fused: where a checkpoint has it that does not have `name`.
    sections: of dim 0, split by heads: the sizes of its sections, of each of which a rank has its heads' part. by_head: each head
    has all of these sections, and a rank has them one below the other. kv_sections: the numbers of those that KV heads have, with
    copies where tp exceeds them.
    """

    name: str
    shape: tuple[int, ...]
    split: Split
    part: Part
    gemm: str = ""
    experts: int = 0
    heads: int = 0
    kv_heads: int = 0
    unit: int = 0
    transposed: bool = False
    kept: Literal["quantized", "16 bit", "fp32"] = "quantized"
    fused: Fused | None = None
    sections: tuple[int, ...] = ()
    by_head: bool = False
    kv_sections: tuple[int, ...] = ()

    def expand(self) -> Iterator[str]:
        """The names on disk: one for each expert where the name says {expert}, else one tensor [experts, ...]."""
        split = self.experts and "{expert}" in self.name
        yield from (self.name.format(expert=number) for number in range(self.experts)) if split else (self.name,)

    def on_disk(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each tensor of a checkpoint that is not quantized."""
        if not self.experts or "{expert}" in self.name:
            yield from ((name, self.shape) for name in self.expand())
        else:
            yield self.name, (self.experts, *(self.shape[::-1] if self.transposed else self.shape))

    @property
    def elements(self) -> int:
        """Of all its experts."""
        return math.prod(self.shape) * max(self.experts, 1)

    @property
    def fused_shape(self) -> tuple[int, ...]:
        """Of the tensor that `fused` names."""
        assert self.fused is not None
        rows = self.fused.rows, *self.shape[1:]
        return (*((self.experts,) if self.experts else ()), *(rows[::-1] if self.fused.transposed else rows))

    def parts(self, tp: int, index: int) -> tuple[tuple[range, ...], ...]:
        """What rank `index` of tp ranks holds, one below the other: of each part a range for each dim. Without the padding of the
        vocabulary. Raises LayoutError where tp does not divide."""
        every = tuple(map(range, self.shape))
        if self.split == "replicated":
            return (every,)
        dim = 1 if self.split == "row" else 0
        return tuple((*every[:dim], own, *every[dim + 1 :]) for own in self._ranges(dim, tp, index))

    def _ranges(self, dim: int, tp: int, index: int) -> list[range]:
        size = self.shape[dim]
        if self.split == "vocabulary":
            own = shard.vocabulary(size, tp, index)
            return [range(min(own.start, size), min(own.stop, size))]
        if self.unit:
            return [shard.in_runs(self.name, size, self.unit, tp, index)]
        if self.sections:
            return list(self._of_sections(shard.heads(self.heads, self.kv_heads or self.heads, tp, index)))
        if self.split in ("heads", "kv_heads"):
            count = self.kv_heads if self.split == "kv_heads" else self.heads
            heads = shard.heads(self.heads, self.kv_heads or self.heads, tp, index)
            runs = shard.runs(heads.kv) if self.split == "kv_heads" else [heads.q]
            return [range(run.start * size // count, run.stop * size // count) for run in runs]
        return [shard.even(f"{'columns' if dim else 'rows'} of {self.name}", size, tp, index)]

    def _of_sections(self, heads: shard.HeadShard) -> Iterator[range]:
        """The rows of these heads in each section."""
        begin = 0
        for number, size in enumerate(self.sections):
            if self.by_head:
                starts = (head * sum(self.sections) + begin for head in heads.q)
                yield from (range(start, start + size) for start in starts)
            else:
                in_kv = number in self.kv_sections
                each = size // (self.kv_heads if in_kv else self.heads)
                for run in shard.runs(heads.kv) if in_kv else [heads.q]:
                    yield range(begin + run.start * each, begin + run.stop * each)
            begin += size

    def local(self, tp: int) -> tuple[int, ...]:
        """The shape on one of tp ranks, the largest where they differ. Raises LayoutError where tp does not divide."""
        if self.split == "vocabulary":
            return (len(shard.vocabulary(self.shape[0], tp, 0)), *self.shape[1:])
        parts = self.parts(tp, 0)
        return (sum(len(part[0]) for part in parts), *map(len, parts[0][1:]))

# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP4, of gpt-oss. Their bits are arranged while they are read, as kernels widen them (`kernels.moe.packing`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.experts import Experts
from phalanx.errors import ModelError, WeightError
from phalanx.kernels.moe import packing
from phalanx.kernels.moe.reference import MXFP4_BLOCK
from phalanx.layout.families import WeightTensor
from phalanx.layout.weight_tensors import BLOCKS, SCALES
from phalanx.models.layers.expert_methods.stacked import StackedExperts, StackedLinear
from phalanx.models.slices import LayerContext, Slice

_NAN_SCALE = 255  # of e8m0
LARGEST_SCALE = 128
"""For a larger one, the factor of `kernels.moe.mxfp4` is no bf16."""


class Mxfp4Linear(StackedLinear):
    """weight uint8 [experts * rows, columns / 2], packed and tiled, with weight_scale uint8 [experts * rows, columns / 32], padded
    with zeros to a multiple of 4, and tiled."""

    def _allocate(self, context: LayerContext) -> None:
        rows = len(self.local) * self.rows
        self.weight = context.weight(rows, self.columns // 2, dtype=torch.uint8)
        scales = -(-self.columns // (packing.SCALES_IN_WORD * MXFP4_BLOCK)) * packing.SCALES_IN_WORD
        self.weight_scale = context.weight(rows, scales, dtype=torch.uint8)
        self.weight_scale.zero_()

    def _of_expert(self, one: slice, rows: slice, columns: slice, here: slice) -> Iterator[Slice]:
        assert self.weight_scale is not None
        blocks = slice(columns.start // MXFP4_BLOCK, columns.stop // MXFP4_BLOCK)
        (out, inputs), name = self.tensor.shape, self.tensor.name
        shape = self.tensor.experts, out, inputs // MXFP4_BLOCK
        yield Slice(
            f"{name}{BLOCKS}", (*shape, MXFP4_BLOCK // 2), self.weight[here], at=(one, rows, blocks, slice(None)),
            arrange=lambda values: packing.tiled(self.in_rows(packing.packed(values[0].flatten(1)))),
        )  # fmt: skip
        yield Slice(
            f"{name}{SCALES}", shape, self.weight_scale[here], at=(one, rows, blocks),
            arrange=lambda values: self._tiled(self.in_rows(self._checked(values[0]))),
        )  # fmt: skip

    def _tiled(self, scales: Tensor) -> Tensor:
        assert self.weight_scale is not None
        return packing.tiled(F.pad(scales, (0, self.weight_scale.shape[1] - scales.shape[1])), packing.SCALES_IN_WORD)

    def _checked(self, scale: Tensor) -> Tensor:
        largest = int(scale.max())
        if largest > LARGEST_SCALE:
            too_large = f"kernels take values up to 6 * 2^{LARGEST_SCALE - 127}, and those of trained experts are far below"
            raise WeightError(
                f"{self.tensor.name}{SCALES} holds a scale of {largest}",
                why="that is NaN in e8m0" if largest == _NAN_SCALE else too_large, next="download the checkpoint again",
            )  # fmt: skip
        return scale


class Mxfp4Experts(StackedExperts):
    """In MXFP4. Raises ModelError for sizes and a dtype that it cannot have."""

    linear = Mxfp4Linear

    def __init__(
        self, gate_up: Sequence[WeightTensor], down: WeightTensor, local: Sequence[int], experts: Experts, context: LayerContext
    ) -> None:
        for name, size in zip(("intermediate_size", "hidden_size"), down.shape[::-1], strict=True):
            if size % MXFP4_BLOCK:
                raise ModelError(
                    f"experts in MXFP4 have {name}={size}, no multiple of {MXFP4_BLOCK}", why=f"{MXFP4_BLOCK} values share a scale",
                    next="check that config.json belongs to these weights",
                )  # fmt: skip
        if context.dtype == torch.float16:
            raise ModelError(
                "experts in MXFP4 cannot run in fp16", why="their scales exceed its range", next="use dtype='bf16'",
            )  # fmt: skip
        super().__init__(gate_up, down, local, experts, context)

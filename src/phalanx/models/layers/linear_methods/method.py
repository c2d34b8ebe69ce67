# SPDX-License-Identifier: Apache-2.0
"""`LinearMethod`: all that a linear layer knows of its weight. The next one is a file beside this one, and the quantization that
names it (`Quantization.linear_method`).

A layer asks for a fusion, and the method may refuse it: then the layer runs the GEMM and the op behind it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.kernels.scaled_tensors import GemvArgs, Unscaled
from phalanx.models.layers.activation import Activation, InputQuantizer
from phalanx.models.slices import LayerContext, Scale, Slice, Sliced, WeightPart

Fusion = Literal["bias", "gemv", "reduce_scatter"]
"""What a method may fuse to the GEMM of a layer:

bias: a sum over ranks contains the bias of one of them; else it is added to the sum.
gemv: of one token, with the op behind (`LinearMethod.gemv_args`).
reduce_scatter: the output is written into the memory of the ranks that sum it (`LinearMethod.write_into`).
"""


class GroupedWeight(NamedTuple):
    """A weight as the grouped GEMMs of experts read it, see `ExpertTensors`. begin: the column of its block of scales that is the
    first here. quantizes: inputs are quantized, too."""

    weight: Tensor
    scale: Tensor | None = None
    input_scale: Tensor | None = None
    begin: int = 0
    quantizes: bool = False


class LinearMethod(Sliced, ABC):
    """The weight [out, in] of one linear layer on this rank: `parts`, one below the other.

    input_quantizer: how the op before quantizes the input; None: the method takes 16 or 32 bit, and quantizes itself if it does.
    """

    input_quantizer: InputQuantizer | None = None

    def __init__(self, parts: Sequence[WeightPart], context: LayerContext) -> None:
        super().__init__()
        self.parts, self.dtype = tuple(parts), context.dtype
        self.out_features, self.in_features = sum(len(part.rows) for part in parts), len(parts[0].columns)

    @abstractmethod
    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times the weight, plus bias [out] -> [T, out]."""

    @abstractmethod
    def plain_multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        """As `multiply`, by one GEMM of torch's with the dequantized weight, and the input as the method quantizes it. It is slow,
        and what the start's self check compares `multiply` with."""

    def plain_rows(self, x: Activation, rows: slice) -> Tensor:
        """`plain_multiply` without a bias, of these outputs alone [T, rows]: quantized methods dequantize no others. rows: begins
        with a multiple of 64."""
        return self.plain_multiply(x)[:, rows]

    def unscaled(self, x: Activation, bias: Tensor | None = None) -> Tensor | Unscaled:
        """`multiply` for a reader that can apply scales to the output: without them where that is faster."""
        return self.multiply(x, bias)

    def for_sum(self, x: Activation, bias: Tensor | None, group: Group) -> Tensor | Unscaled:
        """`unscaled` for the sum over the ranks of a group of more than one. bias: of methods that fuse it."""
        return self.unscaled(x, bias)

    def fuses(self, fusion: Fusion) -> bool:
        """Whether the method offers a fusion."""
        return False

    def gemv_args(self, x: Activation, bias: Tensor | None) -> GemvArgs:
        """The operands of a GEMV of x [1, in], for a kernel that does what follows, too."""
        raise NotImplementedError

    def write_into(self, x: Activation, bias: Tensor | None, targets: Sequence[tuple[slice, Tensor]]) -> None:
        """`multiply`, of each of these rows of x into the tensor [rows, out] beside them."""
        raise NotImplementedError

    @abstractmethod
    def reorder_rows(self, rows: list[int]) -> None:
        """Put the weight's rows, which have been read, into this order."""

    def input_scales(self, names: Iterable[str]) -> Iterator[Scale]:
        """What to read for a static scale of the input, which covers these checkpoint layers, too."""
        return iter(())

    @classmethod
    def describe(cls, context: LayerContext) -> str | None:  # noqa: ARG003
        """A log line about a model with this method, where there is something to say."""
        return None

    def plain_slices(self, take: Callable[[int, Tensor], None]) -> Iterator[Slice]:
        """The weight in 16 bit, where it is quantized as it comes: `take` gets the number of each part, and its values."""
        for number, part in enumerate(self.parts):
            at = slice(part.rows.start, part.rows.stop), slice(part.columns.start, part.columns.stop)
            like = torch.empty(len(part.rows), len(part.columns), dtype=self.dtype, device="meta")
            yield Slice(f"{part.name}.weight", part.shape, like, at=at, take=partial(take, number), stacked=part.stacked)

    def _placed(self) -> Iterator[tuple[WeightPart, slice]]:
        """Each part, and its rows in the weight."""
        at = 0
        for part in self.parts:
            yield part, slice(at, at + len(part.rows))
            at += len(part.rows)


def weight_slice(part: WeightPart, target: Tensor, scale: Tensor | None = None) -> Slice:
    """What to read for the values of a part. scale: see `Slice`."""
    dim = 0 if len(part.columns) == part.shape[1] else 1
    begin = (part.rows if dim == 0 else part.columns).start
    return Slice(f"{part.name}.weight", part.shape, target, begin, dim, scale, part.stacked)

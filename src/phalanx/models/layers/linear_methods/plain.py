# SPDX-License-Identifier: Apache-2.0
"""Linear layers without their kernels: inside `plain_linears` each multiplies by `LinearMethod.plain_multiply`; inside
`compared_linears` by its kernels, and the difference is noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.comm.group import Group
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.linear_methods.method import LinearMethod
from phalanx.models.slices import Slice


@dataclass
class Difference:
    """What the kernels of a layer gave beside its plain multiplication. error: of the worst row, relative to the row's norm. rows:
    of that call. first: of these, the first whose error is at least half of that."""

    name: str
    method: str
    error: float
    rows: int
    first: int

    def __str__(self) -> str:
        return f"{self.name} ({self.method}), from row {self.first} of {self.rows} on, relative error {self.error:.2g}"


class PlainLinear(LinearMethod):
    """`method` without its kernels and fusions. note: gets what the kernels give instead, and their output is used."""

    def __init__(self, method: LinearMethod, note: Callable[[PlainLinear, Tensor, Tensor], None] | None = None) -> None:
        nn.Module.__init__(self)
        self.parts, self.dtype = method.parts, method.dtype
        self.out_features, self.in_features = method.out_features, method.in_features
        self.method, self._note = method, note

    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        return self._output(x, bias, lambda: self.method.multiply(x, bias))

    def unscaled(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        return self._output(x, bias, lambda: self.method.unscaled(x, bias))

    def for_sum(self, x: Activation, bias: Tensor | None, group: Group) -> Tensor:
        return self._output(x, bias, lambda: self.method.for_sum(x, bias, group))

    def _output(self, x: Activation, bias: Tensor | None, kernel: Callable[[], Tensor | Unscaled]) -> Tensor:
        plain = self.plain_multiply(x, bias)
        if self._note is None:
            return plain
        output = kernel()
        output = output.to_fp32().to(plain.dtype) if isinstance(output, Unscaled) else output
        self._note(self, output, plain)
        return output

    def plain_multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        return self.method.plain_multiply(x, bias)

    def fuses(self, fusion: str) -> bool:
        return fusion == "bias" and self.method.fuses("bias")

    def reorder_rows(self, rows: list[int]) -> None:
        raise NotImplementedError

    def slices(self) -> Iterator[Slice]:
        return iter(())


Linear = ColumnParallelLinear | RowParallelLinear


def _linears(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


@contextmanager
def _replaced(layers: Iterable[Linear], method: Callable[[LinearMethod], LinearMethod]) -> Iterator[None]:
    before = [(layer, layer.method) for layer in layers]
    for layer, own in before:
        layer.method = method(own)
    try:
        yield
    finally:
        for layer, own in before:
            layer.method = own


@contextmanager
def plain_linears(model: nn.Module) -> Iterator[None]:
    """Inside, linear layers of the model multiply in plain torch. Graphs that are captured stay as they are."""
    with _replaced(_linears(model), PlainLinear):
        yield


@contextmanager
def compared_linears(model: nn.Module) -> Iterator[Callable[[], Sequence[Difference]]]:
    """Inside, linear layers run their kernels without fusions, and their plain multiplication. Yields what tells the worst
    difference of each layer, in the order in which they run."""
    worst: dict[str, Difference] = {}

    def note(layer: PlainLinear, output: Tensor, plain: Tensor) -> None:
        errors = (output - plain).float().norm(dim=-1) / plain.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        errors = errors.nan_to_num(torch.inf, torch.inf)
        error, name = float(errors.max()), layer.parts[0].name
        if name not in worst or error > worst[name].error:
            first = int((errors >= error / 2).nonzero()[0])
            worst[name] = Difference(name, type(layer.method).__name__, error, len(errors), first)

    with _replaced(_linears(model), lambda own: PlainLinear(own, note)):
        yield lambda: list(worst.values())

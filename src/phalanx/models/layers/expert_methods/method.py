# SPDX-License-Identifier: Apache-2.0
"""`ExpertMethod`: all that a block of experts knows of its weights, as `LinearMethod` is for a linear layer. The next one is a file
beside this one, and the quantization that names it (`Quantization.expert_method`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.config.experts import Experts
from phalanx.kernels.moe.tensors import ExpertTensors
from phalanx.layout.families import WeightTensor
from phalanx.models.layers.activation import InputQuantizer
from phalanx.models.slices import LayerContext, Slice, Sliced


class ExpertMethod(Sliced, ABC):
    """The projections gate and up, and down, of the experts of one layer that this rank holds.

    input_quantizer: how the norm before the block quantizes the experts' input; None: it does not.
    """

    input_quantizer: InputQuantizer | None = None

    @abstractmethod
    def __init__(
        self, gate_up: Sequence[WeightTensor], down: WeightTensor, local: Sequence[int], experts: Experts, context: LayerContext
    ) -> None:
        """gate_up, down: the declared tensors. local: the experts whose weights are here. Weights are uninitialized."""
        super().__init__()

    @abstractmethod
    def tensors(self, first: int) -> ExpertTensors:
        """The experts as the kernels take them. first: the number of the first one, by which tokens are routed to it."""

    def slices(self) -> Iterator[Slice]:
        """None: the methods of its projections read the weights."""
        return iter(())

    def by_expert(self, count: int) -> list[Tensor]:
        """All that belongs to one of the `count` experts, as bytes: views [count, bytes]."""
        weights = (weight.detach() for weight in self.parameters() if weight.dim())
        return [weight.view(count, -1).view(torch.uint8) for weight in weights]

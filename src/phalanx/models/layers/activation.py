# SPDX-License-Identifier: Apache-2.0
"""What layers hand to each other: activations in 16 or 32 bit, or quantized for a layer that takes that."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from phalanx.kernels.scaled_tensors import Quantized

Activation = Tensor | Quantized
"""The input of a linear layer."""


class NormAndQuantized(NamedTuple):
    """A norm [T, size] for a reader in 16 bit, as a router is, and the same quantized for the layer beside it."""

    norm: Tensor
    quantized: Quantized


NormOutput = Activation | NormAndQuantized
"""What a norm gives to the block behind it."""


class InputQuantizer(Protocol):
    """How the op before a linear layer, a norm or SiLU, quantizes the layer's input to e4m3.

    scale: of all inputs, () fp32; None: the op computes one for each token.
    """

    scale: Tensor | None

    def quantize(self, x: Activation) -> Quantized:
        """x [T, in] quantized; x itself where it is."""

    def with_scale(self, values: Tensor, scale: Tensor | None) -> Quantized:
        """values [T, in] e4m3, quantized with this `scale`, or with `scale` [T, 1] where it is None."""

# SPDX-License-Identifier: Apache-2.0
"""Inputs of Mamba-2, and requests that keep their states from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.config.mamba import Mamba2
from phalanx.kernels.mamba2.reference import MambaStates, MambaWeights
from tests.support.kernels_gated_delta import Slots

SIZES = Mamba2((), heads=4, head_dim=24, groups=2, state_dim=20, conv=4)


def weights(sizes: Mamba2 = SIZES, dtype: torch.dtype = torch.float32, device: str = "cpu") -> MambaWeights:
    """Decays from a few tokens to hundreds."""
    generator, channels = torch.Generator().manual_seed(7), sum(sizes.sections)
    conv, bias = torch.randn(channels, 1, sizes.conv, generator=generator) / 2, torch.randn(channels, generator=generator)
    a_log, dt_bias = torch.linspace(-5.0, 1.0, sizes.heads), torch.linspace(-1.0, 1.0, sizes.heads)
    each = conv.to(dtype), bias.to(dtype), a_log, torch.linspace(-1.0, 2.0, sizes.heads), dt_bias
    return MambaWeights(*(part.to(device) for part in each))


def inputs(tokens: int, sizes: Mamba2 = SIZES, dtype: torch.dtype = torch.float32) -> Tensor:
    """What in_proj gives of so many tokens."""
    return torch.randn(tokens, sizes.inner + sum(sizes.sections) + sizes.heads).to(dtype)


class Requests(Slots):
    """The states of slots. They hold NaN before a request begins there."""

    def __init__(self, slots: int, sizes: Mamba2 = SIZES, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__(slots, device)
        self.sizes, self.weights = sizes, weights(sizes, dtype, device)
        before, (inner, of_b, of_c) = sizes.conv - 1, sizes.sections
        shapes = (before, inner), (before, of_b + of_c), (sizes.heads, sizes.state_dim, sizes.head_dim)
        self.states = MambaStates(*(torch.full((slots, *shape), float("nan"), device=device) for shape in shapes))

    def step(
        self, mamba2: Callable[..., Tensor], rows: Sequence[tuple[int, Tensor]], *, padding: int = 0,
        absent: tuple[int, int] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """rows: (slot, inputs) of their next tokens. padding, absent: see `Slots.batch`. Returns the rows' outputs."""
        counts = {slot: len(mixed) for slot, mixed in rows}
        state_rows = self.batch(counts, padding=padding, absent=absent)
        out = mamba2(self.padded([mixed for _, mixed in rows], padding), self.sizes, self.weights, self.states, state_rows)
        return list(torch.split(out[: sum(counts.values())], list(counts.values())))

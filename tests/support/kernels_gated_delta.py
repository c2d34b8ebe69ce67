# SPDX-License-Identifier: Apache-2.0
"""Inputs of the gated delta rule, and requests that keep their states from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.config.gated_delta import GatedDelta
from phalanx.kernels.gated_delta.dispatch import count_chunks, max_chunks
from phalanx.kernels.gated_delta.reference import DeltaWeights, StateRows

HEADS = GatedDelta((), key_heads=2, value_heads=4, key_dim=16, value_dim=24, conv=4)
TAPS = 4


def weights(heads: GatedDelta = HEADS, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    """Decays from a few tokens to hundreds."""
    generator = torch.Generator().manual_seed(7)
    conv = torch.randn(sum(heads.sections), 1, TAPS, generator=generator) / 2
    a_log, dt_bias = torch.linspace(-5.0, 0.0, heads.value_heads), torch.linspace(-1.0, 1.0, heads.value_heads)
    norm = torch.rand(heads.value_dim, generator=generator) + 0.5
    return DeltaWeights(conv.to(dtype), a_log, dt_bias, norm.to(dtype), 1e-6)


def inputs(tokens: int, heads: GatedDelta = HEADS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(mixed, ba) of so many tokens."""
    width = sum(heads.sections) + heads.value_heads * heads.value_dim
    return torch.randn(tokens, width).to(dtype), torch.randn(tokens, 2 * heads.value_heads).to(dtype)


class Requests:
    """The states of slots. They hold NaN before a request begins there."""

    def __init__(self, slots: int, heads: GatedDelta = HEADS, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.heads, self.weights, self.device = heads, weights(heads, dtype), torch.device(device)
        self.weights = DeltaWeights(*(part.to(device) for part in self.weights[:4]), self.weights.eps)
        self.conv = torch.full((slots, TAPS - 1, sum(heads.sections)), float("nan"), device=device)
        self.state = torch.full((slots, heads.value_heads, heads.key_dim, heads.value_dim), float("nan"), device=device)
        self.lengths = [0] * slots

    def begin(self, slot: int) -> None:
        """Another request takes the slot, which keeps what is there."""
        self.lengths[slot] = 0

    def step(
        self, gated_delta: Callable[..., Tensor], rows: Sequence[tuple[int, Tensor, Tensor]], *, padding: int = 0,
        absent: tuple[int, int] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """rows: (slot, mixed, ba) of their next tokens, those with one token first. padding: tokens of no row behind them. absent:
        the batch is fixed, as a graph's, with so many decode rows and prefill rows that are none, of slot 0: see `Batch.fixed`.
        Returns the rows' outputs."""
        counts = [len(mixed) for _, mixed, _ in rows]
        decodes = next((number for number, count in enumerate(counts) if count > 1), len(counts))
        total = sum(counts)
        for slot, mixed, _ in rows:
            self.lengths[slot] += len(mixed)
        slots, lengths = [slot for slot, _, _ in rows], [self.lengths[slot] for slot, _, _ in rows]
        starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
        if absent is not None:
            more, behind = absent
            slots = slots[:decodes] + [0] * more + slots[decodes:] + [0] * behind
            lengths = lengths[:decodes] + [0] * more + lengths[decodes:] + [0] * behind
            starts = starts[:decodes] + [decodes] * more + starts[decodes:] + [total] * behind
            decodes += more
        mixed, ba = (torch.cat([row[part] for row in rows]) for part in (1, 2))
        mixed, ba = (torch.cat((each, each.new_full((padding, each.shape[1]), float("nan")))) for each in (mixed, ba))
        prefills = len(slots) - decodes
        chunks = count_chunks(starts, decodes) if absent is None else max_chunks(total + padding, prefills)
        state_rows = StateRows(
            torch.tensor(slots, device=self.device), torch.tensor(starts, dtype=torch.int32, device=self.device),
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            torch.tensor([1] * total + [-1] * padding, device=self.device), decodes, chunks, starts, lengths,
        )  # fmt: skip
        out = gated_delta(
            mixed.to(self.device), ba.to(self.device), self.heads, self.weights, self.conv, self.state, state_rows
        )  # fmt: skip
        return list(torch.split(out[:total], counts))

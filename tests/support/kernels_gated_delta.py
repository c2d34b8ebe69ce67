# SPDX-License-Identifier: Apache-2.0
"""Inputs of the gated delta rule, and requests that keep their states from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


class Slots:
    """Requests in slots, and how long each is."""

    def __init__(self, slots: int, device: str) -> None:
        self.device, self.lengths = torch.device(device), [0] * slots

    def begin(self, slot: int) -> None:
        """Another request takes the slot, which keeps what is there."""
        self.lengths[slot] = 0

    def batch(self, rows: Mapping[int, int], *, padding: int = 0, absent: tuple[int, int] | None = None) -> StateRows:
        """rows: slot -> number of its next tokens, those with one token first. padding: tokens of no row behind them. absent: the
        batch is fixed, as a graph's, with so many decode rows and prefill rows that are none, of slot 0: see `Batch.fixed`."""
        counts, slots = list(rows.values()), list(rows)
        decodes = next((number for number, count in enumerate(counts) if count > 1), len(counts))
        total = sum(counts)
        for slot, count in rows.items():
            self.lengths[slot] += count
        lengths = [self.lengths[slot] for slot in slots]
        starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
        if absent is not None:
            more, behind = absent
            slots = slots[:decodes] + [0] * more + slots[decodes:] + [0] * behind
            lengths = lengths[:decodes] + [0] * more + lengths[decodes:] + [0] * behind
            starts = starts[:decodes] + [decodes] * more + starts[decodes:] + [total] * behind
            decodes += more
        prefills = len(slots) - decodes
        chunks = count_chunks(starts, decodes) if absent is None else max_chunks(total + padding, prefills)
        return StateRows(
            torch.tensor(slots, device=self.device), torch.tensor(starts, dtype=torch.int32, device=self.device),
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            torch.tensor([1] * total + [-1] * padding, device=self.device), decodes, chunks, starts, lengths,
        )  # fmt: skip

    def padded(self, inputs: Sequence[Tensor], padding: int) -> Tensor:
        """The rows' inputs, then NaN."""
        each = torch.cat(list(inputs))
        return torch.cat((each, each.new_full((padding, each.shape[1]), float("nan")))).to(self.device)


class Requests(Slots):
    """The states of slots. They hold NaN before a request begins there."""

    def __init__(self, slots: int, heads: GatedDelta = HEADS, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__(slots, device)
        self.heads, self.weights = heads, weights(heads, dtype)
        self.weights = DeltaWeights(*(part.to(device) for part in self.weights[:4]), self.weights.eps)
        self.conv = torch.full((slots, TAPS - 1, sum(heads.sections)), float("nan"), device=device)
        self.state = torch.full((slots, heads.value_heads, heads.key_dim, heads.value_dim), float("nan"), device=device)

    def step(
        self, gated_delta: Callable[..., Tensor], rows: Sequence[tuple[int, Tensor, Tensor]], *, padding: int = 0,
        absent: tuple[int, int] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """rows: (slot, mixed, ba) of their next tokens. padding, absent: see `batch`. Returns the rows' outputs."""
        counts = {slot: len(mixed) for slot, mixed, _ in rows}
        state_rows = self.batch(counts, padding=padding, absent=absent)
        mixed, ba = (self.padded([row[part] for row in rows], padding) for part in (1, 2))
        out = gated_delta(mixed, ba, self.heads, self.weights, self.conv, self.state, state_rows)
        return list(torch.split(out[: sum(counts.values())], list(counts.values())))

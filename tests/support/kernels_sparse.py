# SPDX-License-Identifier: Apache-2.0
"""The kernels of sparse attention in plain torch: by definition, row after row; and in the kernels' place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels import reference
from phalanx.kernels.attention import dispatch, indexer

UNTOUCHED = -7
"""What a place holds that nothing writes."""


def best_slots(
    query: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None, block_tables: Tensor, table_rows: Tensor, lengths: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """As `dispatch.best_slots`."""
    block_size = keys.shape[1]
    for row, length in enumerate(lengths.tolist()):
        at = torch.arange(length, device=out.device)
        slots = block_tables[table_rows[row], at // block_size].long() * block_size + at % block_size
        read = indexer.read_index_keys(keys, scales, slots)
        scores = indexer.index_scores(query[row, None, None], weights[row, None, None], read[None])[0, 0]
        best = indexer.best_keys(scores, min(out.shape[1], length))
        out[row, : len(best)] = slots[best].int()


def put_references(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """In the place of the kernels of latents and indexers, on a CPU. Returns each launch: its kind, and its rows."""
    calls: list[tuple[str, int]] = []
    hints = "workspace", "splits", "early_lengths", "tiles", "least_rows"

    def decode(query: Tensor, *inputs: Any, **options: Any) -> Tensor:
        calls.append(("sparse" if inputs[1].shape[1] == 1 else "dense", len(query)))
        return reference.latent_decode_attention(query, *inputs, **{name: options[name] for name in options if name not in hints})

    def prefill(query: Tensor, *inputs: Any, **options: Any) -> Tensor:
        calls.append(("prefill", len(query)))
        return reference.prefill_attention(query, *inputs, **{name: options[name] for name in options if name not in hints})

    def choose(query: Tensor, *inputs: Any) -> None:
        calls.append(("choose", len(query)))
        inputs[-1].fill_(UNTOUCHED)
        best_slots(query, *inputs)

    monkeypatch.setattr(dispatch, "latent_decode_attention", decode)
    monkeypatch.setattr(dispatch, "prefill_attention", prefill)
    monkeypatch.setattr(dispatch, "best_slots", choose)
    return calls

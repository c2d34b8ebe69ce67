# SPDX-License-Identifier: Apache-2.0
"""How launches of attention kernels are timed and reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from phalanx.kernels.dtypes import TORCH_DTYPES

HEAD_DIM, BLOCK = 128, 16
KV_DTYPES = {"bf16": TORCH_DTYPES["bf16"], "e4m3": torch.float8_e4m3fn, "int8": torch.int8}
"""By the names of `--kv`; the package's map has no dtypes of 8 bit."""
REPLAYS = 4
WRONG = 2e-2
PEER_BYTES = 256 << 20
"""FlashInfer's workspace."""
SCALES = (0.25, 0.03)

Candidate = Callable[..., Tensor]
"""From keys and values, and in int8 their token_scales, to the output."""


def seconds(candidate: Candidate, copies: Sequence[tuple[Tensor, ...]]) -> float:
    """For one launch, in a graph of one with each copy."""
    calls = [partial(candidate, *copy) for copy in copies]
    return harness.graph_us(calls, replays=REPLAYS, discarded=1, warmups=0) / 1e6


def tell_best(figures: dict[str, Any]) -> None:
    for name, result in figures.items():
        timed = {label: row for label, row in result.items() if isinstance(row, list)}
        best = sorted(timed.items(), key=lambda entry: entry[1][0])[:3]
        usual = timed.get("chosen", [0.0])[0]
        print(
            f"{name:28} {usual / best[0][1][0] if best else 0:.2f} times: "
            + ", ".join(f"{label} {row[0]} us" for label, row in best)
        )


def line(result: dict[str, Any], unit: str = "TB/s") -> str:
    timed = {label: row for label, row in result.items() if isinstance(row, list)}
    ours = {label: row for label, row in timed.items() if label[0] == "("}
    best = min(ours, key=lambda label: ours[label][0], default="-")
    (ours_us, ours_rate), (chosen_us, _), (peer, _) = (timed.get(label, [0.0, 0.0]) for label in (best, "chosen", "flashinfer"))
    faults = [f"\n    {label}: {row}" for label, row in result.items() if not isinstance(row, list)]
    text = f"{best:30} {ours_us:9.2f} us {ours_rate:5.4g} {unit}   chosen {chosen_us:9.2f}   flashinfer {peer:9.2f}"
    return text + "".join(faults)

# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens on one GPU: the kernels (packed_argmax_keys, filter_thresholds, gumbel_max, decode_keys), beside plain
torch, which sorts.

Logits are in bf16 and look like a model's: some tokens stand out of a normal background. `flat` has the background alone at
temperature 1.5, where edges lie among thousands of tokens. All tokens are compared with those of plain torch, which draws with the
same noise. us: on the device, by the kernels in a CUDA graph (median of 9 replays), by torch in a run of
calls; host: what a call of the kernels takes the host.

    python -m benchmarks.kernels.sampling --out DIR [--rows 1,16,64,256,512] [--no_plain]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from phalanx.kernels import reference
from phalanx.kernels.sampling import sampling

VOCABULARY, LARGER = 128_256, 151_936
TEMPERATURE, FLAT = 0.8, 1.5
REPLAYS, CALLS, PLAIN_CALLS = 9, 10, 3
AT_ONCE = 2**24
"""Logits that plain torch works on at a time."""
WRONG = 0.02
"""A fraction of the rows: a threshold that is too close to call, or the last bit of a logarithm, rarely moves a token."""


class Kind(NamedTuple):
    """The sampling parameters of every row; None is off."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


KINDS = {
    "greedy": Kind(0.0),
    "temperature": Kind(TEMPERATURE),
    "top_p 0.95": Kind(TEMPERATURE, top_p=0.95),
    "top_k 50": Kind(TEMPERATURE, top_k=50),
    "top_k 50, top_p 0.95, min_p 0.05": Kind(TEMPERATURE, 50, 0.95, 0.05),
}
FLATTER = {"top_p 0.95, flat": Kind(FLAT, top_p=0.95), "top_k 1000, top_p 0.95, flat": Kind(FLAT, 1000, 0.95)}


class Step(NamedTuple):
    """logits [S, V], temperature [S], noise [2, S], filters [3, S] or None."""

    logits: Tensor
    temperature: Tensor
    noise: Tensor
    filters: Tensor | None
    kind: Kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--rows", default="1,16,64,256,512")
    parser.add_argument("--no_plain", action="store_true", help="leave plain torch untimed")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    sizes = [(int(rows), VOCABULARY) for rows in arguments.rows.split(",")]
    print(f"{'rows x vocabulary':18} {'':34} {'us':>9} {'host us':>8} {'plain us':>10} {'differ':>7}")
    for rows, width in [*sizes, (64, LARGER)]:
        for flat, kinds in ((False, KINDS), (True, FLATTER if (rows, width) == (64, VOCABULARY) else {})):
            logits = random_logits(rows, width, flat) if kinds else torch.empty(0)
            for name, kind in kinds.items():
                result = measure(step_of(logits, kind), not arguments.no_plain)
                figures.setdefault(f"{rows} x {width}", {})[name] = result
                plain_us = f"{result['plain_us']:10.1f}" if "plain_us" in result else f"{'':10}"
                size = f"{rows} x {width}"
                print(
                    f"{size:18} {name:34} {result['us']:9.1f} {result['host_us']:8.1f} {plain_us} {result['differ']:7}", flush=True
                )
    harness.write("kernels_sampling", figures, arguments.out)
    return 1 if any("wrong" in row for part in figures.values() for row in part.values()) else 0


def random_logits(rows: int, width: int, flat: bool) -> Tensor:
    torch.manual_seed(0)
    logits = torch.randn(rows, width, device="cuda") * 2
    if not flat:
        logits.scatter_add_(
            1, torch.randint(width, (rows, 64), device="cuda"), torch.linspace(16, 2, 64, device="cuda").expand(rows, 64)
        )
    return logits.bfloat16()


def step_of(logits: Tensor, kind: Kind) -> Step:
    rows, width = logits.shape
    off = (width, 1.0, 0.0)
    values = [off[at] if value is None else value for at, value in enumerate(kind[1:])]
    filters = torch.tensor(values, dtype=torch.float64, device="cuda")[:, None].expand(3, rows).contiguous()
    noise = torch.randint(-(2**31), 2**31 - 1, (2, rows), device="cuda").to(torch.int32)
    temperature = torch.full((rows,), kind.temperature, device="cuda")
    return Step(logits, temperature, noise, filters if tuple(values) != off else None, kind)


def measure(step: Step, time_plain: bool) -> dict[str, Any]:
    act = partial(by_kernels, step)
    wanted, tokens = by_torch(step), act()
    differ = int((tokens != wanted).sum())
    result: dict[str, Any] = {"us": round(on_device(act), 2), "host_us": round(on_host(act), 1), "differ": differ}
    if differ > (max(1, WRONG * len(tokens)) if len(tokens) >= 16 else 0):
        result["wrong"] = f"{differ} of {len(tokens)} tokens are not plain torch's"
    if time_plain:
        result["plain_us"] = round(in_a_run(partial(by_torch, step)), 1)
    return result


def by_kernels(step: Step) -> Tensor:
    if step.kind.temperature == 0.0:
        return sampling.argmax(step.logits)
    return sampling.sample(step.logits, step.temperature, step.noise, step.filters)


def by_torch(step: Step) -> Tensor:
    """As on a CPU, with sorts."""
    kind, width = step.kind, step.logits.shape[1]
    if kind.temperature == 0.0:
        return step.logits.argmax(-1)
    parts = []
    some = max(1, AT_ONCE // width)
    for rows in (slice(at, at + some) for at in range(0, len(step.logits), some)):
        scaled = reference.scale_logits(step.logits[rows].float(), step.temperature[rows])
        if step.filters is not None:
            top_k, top_p, min_p = step.filters[:, rows]
            scaled = reference.keep_filtered(
                scaled, kind.top_k or width, None if kind.top_k is None else top_k.long(),
                None if kind.top_p is None else top_p, None if kind.min_p is None else min_p.float(),
            )  # fmt: skip
        parts.append(reference.draw(scaled, step.noise[:, rows]))
    return torch.cat(parts)


def on_device(act: Callable[[], Any]) -> float:
    """us of one act, of several in a graph."""
    return harness.graph_us([act] * CALLS, replays=REPLAYS)


def in_a_run(act: Callable[[], Any]) -> float:
    """us of one act, of several one after the other."""

    def run() -> None:
        for _ in range(PLAIN_CALLS):
            act()

    return harness.events_us(run) / PLAIN_CALLS


def on_host(act: Callable[[], Any]) -> float:
    """us until one call returns, of several that the device has not finished."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        act()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return took / CALLS * 1e6


if __name__ == "__main__":
    start = time.monotonic()
    status = main()
    print(f"{time.monotonic() - start:.1f} s")
    sys.exit(status)

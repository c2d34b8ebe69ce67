# SPDX-License-Identifier: Apache-2.0
"""Coefficients of what a rank takes beside weights and KV cache (`planner.footprint`), from the starts in benchmarks/results.

    python -m benchmarks.planner.fit_memory            fit, and print each start's KV tokens beside the promise
    python -m benchmarks.planner.fit --write           the same coefficients, among all others, into the package

Activations are what starts counted, so they are fitted by themselves. The rest is a linear program over the start of each model and
layout that took most, of the present engine where it has one: none took more, and the present engine's gave at most `WITHIN` more
KV tokens than promised.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.optimize import least_squares, linprog

from benchmarks.planner.history import captured_tokens, started_lightly
from benchmarks.planner.rows import Start, shape_named, starts
from phalanx.hardware import catalogue
from phalanx.layout.cache import token_bytes
from phalanx.layout.memory import stage_caches
from phalanx.layout.weights import weight_bytes
from phalanx.planner import footprint

NAMES = (*footprint.OVERHEADS, footprint.GRAPH_PAIR)
WITHIN = 0.01
FIRST_GUESS = (6e4, 2.8, 0.7, 0.9, 4.0, 1.7, 1.5, 1.3)
"""Where the fit of `SAMPLED` and `PROMPT` begins: which of the two peaks is the larger one decides what a start tells."""
LEAST_COUNTED = 3e8
"""Starts before 2026-11-21 did not count activations; some of one day counted a few MB alone."""


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(arguments)
    coefficients = memory()
    print(coefficients)
    for start, taken, slack, features in most_by_layout(coefficients):
        promised = _product(coefficients, NAMES, features)
        present = "" if started_lightly(start) else "  older engine"
        print(f"{(promised - taken) / slack * WITHIN:7.2%}  {taken / 1e9:6.2f} GB  {key_of(start)}  {start.file}{present}")
    return 0


def memory() -> dict[str, float]:
    """`data/coefficients.json`, "memory". margin: the part of `WITHIN` that is left at both ends."""
    counted = activations()
    above, bounds, count = [], [], len(NAMES)
    for start, taken, slack, features in most_by_layout(counted):
        present = started_lightly(start)
        above.append([-each for each in features] + [slack if present else 0.0])
        bounds.append(-taken)
        if present:
            above.append([*features, slack])
            bounds.append(taken + slack)
    done = linprog(
        [0.0] * count + [-1.0], A_ub=np.array(above) / 1e9, b_ub=np.array(bounds) / 1e9,
        bounds=[(0, None)] * count + [(None, None)],
    )  # fmt: skip
    if done.status != 0 or done.x[-1] < 0:
        print(f"no coefficients keep every start within {WITHIN:.0%}", done.message)
    fitted = {name: round(float(value), 4) for name, value in zip(NAMES, done.x, strict=False)}
    return {**counted, **fitted, "margin": round(float(done.x[-1]), 4)}


def activations() -> dict[str, float]:
    """Coefficients of `footprint.activation_bytes`: those that come nearest to what starts counted since 2026-11-24, few larger
    ones (longer contexts) counting little."""
    names, cases = (*footprint.SAMPLED, *footprint.PROMPT), {}
    for start in starts():
        counted = max((kinds.get("activations", 0) for kinds in start.bytes.values()), default=0)
        if start.date >= "2026-11-24" and counted >= LEAST_COUNTED:
            features = footprint.activation_features(
                shape_named(start.model), start.layout, start.max_num_tokens, start.max_batch_size, start.dtype
            )
            cases.setdefault((*key_of(start), start.max_batch_size, round(counted / 2e7)), (features, counted))

    def errors(x: Any) -> list[float]:
        half = len(footprint.SAMPLED)
        return [
            (max(np.dot(sampled, x[:half]), np.dot(prompt, x[half:])) - counted) / 1e9
            for (sampled, prompt), counted in cases.values()
        ]

    done = least_squares(errors, FIRST_GUESS, loss="soft_l1", f_scale=0.02, x_scale=FIRST_GUESS)
    return {name: round(float(value), 4) for name, value in zip(names, done.x, strict=True)}


def most_by_layout(counted: dict[str, float]) -> Iterator[tuple[Start, float, float, list[float]]]:
    """Of each model and layout the start that took most beside weights, KV cache and activations, of the present engine where it
    has one: the start, these bytes less `GRAPH_BYTES` for each graph, `WITHIN` of the KV cache, what `NAMES` multiply."""
    by_layout: dict[tuple[Any, ...], list[tuple[Start, float, float, list[float]]]] = {}
    for start in starts():
        if start.bytes:  # the other ones were printed, and are of the first days
            by_layout.setdefault(key_of(start), []).append((start, *beside(start, counted)))
    for cases in by_layout.values():
        yield max([each for each in cases if started_lightly(each[0])] or cases, key=lambda each: each[1])


def beside(start: Start, counted: dict[str, float]) -> tuple[float, float, list[float]]:
    shape, layout = shape_named(start.model), start.layout
    per_token = max(tuple(map(token_bytes, stage_caches(shape, "fp8" if start.kv_fp8 else "bf16", start.dtype, layout))))
    cache = start.kv_tokens / layout.dp * per_token / start.fraction
    peaks = footprint.activation_features(shape, layout, start.max_num_tokens, start.max_batch_size, start.dtype)
    peak = max(
        _product(counted, names, features) for names, features in zip((footprint.SAMPLED, footprint.PROMPT), peaks, strict=True)
    )
    tokens = footprint.graph_tokens(shape, start.dtype, layout, captured_tokens(start))
    captured = footprint.graph_bytes(shape, start.dtype, layout, start.max_batch_size, captured_tokens(start))
    pairs = footprint.pair_bytes(shape, start.dtype, tokens)
    captured -= int(footprint.document()["memory"][footprint.GRAPH_PAIR] * pairs)  # what is to be fitted
    taken = catalogue.gpu(start.gpu).memory_bytes - max(weight_bytes(shape, start.dtype, layout)) - cache - peak - captured
    return taken, WITHIN * cache, [*footprint.overhead_features(shape, layout, start.max_num_tokens), float(pairs)]


def key_of(start: Start) -> tuple[Any, ...]:
    """What of a start decides the memory of a rank, but for numbers of slots and tokens."""
    model = start.model.replace("llama-3.1", "llama-3")
    return model, start.dtype, start.kv_fp8, start.tp, start.pp, start.ep, start.moe_ep, start.gpu


def _product(coefficients: dict[str, float], names: tuple[str, ...], features: list[float]) -> float:
    return sum(coefficients[name] * feature for name, feature in zip(names, features, strict=True))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Which sizes of steps are captured as CUDA graphs: one answer for the engine, which captures them, and the planner, which counts
their memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIXED_GRAPH_TOKENS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Sizes of mixed graphs. Up to some 128 tokens a GPU waits for weights and padding costs nothing; above, it costs its fraction."""

MAX_PREFILL_ROWS, TOKENS_PER_PREFILL_ROW = 64, 4
"""Prefill rows in one mixed graph: this many, unless each would have fewer tokens than this. The prefill kernel searches all of
them for the row of a program, and has spare programs for rows that end within a tile."""

HOST_SECONDS = 1e-3
"""How long the host takes to launch the kernels of a layer, measured on the host of an H200: more where ranks wait for each other,
less without."""

BYTES_PER_SECOND = 600e12
"""Weight bytes per second that an H200's GEMMs of many tokens process, each byte counted once per token: in 16 bit 2 bytes at 600
TFLOPS, in FP8 1 byte at twice that. When the GEMMs of a step take longer than its launches, a graph gains nothing, and padding
costs."""


class GraphSize(NamedTuple):
    """The size of a graph: tokens, the first `decode_rows` of which may be decode rows, and `prefill_rows` rows for the
    other tokens. With 0 prefill rows it is a decode graph, which ends with the argmax tokens; else a mixed graph."""

    tokens: int
    decode_rows: int
    prefill_rows: int = 0


def graph_sizes(max_rows: int, max_tokens: int) -> tuple[list[GraphSize], list[GraphSize]]:
    """The sizes of decode graphs, up to `max_rows` rows, and of mixed graphs, up to as many decode rows and up to `max_tokens`
    tokens: few enough to capture, close enough that padding costs little."""
    rows = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    tokens = _up_to(min(max_tokens, MIXED_GRAPH_TOKENS[-1]), MIXED_GRAPH_TOKENS) if max_tokens > 1 else []
    decode = [GraphSize(count, count) for count in _up_to(max_rows, rows)]
    mixed = [
        GraphSize(count, min(count, max_rows), min(-(-count // TOKENS_PER_PREFILL_ROW), max_rows, MAX_PREFILL_ROWS))
        for count in tokens
    ]
    return decode, mixed


def max_graph_tokens(layer_bytes: float) -> int:
    """Up to how many tokens an eager step would have the GPU wait for the host. layer_bytes: weights of one layer on one rank; of
    routed experts those that a token reaches, as it is multiplied with no others."""
    return int(HOST_SECONDS * BYTES_PER_SECOND / layer_bytes)


def _up_to(last: int, sizes: Sequence[int]) -> list[int]:
    return [*(size for size in sizes if size < last), last]

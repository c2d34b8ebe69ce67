# SPDX-License-Identifier: Apache-2.0
"""Which sizes of steps are captured as CUDA graphs: one answer for the engine, which captures them, and the planner, which counts
their memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.config.model import ModelShape
from phalanx.layout.layout import Layout
from phalanx.layout.weights import active_layer_bytes

MIXED_GRAPH_TOKENS = (
    32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384,
)  # fmt: skip
"""Sizes of mixed graphs. Up to some 128 tokens a GPU waits for weights and padding costs nothing; above, it costs its fraction.
Those beyond 2,048 tokens are for layers whose launches take longer than that fraction."""

EXCHANGED_GRAPH_TOKENS = 2048
"""The largest of them where dp indices exchange tokens: in a graph each index computes the padding of all."""

LATENT_GRAPH_TOKENS = 1024
"""The largest of them with latent attention. In a graph each token of a prompt attends to the latents as a decode row does, about
four times the work of keys and values that are expanded once: for short prompts that is less than what the host takes."""

ABSORBED_SECONDS, ABSORBED_FLOPS = 1e-3, 80e12
"""How long absorbed attention of prompts may take in a layer, so that a graph of a step with them gains, where the host takes
HOST_SECONDS_OF_EXPERTS or more; and what it reaches at least, of one number of heads or another, in 16 bit
(benchmarks/results/kernels_latent{,_before}.json)."""

MAX_PREFILL_ROWS, TOKENS_PER_PREFILL_ROW, TOKENS_PER_MORE_ROWS = 64, 4, 64
"""Prefill rows in one mixed graph: MAX_PREFILL_ROWS, or one for each TOKENS_PER_MORE_ROWS tokens where that is more, unless each
would have fewer than TOKENS_PER_PREFILL_ROW tokens. The prefill kernel searches all of them for the row of a program, and has spare
programs for rows that end within a tile."""

HOST_SECONDS, HOST_SECONDS_OF_EXPERTS = 1e-3, 1.5e-3
"""How long the host takes to launch the kernels of a layer, and of one with experts, measured on the host of an H200: more where
ranks wait for each other or other processes have the cores (three times as much on one host of several), less without."""

BYTES_PER_SECOND = 600e12
"""Weight bytes per second that an H200's GEMMs of many tokens process, each byte counted once per token: in 16 bit 2 bytes at 600
TFLOPS, in FP8 1 byte at twice that. When the GEMMs of a step take longer than its launches, a graph gains nothing, and padding
costs."""

VERIFIED_TOKENS = 256
"""Tokens of the rows of a step, with their drafts, beyond which drafts cost more than they gain: GEMMs then wait for
arithmetic, and no longer for weights."""


class GraphSize(NamedTuple):
    """The size of a graph: tokens, the first `decode_rows` of which may be decode rows, and `prefill_rows` rows for the
    other tokens. With 0 prefill rows it is a decode graph, which ends with the argmax tokens; else a mixed graph. adapted: layers
    add the deltas of adapters, of whichever tokens have one."""

    tokens: int
    decode_rows: int
    prefill_rows: int = 0
    adapted: bool = False


def graph_sizes(max_rows: int, max_tokens: int, *, adapted: bool = False) -> tuple[list[GraphSize], list[GraphSize]]:
    """The sizes of decode graphs, up to `max_rows` rows, and of mixed graphs, up to as many decode rows and up to `max_tokens`
    tokens: few enough to capture, close enough that padding costs little. adapted: then the same graphs with adapters, too, apart
    from the others, so that a step without them costs nothing more."""
    rows = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    tokens = _up_to(min(max_tokens, MIXED_GRAPH_TOKENS[-1]), MIXED_GRAPH_TOKENS) if max_tokens > 1 else []
    decode = [GraphSize(count, count) for count in _up_to(max_rows, rows)]
    mixed = [GraphSize(count, min(count, max_rows), _prefill_rows(count, max_rows)) for count in tokens]
    if adapted:
        decode, mixed = ([*sizes, *(size._replace(adapted=True) for size in sizes)] for sizes in (decode, mixed))
    return decode, mixed


def max_decode_rows(max_rows: int, max_drafts: int) -> int:
    """Up to how many decode rows graphs take, of a step of `max_rows` rows: each draft that a row verifies is one more."""
    return max(max_rows, min(max_rows * (1 + max_drafts), VERIFIED_TOKENS))


def max_graph_tokens(shape: ModelShape, dtype: str, layout: Layout) -> int:
    """Up to how many tokens an eager step would have the GPU wait for the host. dtype: as `weights.tensor_bytes` takes it.

    All ranks get the same answer, although some may hold fewer bytes."""
    seconds = HOST_SECONDS_OF_EXPERTS if shape.experts_in(0) is not None else HOST_SECONDS
    exchanged = EXCHANGED_GRAPH_TOKENS if layout.dp > 1 else MIXED_GRAPH_TOKENS[-1]
    largest = LATENT_GRAPH_TOKENS if shape.latent is not None else exchanged
    return min(int(seconds * BYTES_PER_SECOND / active_layer_bytes(shape, 0, dtype, layout)), largest)


def max_absorbed_pairs(heads: int, width: int) -> int:
    """(Token, KV token) pairs of the prompts of a step with latent attention, up to which a graph gains. heads: of one rank; width:
    of a cached token, by which a pair's score is multiplied, and for its output all but the rotated part."""
    return int(ABSORBED_SECONDS * ABSORBED_FLOPS / (4 * heads * width))


def _prefill_rows(tokens: int, max_rows: int) -> int:
    return min(-(-tokens // TOKENS_PER_PREFILL_ROW), max_rows, max(MAX_PREFILL_ROWS, tokens // TOKENS_PER_MORE_ROWS))


def _up_to(last: int, sizes: Sequence[int]) -> list[int]:
    return [*(size for size in sizes if size < last), last]

# SPDX-License-Identifier: Apache-2.0
"""Which sizes of steps are captured as CUDA graphs: decided here for the engine that captures and the planner that prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

STEP_TOKENS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Of graphs of any rows. Up to some 128 tokens a GPU waits for weights and padding costs nothing; from there on its share."""

MOST_PROMPTS, TOKENS_PER_PROMPT = 64, 4
"""Rows of several tokens in one graph: so many, unless each would have fewer tokens than this. Their kernel looks through all of
them to find a program's own, and has programs to spare for rows that end within a tile."""

HOST_SECONDS = 1e-3
"""That launching a layer's kernels takes, as measured on an H200's host: more with ranks that wait for each other, less without."""

BYTES_PER_SECOND = 600e12
"""Of weights that H200's GEMMs of many tokens pass, each counted once per token: in 16 bit 2 bytes at 600 TFLOPS, in FP8 1 at
twice that. A step with so many tokens that GEMMs take longer than launches has nothing from a graph, and padding on top."""


class Size(NamedTuple):
    """Of a graph: tokens, of which the first `decodes` may be rows of one token; and `prompts` rows that have the others. 0 of
    these: the graph is of rows of one token each, and ends with the argmax."""

    tokens: int
    decodes: int
    prompts: int = 0


def sizes(most_rows: int, most_tokens: int) -> tuple[list[Size], list[Size]]:
    """Of what sizes there are graphs of rows of one token, up to `most_rows`, and graphs of any rows, up to as many, and up to
    `most_tokens` tokens: few enough to capture, close enough that padding costs little. Up to `most_rows` rows of one token have
    room where the tokens have it."""
    rows = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most_rows, 32)]
    tokens = _up_to(min(most_tokens, STEP_TOKENS[-1]), STEP_TOKENS) if most_tokens > 1 else []
    return (
        [Size(count, count) for count in _up_to(most_rows, rows)],
        [Size(count, min(count, most_rows), min(-(-count // TOKENS_PER_PROMPT), most_rows, MOST_PROMPTS)) for count in tokens],
    )


def worth_padding(layer_bytes: float) -> int:
    """Up to how many tokens an eager step would have the GPU wait for the host. layer_bytes: of one layer on one rank."""
    return int(HOST_SECONDS * BYTES_PER_SECOND / layer_bytes)


def _up_to(most: int, found: Sequence[int]) -> list[int]:
    return [*(each for each in found if each < most), most]

# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.engine.host_memory_soak` would see: a block with another content at a copy or a hit, and memory that grows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.engine.host_memory_soak import growth
from benchmarks.engine.host_memory_soak_rank import BlockContents
from phalanx.config import SamplingParams
from phalanx.engine.messages import BlockCopy, SlotAssignment, StepBatch, StepRow
from phalanx.errors import EngineError
from phalanx.kernels.ops.block_rows import BlockRows

TOKENS = [1, 2, 3, 4, 5]


def filled() -> tuple[torch.Tensor, BlockContents]:
    """Four blocks of two tokens, of which a request of five tokens has filled blocks 2 and 0."""
    rows = torch.arange(12, dtype=torch.int64).view(4, 3)
    contents = BlockContents(BlockRows([rows], by_kernel=False), rows.dtype, 2)
    run(contents, TOKENS, 0, [2, 0, 1])
    return rows, contents


def run(contents: BlockContents, tokens: list[int], start: int, blocks: list[int]) -> None:
    """The step of a request that comes with a hit of `start` tokens."""
    row = StepRow(0, start, len(tokens) - start, tokens[start:], blocks, samples=True)
    step = StepBatch(admitted=[SlotAssignment(0, tokens, len(tokens), SamplingParams(), 0)], rows=[row])
    contents.begin(step)
    contents.end(step)


def test_copies_and_hits_that_are_right_are_counted() -> None:
    rows, contents = filled()
    contents.save([BlockCopy(2, 7, 1)])
    rows[3] = rows[2]
    rows[2] = 0
    contents.load([BlockCopy(3, 7, 1)])
    run(contents, TOKENS, 4, [3, 0, 1])
    assert contents.counts == {"filled": 2, "saved": 1, "loaded": 1, "hits": 2}


@pytest.mark.parametrize(
    "look",
    [
        lambda contents: contents.save([BlockCopy(2, 8, 1)]),
        lambda contents: contents.load([BlockCopy(2, 7, 1)]),
        lambda contents: run(contents, TOKENS, 4, [2, 0, 1]),
    ],
    ids=["it leaves", "it comes back", "it is hit"],
)
def test_a_changed_block_is_seen(look: Callable[[BlockContents], None]) -> None:
    rows, contents = filled()
    contents.save([BlockCopy(2, 7, 1)])
    rows[2, 1] += 1
    with pytest.raises(EngineError, match=r"KV block 2, .* has another content than it was filled with"):
        look(contents)


@pytest.mark.parametrize(("tokens", "blocks"), [(TOKENS, [0, 2, 1]), ([9, 2, 3, 4, 5], [2, 0, 1])], ids=["order", "tokens"])
def test_a_block_of_other_tokens_is_seen(tokens: list[int], blocks: list[int]) -> None:
    _, contents = filled()
    run(contents, TOKENS, 4, [2, 0, 1])
    with pytest.raises(EngineError, match="a hit has the block of other tokens at place 0"):
        run(contents, tokens, 4, blocks)


def test_growth_is_of_what_comes_behind_the_first_half() -> None:
    assert growth([10, 50, 60, 60, 60, 60, 60, 60]) == 0
    assert growth([10, 20, 30, 40, 50, 60, 70, 80]) == 40
    assert growth([5]) == 0

# SPDX-License-Identifier: Apache-2.0
"""Logits of a small checkpoint by transformers, and the steps in which ours are computed."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor

from phalanx.comm.group import Solo
from tests.support.checkpoints import VOCAB_SIZE

STEPS = [
    {0: 9, 1: 21},
    {1: 1, 0: 13, 2: 7},
    {1: 1, 2: 1, 0: 16},
    {0: 1, 1: 1, 2: 1},
    {2: 1, 0: 1, 1: 1},
    {2: 3},
]


LENGTHS = (40, 25, 13)


def logits_of(folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(11)
    ids = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    with torch.inference_mode():
        return ids, [reference(tokens[None]).logits[0] for tokens in ids]


def assert_same(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=3e-4)


class RankOf(Solo):
    """Rank 0 of so many."""

    def __init__(self, size: int) -> None:
        self.size = size

# SPDX-License-Identifier: Apache-2.0
"""The steps of a self check: prompts of fixed random tokens, and decode steps whose tokens are fixed, too, so that two ways to
compute them can be compared token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, StepBatch, StepRow

LONG = 192
"""Tokens of the longest prompts. More would add little: what depends on the length has met every kind of tile by then."""
CHUNKS = 61, 7
"""Tokens of the chunks of a prompt, in turn."""
SHORT = 1, 2, 5, 3, 8
"""Tokens of the short prompts, in turn."""
MOST_ROWS = 40
"""Decode rows of a step: more than kernels for few rows take."""
DECODES = 2
"""Decode steps of each kind."""
PARAMS = SamplingParams(temperature=0.0, prompt_logprobs=0)
SEED = 52


class CheckStep(NamedTuple):
    """kind: what the step is, for people."""

    kind: str
    batch: StepBatch


class _Sequence:
    """A request with all of its tokens, and blocks for them. slot: the same in the block tables."""

    def __init__(self, slot: int, tokens: list[int], prompt: int, blocks: range) -> None:
        self.slot, self.tokens, self.prompt, self.blocks, self.done = slot, tokens, prompt, blocks, 0

    @property
    def assignment(self) -> SlotAssignment:
        return SlotAssignment(self.slot, self.tokens[: self.prompt], self.prompt, PARAMS, seed=SEED)

    def row(self, count: int) -> StepRow:
        """The next tokens."""
        start, self.done = self.done, self.done + count
        tokens = self.tokens[start : self.done]
        return StepRow(self.slot, start, count, tokens, list(self.blocks) if not start else [], samples=self.done >= self.prompt)


class _Requests:
    """Makes requests as long as slots and blocks are left."""

    def __init__(self, vocab_size: int, slots: int, block_size: int, blocks: int, groups: int) -> None:
        self._chance, self._vocab_size = random.Random(SEED), vocab_size
        self._groups = groups
        self._slots, self._block_size, self._blocks, self._used, self._opened = slots, block_size, blocks, 0, 0

    def open(self, prompt: int) -> _Sequence | None:
        """A request with so many tokens of prompt, and room for decode steps; None where there is no place."""
        total = prompt + 2 * DECODES + 1
        blocks = range(self._used, self._used + self._groups * -(-total // self._block_size))
        if self._opened == self._slots or blocks.stop > self._blocks or prompt < 1:
            return None
        tokens = [self._chance.randrange(self._vocab_size) for _ in range(total)]
        self._used, self._opened = blocks.stop, self._opened + 1
        return _Sequence(self._opened - 1, tokens, prompt, blocks)


def check_steps(
    *, vocab_size: int, max_num_tokens: int, max_seq_len: int, max_rows: int, block_size: int, blocks: int, groups: int = 1
) -> list[CheckStep]:  # fmt: skip
    """A prompt, a prompt in chunks, short prompts together; decode steps of one row and of many; and one with a prompt beside
    decode rows. As many of them as the limits allow; the last step releases all slots. The same on every rank, and in every start
    with the same limits. groups: of layers, each of which takes blocks."""
    requests, slots = _Requests(vocab_size, max_rows, block_size, blocks, groups), max_rows
    long = min(LONG, max_num_tokens, max_seq_len - 2 * DECODES - 1, blocks // groups * block_size // 4)
    steps: list[CheckStep] = []
    running: list[_Sequence] = []
    if (first := requests.open(long)) is not None:
        running.append(first)
        steps.append(CheckStep(f"a prompt of {long} tokens", StepBatch(admitted=[first.assignment], rows=[first.row(long)])))
    if (second := requests.open(long)) is not None:
        running.append(second)
        steps += _chunked(second, max_num_tokens)
    short: list[_Sequence] = []
    for number in range(min(MOST_ROWS, max_num_tokens // max(SHORT)) - len(running)):
        if len(running) + len(short) < slots - 1 and max_seq_len > max(SHORT) + 2 * DECODES + 1:
            request = requests.open(SHORT[number % len(SHORT)])
            short += [] if request is None else [request]
    if short:
        short.sort(key=lambda each: each.prompt)  # a row of one token is a decode row, and those come first
        rows = [each.row(each.prompt) for each in short]
        steps.append(CheckStep(f"{len(short)} short prompts", StepBatch(admitted=[each.assignment for each in short], rows=rows)))
    running = [*running, *short][:max_num_tokens]
    steps += [CheckStep("decode of 1 row", StepBatch(rows=[each.row(1)])) for each in running[:1] for _ in range(DECODES)]
    if len(running) > 1:
        kind = f"decode of {len(running)} rows"
        steps += [CheckStep(kind, StepBatch(rows=[each.row(1) for each in running])) for _ in range(DECODES)]
    if len(running) > 1 and (last := requests.open(min(max(SHORT), max_num_tokens - len(running) // 2))) is not None:
        rows = [each.row(1) for each in running[: len(running) // 2]]
        batch = StepBatch(admitted=[last.assignment], rows=[*rows, last.row(last.prompt)])
        steps.append(CheckStep("a prompt beside decode rows", batch))
    return [*steps, CheckStep("", StepBatch(released=list(range(max_rows))))]


def _chunked(request: _Sequence, max_num_tokens: int) -> Sequence[CheckStep]:
    steps: list[CheckStep] = []
    while request.done < request.prompt:
        count = min(CHUNKS[len(steps) % len(CHUNKS)], request.prompt - request.done, max_num_tokens)
        admitted = [] if request.done else [request.assignment]
        steps.append(
            CheckStep(f"a prompt of {request.prompt} tokens in chunks", StepBatch(admitted=admitted, rows=[request.row(count)]))
        )
    return steps

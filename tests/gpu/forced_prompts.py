# SPDX-License-Identifier: Apache-2.0
"""What two paths are asked, so that both see the same tokens at every position: texts that the model was taught, which it goes on
with by itself as if it were led, and any texts at all, on which it is led.

Led: the prompt ends anywhere, and a logit bias makes one token the chosen one, again and again; log probabilities are of the logits
without it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models import fp8_error
from phalanx.config.locate import locate
from phalanx.config.sampling_params import SamplingParams
from phalanx.serve.tokenizer import Tokenizer
from tests.gpu.logprob_distance import TOP, Seen

TAIL = 6
SHORTEST, LONGEST = 100, 600


@dataclass(frozen=True)
class Led:
    """A prompt, and the token that follows it TAIL times."""

    prompt: list[int]
    token: int

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *[self.token] * TAIL]

    def params(self, *, whole: bool = False) -> SamplingParams:
        """whole: the prompt's own positions are reported, too."""
        return SamplingParams(
            max_tokens=TAIL + 1, temperature=0, ignore_eos=True, logprobs=TOP, logit_bias={self.token: 100.0}, detokenize=False,
            prompt_logprobs=TOP if whole else None,
        )  # fmt: skip


def taught(most: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, what follows each up to the end of the answer), of the demo model."""
    end = Tokenizer.load(locate("demo")).eos_token_id
    assert end is not None
    texts = fp8_error.texts(most)
    return [text.tokens[: text.answer] for text in texts], [[*text.tokens[text.answer :], end] for text in texts]


def led(name: str, short: int, long: int) -> tuple[list[Led], list[Led]]:
    """Prompts of a few tokens, and of SHORTEST to LONGEST: beginnings of questions and runs of the documentation for the demo
    model, random tokens for others."""
    rng = random.Random(11)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(long)]
    if name != "demo":

        def drawn(count: int) -> Led:
            return Led([rng.randrange(3, 380) for _ in range(count)], rng.randrange(3, 380))

        return [drawn(rng.randint(2, 20)) for _ in range(short)], [drawn(length) for length in lengths]
    from scripts.demo_model import corpus

    asked = [text.tokens[: text.answer] for text in fp8_error.texts()]
    tokenizer = Tokenizer.load(locate("demo"))
    written = [token for piece in corpus.documents() for token in tokenizer.encode(piece, add_special_tokens=False)]

    def cut(tokens: Sequence[int], at: int) -> Led:
        return Led(list(tokens[:at]), tokens[at])

    cuts = [(question, at) for question in asked for at in range(2, len(question))]
    begins = [rng.randrange(0, len(written) - LONGEST - 1) for _ in lengths]
    return [cut(*each) for each in rng.sample(cuts, min(short, len(cuts)))], [
        cut(written[begin:], length) for begin, length in zip(begins, lengths, strict=True)
    ]


Entry = tuple[int, int, Any]
"""(row, token of the row, TokenLogprobs of what follows that token)."""

Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[Any]]
"""Prompts and their parameters -> RequestOutputs."""


def seen(entries: Sequence[Entry], rows: Sequence[Sequence[int]]) -> Seen:
    """As positions of all rows' tokens laid end to end."""
    begins = [0, *itertools.accumulate(len(row) for row in rows)]
    return Seen(
        torch.tensor([begins[row] + token for row, token, _ in entries]),
        torch.tensor([row for row, _, _ in entries]),
        torch.tensor([[token for token, _ in entry.top] for _, _, entry in entries]),
        torch.tensor([[logprob for _, logprob in entry.top] for _, _, entry in entries], dtype=torch.float64),
    )


def lead(generate: Generate, rows: Sequence[Led], first: int, *, whole: bool = False) -> dict[str, list[Entry]]:
    """Ask for them at once; rows are numbered from `first`. "prefill": what the prompts' last tokens gave; "decode": what each led
    token gave; "prompts": what the prompts' other tokens gave, if asked for. Raises ValueError when a token was not led."""
    found: dict[str, list[Entry]] = {"prefill": [], "decode": [], "prompts": []}
    outputs = generate([row.prompt for row in rows], [row.params(whole=whole) for row in rows])
    for number, (row, output) in enumerate(zip(rows, outputs, strict=True), start=first):
        (one,) = output.outputs
        if list(one.token_ids) != [row.token] * (TAIL + 1):
            raise ValueError(f"token {row.token} was to be chosen {TAIL + 1} times, not {list(one.token_ids)}")
        last = len(row.prompt) - 1
        found["prefill"].append((number, last, one.logprobs[0]))
        found["decode"] += [(number, last + step, entry) for step, entry in enumerate(one.logprobs[1:], start=1)]
        for position, entry in enumerate(output.prompt_logprobs or []):
            if entry is not None:
                found["prompts"].append((number, position - 1, entry))
    return found


def cuts(rows: Sequence[Led], each: int) -> list[tuple[int, int]]:
    """(row, tokens): beginnings of the rows' prompts, in an order that puts short and long ones together."""
    rng = random.Random(13)
    found = [(number, rng.randint(2, len(row.prompt))) for number, row in enumerate(rows) for _ in range(each)]
    rng.shuffle(found)
    return found


def cut(generate: Generate, rows: Sequence[Led], where: Sequence[tuple[int, int]], first: int) -> list[Entry]:
    """Ask for one token after each beginning, all at once: what its last token gave."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=TOP, detokenize=False)
    outputs = generate([rows[row].prompt[:count] for row, count in where], [params] * len(where))
    return [(first + row, count - 1, output.outputs[0].logprobs[0]) for (row, count), output in zip(where, outputs, strict=True)]


def go_on(
    generate: Generate, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], first: int
) -> tuple[list[int], dict[str, list[Entry]]]:  # fmt: skip
    """Greedy, all at once, to the end of each answer. Returns the numbers of the rows whose tokens are others, and what was seen
    of those that are the same."""
    found: dict[str, list[Entry]] = {"prefill": [], "decode": []}
    params = [
        SamplingParams(max_tokens=len(answer), temperature=0, logprobs=TOP, detokenize=False) for answer in answers
    ]  # fmt: skip
    others = []
    for number, output in enumerate(generate(prompts, params)):
        (one,) = output.outputs
        if list(one.token_ids) != list(answers[number]):
            others.append(number)
            continue
        entries = [(first + number, len(prompts[number]) - 1 + step, entry) for step, entry in enumerate(one.logprobs)]
        found["prefill"].append(entries[0])
        found["decode"] += entries[1:]
    return others, found

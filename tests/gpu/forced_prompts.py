# SPDX-License-Identifier: Apache-2.0
"""Prompts for two paths, so that both process the same tokens at every position: texts that the model was trained on, which it
continues by itself, and arbitrary texts with a forced continuation.

Forced: the prompt ends anywhere, and a logit bias selects one token again and again. Log probabilities are of the logits without
the bias.
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
from tests.gpu.logprob_distance import TOP, Observation

TAIL = 6
SHORTEST, LONGEST = 100, 600


@dataclass(frozen=True)
class ForcedPrompt:
    """A prompt, and the token that is forced TAIL times behind it."""

    prompt: list[int]
    token: int

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *[self.token] * TAIL]

    def params(self, *, prompt_logprobs: bool = False) -> SamplingParams:
        """prompt_logprobs: also report the prompt's own positions."""
        return SamplingParams(
            max_tokens=TAIL + 1, temperature=0, ignore_eos=True, logprobs=TOP, logit_bias={self.token: 100.0}, detokenize=False,
            prompt_logprobs=TOP if prompt_logprobs else None,
        )  # fmt: skip


def taught(most: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, answers up to their end token) that the demo model was trained on."""
    end = Tokenizer.load(locate("demo")).eos_token_id
    assert end is not None
    texts = fp8_error.texts(most)
    return [text.tokens[: text.answer] for text in texts], [[*text.tokens[text.answer :], end] for text in texts]


def make_prompts(name: str, short: int, long: int) -> tuple[list[ForcedPrompt], list[ForcedPrompt]]:
    """Prompts of a few tokens, and of SHORTEST to LONGEST tokens: prefixes of questions and parts of the documentation for the demo
    model, random tokens for other models."""
    rng = random.Random(11)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(long)]
    if name != "demo":

        def drawn(count: int) -> ForcedPrompt:
            return ForcedPrompt([rng.randrange(3, 380) for _ in range(count)], rng.randrange(3, 380))

        return [drawn(rng.randint(2, 20)) for _ in range(short)], [drawn(length) for length in lengths]
    from scripts.demo_model import corpus

    questions = [text.tokens[: text.answer] for text in fp8_error.texts()]
    tokenizer = Tokenizer.load(locate("demo"))
    written = [token for piece in corpus.documents() for token in tokenizer.encode(piece, add_special_tokens=False)]

    def cut(tokens: Sequence[int], at: int) -> ForcedPrompt:
        return ForcedPrompt(list(tokens[:at]), tokens[at])

    cuts = [(question, at) for question in questions for at in range(2, len(question))]
    begins = [rng.randrange(0, len(written) - LONGEST - 1) for _ in lengths]
    return [cut(*each) for each in rng.sample(cuts, min(short, len(cuts)))], [
        cut(written[begin:], length) for begin, length in zip(begins, lengths, strict=True)
    ]


Entry = tuple[int, int, Any]
"""(row, token of the row, TokenLogprobs of what follows that token)."""

Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[Any]]
"""Prompts and their parameters -> RequestOutputs."""


def observe(entries: Sequence[Entry], rows: Sequence[Sequence[int]]) -> Observation:
    """The entries by their positions in the concatenation of all rows."""
    begins = [0, *itertools.accumulate(len(row) for row in rows)]
    return Observation(
        torch.tensor([begins[row] + token for row, token, _ in entries]),
        torch.tensor([row for row, _, _ in entries]),
        torch.tensor([[token for token, _ in entry.top] for _, _, entry in entries]),
        torch.tensor([[logprob for _, logprob in entry.top] for _, _, entry in entries], dtype=torch.float64),
    )


def ask_forced(
    generate: Generate, rows: Sequence[ForcedPrompt], first: int, *, prompt_logprobs: bool = False
) -> dict[str, list[Entry]]:  # fmt: skip
    """Ask for all rows at once; rows are numbered from `first`. "prefill": entries of the prompts' last tokens. "decode": entries
    of the forced tokens. "prompts": entries of the prompts' other tokens, with prompt_logprobs. Raises ValueError when another
    token was selected."""
    entries: dict[str, list[Entry]] = {"prefill": [], "decode": [], "prompts": []}
    outputs = generate([row.prompt for row in rows], [row.params(prompt_logprobs=prompt_logprobs) for row in rows])
    for number, (row, output) in enumerate(zip(rows, outputs, strict=True), start=first):
        (one,) = output.outputs
        if list(one.token_ids) != [row.token] * (TAIL + 1):
            raise ValueError(f"token {row.token} was to be selected {TAIL + 1} times, not {list(one.token_ids)}")
        last = len(row.prompt) - 1
        entries["prefill"].append((number, last, one.logprobs[0]))
        entries["decode"] += [(number, last + step, entry) for step, entry in enumerate(one.logprobs[1:], start=1)]
        for position, entry in enumerate(output.prompt_logprobs or []):
            if entry is not None:
                entries["prompts"].append((number, position - 1, entry))
    return entries


def prefixes(rows: Sequence[ForcedPrompt], each: int) -> list[tuple[int, int]]:
    """(row, tokens) of prefixes of the rows' prompts, shuffled so that short and long ones are mixed."""
    rng = random.Random(13)
    lengths = [(number, rng.randint(2, len(row.prompt))) for number, row in enumerate(rows) for _ in range(each)]
    rng.shuffle(lengths)
    return lengths


def ask_prefixes(generate: Generate, rows: Sequence[ForcedPrompt], where: Sequence[tuple[int, int]], first: int) -> list[Entry]:
    """Ask for one token behind each prefix, all at once: the entries of the prefixes' last tokens."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=TOP, detokenize=False)
    outputs = generate([rows[row].prompt[:count] for row, count in where], [params] * len(where))
    return [(first + row, count - 1, output.outputs[0].logprobs[0]) for (row, count), output in zip(where, outputs, strict=True)]


def continue_greedily(
    generate: Generate, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], first: int
) -> tuple[list[int], dict[str, list[Entry]]]:  # fmt: skip
    """Ask for all answers at once, greedily. Returns the numbers of the rows with other tokens, and the entries of those with the
    same tokens."""
    parts: dict[str, list[Entry]] = {"prefill": [], "decode": []}
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
        parts["prefill"].append(entries[0])
        parts["decode"] += entries[1:]
    return others, parts

# SPDX-License-Identifier: Apache-2.0
"""Conversations whose turns all take together, with and without hits in the prefix cache."""

from __future__ import annotations

from phalanx import LLM, SamplingParams


def converse(llm: LLM, begun: list[list[int]], turns: int, more: int, new: int, salt: str | None = None) -> list[list[int]]:
    """What all conversations are after the last turn. begun: their beginnings, by user; each turn adds `more` tokens and an answer
    of `new`. salt: nothing is found in the prefix cache."""
    texts = begun
    for turn in range(turns):
        texts = [text + [10 + (7 * user + 3 * turn + n) % 350 for n in range(more)] for user, text in enumerate(texts)]
        params = [
            SamplingParams(
                temperature=0, max_tokens=new, ignore_eos=True, stop_token_ids=[3],
                cache_salt=None if salt is None else f"{salt}.{turn}.{user}",
            ) for user in range(len(texts))
        ]  # fmt: skip
        outputs = llm.generate(texts, params, use_tqdm=False)
        texts = [text + output.outputs[0].token_ids for text, output in zip(texts, outputs, strict=True)]
    return texts

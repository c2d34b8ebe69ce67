# SPDX-License-Identifier: Apache-2.0
"""Check that drafts change a greedy text only where the two best tokens are nearly equal, and no more often than k + 1 rows instead
of one do without drafts.

In 16 bit a row's logits depend on how many rows a step has. A step that verifies k drafts of one request has k + 1. So each prompt
is continued in three ways: alone; in one batch with k others, without drafts; and alone with k drafts a step. A text diverges where
it first differs from the one of its prompt alone. There the two best log probabilities of the latter may differ by the bound at
most: twice the largest difference of a log probability between the two runs without drafts, as long as their texts agree. The
drafts may have as many divergences as the rows, and twice the standard deviation of the difference of both counts more.

    python -m tests.gpu.draft_divergences --model MODEL --out DIR
    python -m tests.gpu.draft_divergences --device cpu --dtypes fp32,bf16 --prompts 20       to try it

`--speculative_config`: what proposes the drafts, prompt lookup by default: the prompts repeat themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness

LOOKUP = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
    "num_speculative_tokens_per_batch_size": [[1, 16, 4]],
}  # fmt: skip
"""The table keeps the depth, whether drafts are worth their time or not."""


@dataclass(frozen=True)
class Text:
    """A greedy continuation: its tokens, their log probabilities, and by how much the best one is ahead of the second."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    margins: Sequence[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128, help="that each prompt is continued by")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--speculative_config", type=json.loads, default=LOOKUP)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--name", default="draft_divergences")
    arguments = parser.parse_args()
    results = [run(arguments, dtype) for dtype in arguments.dtypes.split(",")]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{arguments.name}.json").write_text(json.dumps(results, indent=1))
    return 0 if all(result["passed"] for result in results) else 1


def run(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """One dtype: the three ways, and the verdict."""
    prompts, rows = prompts_of(arguments.prompts), arguments.speculative_config["num_speculative_tokens"] + 1
    options = {
        "device": arguments.device, "dtype": dtype, "tensor_parallel_size": arguments.tp_size, "max_batch_size": 16,
        "max_seq_len": 512, "enable_prefix_caching": False,
    }  # fmt: skip
    alone, together, _ = texts(arguments.model, options, prompts, arguments.tokens, rows)
    drafted, _, verified = texts(
        arguments.model, {**options, "speculative_config": arguments.speculative_config}, prompts, arguments.tokens, 0
    )
    result = {"model": arguments.model, "dtype": dtype, "drafts": rows - 1, **verdict(alone, together, drafted), **verified}
    print(json.dumps(result), flush=True)
    return result


def prompts_of(count: int) -> list[list[int]]:
    """Random ones, each of which repeats itself."""
    chance = random.Random(5)
    prompts = []
    for _ in range(count):
        phrase = [chance.randrange(3, 380) for _ in range(chance.randint(4, 12))]
        prompts.append([chance.randrange(3, 380) for _ in range(4)] + 3 * phrase)
    return prompts


def texts(
    model: str, options: dict[str, Any], prompts: Sequence[list[int]], tokens: int, rows: int
) -> tuple[list[Text], list[Text], dict[str, int]]:  # fmt: skip
    """Each prompt alone, and as one of `rows` in a batch (0: not); and how many drafts were verified and accepted."""
    from phalanx import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    with LLM(model, **options) as llm:
        alone = [text_of(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt in prompts]
        together = []
        for at in range(len(prompts)) if rows else ():
            batch = [prompts[(at + row) % len(prompts)] for row in range(rows)]
            together.append(text_of(llm.generate(batch, params, use_tqdm=False)[0]))
        stats = llm.stats()
    return alone, together, {"draft_tokens": stats.draft_tokens, "accepted_tokens": sum(stats.accepted_tokens)}


def text_of(output: Any) -> Text:
    """Of the first completion of a request."""
    completion = output.outputs[0]
    best = [sorted((value for _, value in entry.top), reverse=True) for entry in completion.logprobs]
    return Text(
        completion.token_ids, [entry.logprob for entry in completion.logprobs], [first - second for first, second, *_ in best]
    )


def verdict(alone: Sequence[Text], together: Sequence[Text], drafted: Sequence[Text]) -> dict[str, Any]:
    """Divergences of the texts among k + 1 rows and of those with drafts, from those alone. passed: see the module."""
    noise = [
        abs(one - other)
        for a, b in zip(alone, together, strict=True)
        for one, other in zip(a.logprobs[: agreed(a, b)], b.logprobs[: agreed(a, b)], strict=True)
    ]  # fmt: skip
    bound = 2 * max(noise, default=0.0)
    by_rows, by_drafts = margins(alone, together), margins(alone, drafted)
    allowed = len(by_rows) + 2 * math.sqrt(len(by_rows) + len(by_drafts))
    beyond = [margin for margin in by_drafts if margin > bound]
    return {
        "texts": len(alone), "divergences of rows": len(by_rows), "divergences of drafts": len(by_drafts), "bound": bound,
        "largest margin of rows": max(by_rows, default=0.0), "largest margin of drafts": max(by_drafts, default=0.0),
        "passed": not beyond and len(by_drafts) <= (allowed if by_rows else 0),
    }  # fmt: skip


def agreed(one: Text, other: Text) -> int:
    """Tokens up to the first that differs."""
    return next((at for at, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), len(one.tokens))


def margins(alone: Sequence[Text], others: Sequence[Text]) -> list[float]:
    """Of each text that diverges: by how much the best token was ahead there, alone."""
    pairs = [(a, agreed(a, b)) for a, b in zip(alone, others, strict=True)]
    return [text.margins[at] for text, at in pairs if at < len(text.tokens)]


if __name__ == "__main__":
    sys.exit(main())

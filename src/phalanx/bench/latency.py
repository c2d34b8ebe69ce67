# SPDX-License-Identifier: Apache-2.0
"""Time per token while a fixed number of requests decode together: `phalanx bench latency`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from phalanx.bench import offline, report, roofline
from phalanx.bench.offline import BenchmarkTarget
from phalanx.bench.prediction.beside import predicted
from phalanx.bench.roofline import Bandwidth
from phalanx.bench.workloads import Workload, prompts
from phalanx.serve.llm import LLM

_WARM_TOKENS = 8
_FIRST_TOKENS = 3
"""Runs to the first token for each run to the last: they are short, and vary more, as prompts are at the power limit."""


def measure(target: BenchmarkTarget, llm: LLM, workload: Workload, bandwidth: Bandwidth) -> dict[str, Any]:
    """One decode workload: ms per token, seconds to the first token, and the fraction of the roofline."""
    ids = prompts(workload, llm.facts.vocab_size, target.options.seed)
    first, complete = samples(workload, ids, partial(offline.seconds_of, llm))
    seconds = seconds_per_token(complete, first, workload.output_len)
    least = roofline.decode_seconds(target.shape, llm.facts, workload, bandwidth.best) if bandwidth.best else None
    row = {
        "workload": workload.name, "requests": workload.requests, "input_len": workload.input_len,
        "output_len": workload.output_len, "tpot_ms": seconds * 1e3, "prefill_s": min(first),
        "output_tok_s": workload.requests / seconds if seconds > 0 else None,
        "roof_ms": least * 1e3 if least is not None else None, "fraction_of_roof": roofline.fraction(least, seconds),
        "samples_s": {"first_token": first, "all_tokens": complete},
        "predicted": predicted(target.shape, llm.facts, workload, target.options),
    }  # fmt: skip
    offline.logger.info("%s: %.3f ms per token", workload.name, row["tpot_ms"])
    return row


def samples(workload: Workload, prompts: list[list[int]], seconds_of: offline.SecondsOf) -> tuple[list[float], list[float]]:
    """Seconds to the first token of all prompts, and to their last one, behind a run that is not timed."""
    seconds_of(prompts, min(_WARM_TOKENS, workload.output_len))
    first: list[float] = []
    complete: list[float] = []
    for _ in range(workload.repeats):
        first += [seconds_of(prompts, 1) for _ in range(_FIRST_TOKENS)]
        complete.append(seconds_of(prompts, workload.output_len))
    return first, complete


def seconds_per_token(complete: Sequence[float], first: Sequence[float], output_len: int) -> float:
    """Seconds per token after the first: (t(output_len tokens) - t(1 token)) / (output_len - 1), the best of each."""
    return (min(complete) - min(first)) / (output_len - 1)


def table(document: report.Document) -> Any:
    rows = [
        [
            row["workload"], f"{row['tpot_ms']:.3f}", f"{row['prefill_s']:.4f}", _number(row["output_tok_s"]),
            "-" if row["roof_ms"] is None else f"{row['roof_ms']:.3f}", report.percent_text(row["fraction_of_roof"]),
        ]
        for row in document["results"]
    ]  # fmt: skip
    columns = ["workload", "ms per token", "first token s", "output tok/s", "roofline ms", "of roofline"]
    return report.table(report.title(document), columns, rows, report.caption(document))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"

# SPDX-License-Identifier: Apache-2.0
"""Tokens per second with all requests queued at once: `phalanx bench throughput`."""

from __future__ import annotations

from functools import partial
from typing import Any

from phalanx.bench import offline, report, roofline
from phalanx.bench.offline import BenchmarkTarget
from phalanx.bench.prediction.beside import predicted
from phalanx.bench.roofline import Bandwidth
from phalanx.bench.workloads import Workload, prompts
from phalanx.serve.llm import LLM

_WARM_TOKENS = 4


def measure(target: BenchmarkTarget, llm: LLM, workload: Workload, bandwidth: Bandwidth) -> dict[str, Any]:
    """One batch workload: output and total tokens per second, steps and preemptions, and the fraction of the roofline.

    A warm-up that is not timed comes first: a few tokens for as many of its prompts as fill a step.
    """
    ids = prompts(workload, llm.facts.vocab_size, target.options.seed)
    warm_up(workload, ids, llm.facts.max_num_tokens, partial(offline.seconds_of, llm))
    before = llm.stats()
    times = [offline.seconds_of(llm, ids, workload.output_len) for _ in range(workload.repeats)]
    after, seconds = llm.stats(), min(times)
    least = roofline.batch_seconds(target.shape, llm.facts, workload, bandwidth.best) if bandwidth.best else None
    new_tokens = workload.requests * workload.output_len
    row = {
        "workload": workload.name, "requests": workload.requests, "input_len": workload.input_len,
        "output_len": workload.output_len, "seconds": seconds, "output_tok_s": new_tokens / seconds,
        "total_tok_s": workload.requests * workload.seq_len / seconds,
        "requests_s": workload.requests / seconds, "steps": (after.steps - before.steps) // workload.repeats,
        "preemptions": (after.preemptions - before.preemptions) // workload.repeats,
        "roof_tok_s": new_tokens / least if least is not None else None, "fraction_of_roof": roofline.fraction(least, seconds),
        "samples_s": times,
        "predicted": predicted(target.shape, llm.facts, workload, target.options),
    }  # fmt: skip
    offline.logger.info("%s: %.0f output tokens/s", workload.name, row["output_tok_s"])
    return row


def warm_up(workload: Workload, prompts: list[list[int]], max_num_tokens: int, seconds_of: offline.SecondsOf) -> None:
    """A few tokens of as many prompts as fill a step: what libraries load and choose at the first GEMM of a size is no part of the
    rate."""
    warm = min(workload.requests, max_num_tokens // workload.input_len + 1)
    seconds_of(prompts[:warm], min(_WARM_TOKENS, workload.output_len))


def table(document: report.Document) -> Any:
    rows = [
        [
            row["workload"], f"{row['output_tok_s']:,.0f}", f"{row['total_tok_s']:,.0f}", f"{row['seconds']:.1f}",
            f"{row['steps']:,}", f"{row['preemptions']:,}", "-" if row["roof_tok_s"] is None else f"{row['roof_tok_s']:,.0f}",
            report.percent_text(row["fraction_of_roof"]),
        ]
        for row in document["results"]
    ]  # fmt: skip
    columns = ["workload", "output tok/s", "total tok/s", "seconds", "steps", "preempted", "roofline tok/s", "of roofline"]
    return report.table(report.title(document), columns, rows, report.caption(document))

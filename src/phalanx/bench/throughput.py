# SPDX-License-Identifier: Apache-2.0
"""How many tokens per second come when all requests are queued at once: `phalanx bench throughput`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.bench import offline, report, roof
from phalanx.bench.offline import Subject
from phalanx.bench.prediction.beside import predicted
from phalanx.bench.roof import Bandwidth
from phalanx.bench.workloads import Workload, prompts
from phalanx.serve.llm import LLM

_WARM_TOKENS = 4


def run(subject: Subject, workloads: Sequence[Workload]) -> report.Document:
    """Start an engine, measure every workload, end it; the report. Raises what an LLM raises."""
    offline.check(subject, workloads)
    bandwidth = roof.measure(subject.device)
    with offline.engine(subject) as (llm, start_s):
        results = [measure(subject, llm, workload, bandwidth) for workload in workloads]
        return offline.document(subject, llm.facts, bandwidth, start_s, results)


def measure(subject: Subject, llm: LLM, workload: Workload, bandwidth: Bandwidth) -> dict[str, Any]:
    """One batch workload: output and total tokens per second, what the scheduler had to do for it, and the fraction of the roof.

    It is not the engine's first work: a few tokens each for as many of its prompts as fill a step go before it, and are not timed.
    """
    ids = prompts(workload, llm.facts.vocab_size, subject.options.seed)
    # What libraries load and choose for a size at its first product is no part of a rate.
    warm = min(workload.requests, llm.facts.max_num_tokens // workload.input_len + 1)
    offline.seconds_of(llm, ids[:warm], min(_WARM_TOKENS, workload.output_len))
    times, before = [], llm.stats()
    for _ in range(workload.repeats):
        times.append(offline.seconds_of(llm, ids, workload.output_len))
    after, seconds = llm.stats(), min(times)
    least = roof.batch_seconds(subject.shape, llm.facts, workload, bandwidth.best) if bandwidth.best else None
    made = workload.requests * workload.output_len
    found = {
        "workload": workload.name, "requests": workload.requests, "input_len": workload.input_len,
        "output_len": workload.output_len, "seconds": seconds, "output_tok_s": made / seconds,
        "total_tok_s": workload.requests * workload.seq_len / seconds,
        "requests_s": workload.requests / seconds, "steps": (after.steps - before.steps) // workload.repeats,
        "preemptions": (after.preemptions - before.preemptions) // workload.repeats,
        "roof_tok_s": made / least if least is not None else None, "fraction_of_roof": roof.fraction(least, seconds),
        "samples_s": times,
        "predicted": predicted(subject.shape, llm.facts, workload, subject.options.allreduce_strategy),
    }  # fmt: skip
    offline.logger.info("%s: %.0f output tokens/s", workload.name, found["output_tok_s"])
    return found


def table(document: report.Document) -> Any:
    rows = [
        [
            row["workload"], f"{row['output_tok_s']:,.0f}", f"{row['total_tok_s']:,.0f}", f"{row['seconds']:.1f}",
            f"{row['steps']:,}", f"{row['preemptions']:,}", "-" if row["roof_tok_s"] is None else f"{row['roof_tok_s']:,.0f}",
            report.percent_text(row["fraction_of_roof"]),
        ]
        for row in document["results"]
    ]  # fmt: skip
    columns = ["workload", "output tok/s", "total tok/s", "seconds", "steps", "preempted", "roof tok/s", "of the roof"]
    return report.table(report.title(document), columns, rows, report.caption(document))

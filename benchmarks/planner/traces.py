# SPDX-License-Identifier: Apache-2.0
"""The two public traces through the simulator: how long it takes, and the prefix cache's hits beside an independent count.

`python -m benchmarks.planner.traces --azure FILE --mooncake FILE --record`. The files are not in the repository: Azure's
AzureLLMInferenceTrace_conv.csv (Splitwise, ISCA 2024) and Mooncake's conversation_trace.jsonl (FAST 2025).
The count knows nothing of blocks and schedulers: requests one after the other, a dictionary of beginnings, whole blocks of 16
tokens, and the last token of a prompt always computed. The simulator serves the same requests one at a time with room for all of
them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.engine.scheduler import SchedulerOptions
from phalanx.layout import Layout
from phalanx.planner import arrivals, scenario, subject
from phalanx.planner.arrivals import HASHED
from phalanx.planner.search import PlanRequest

BLOCK = 16


def counted(path: Path, first: int = 0) -> tuple[int, int]:
    """(prompt tokens found in the cache, prompt tokens) of Mooncake's trace under a cache that forgets nothing."""
    known: set[tuple[int, ...]] = set()
    lengths: dict[tuple[int, ...], int] = {}  # a beginning that ends within a hashed block -> its longest length seen
    hits = prompt_tokens = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if first and number == first:
            break
        row = json.loads(line)
        length, ids = row["input_length"], tuple(row["hash_ids"])
        known_parts = 0
        while known_parts < len(ids) and ids[: known_parts + 1] in known:
            known_parts += 1
        shared = known_parts * HASHED
        if known_parts < len(ids):
            shared += lengths.get(ids[: known_parts + 1], 0)
        hits += min(shared, length - 1) // BLOCK * BLOCK
        prompt_tokens += length
        for count in range(1, len(ids) + 1):
            part = min(length - (count - 1) * HASHED, HASHED)
            if part == HASHED:
                known.add(ids[:count])
            else:
                lengths[ids[:count]] = max(lengths.get(ids[:count], 0), part)
    return hits, prompt_tokens


def replica_spec(model: str, tp: int, room: int) -> scenario.ReplicaSpec:
    """With a cache of so many tokens, whatever the GPUs have: to see what can be found at all."""
    machine, _ = subject.machine_for("H200")
    shape = subject.shape_for(model)
    request = PlanRequest(dtype="fp8", kv_cache_dtype="fp8", max_batch_size=256, max_seq_len=131072)
    base = scenario.ReplicaSpec.of(shape, machine, request, Layout(tp=tp))
    options = SchedulerOptions(**{**vars(base.options), "num_blocks": room // BLOCK}) if room else base.options
    return scenario.ReplicaSpec(base.costs, options)


def mooncake(path: Path, first: int) -> dict[str, Any]:
    """Hits beside the count, one request at a time; then as the trace has it, with the memory that there is."""
    rows = arrivals.of(str(path), isl=0, osl=0, requests=first)
    alone = replica_spec("llama-3.1-70b", 4, 400_000_000).run(rows, concurrency=1)
    hits, prompt_tokens = counted(path, first)
    real = replica_spec("llama-3.1-70b", 4, 0).run(rows, 4)
    return {
        "requests": len(rows),
        "prompt_tokens": prompt_tokens,
        "counted_hits": hits,
        "simulated_hits": alone.hits,
        "counted_rate": hits / prompt_tokens,
        "simulated_rate": alone.hits / prompt_tokens,
        "equal": hits == alone.hits,
        "cpu_s": alone.cpu,
        "tokens_per_core_second": alone.tokens_per_core_second,
        "as_the_trace_has_it": {
            "replicas": 4,
            "tp": 4,
            "hit_rate": real.hits / prompt_tokens,
            "cpu_s": real.cpu,
            "preemptions": real.preemptions,
        },
    }


def azure(path: Path) -> dict[str, Any]:
    rows = arrivals.of(str(path), isl=0, osl=0, requests=0)
    begin = time.perf_counter()
    result = replica_spec("llama-3.1-70b", 4, 0).run(rows)
    return {
        "requests": len(rows), "wall_s": time.perf_counter() - begin, "cpu_s": result.cpu, "tokens": result.computed,
        "tokens_per_core_second": result.tokens_per_core_second, "trace_s": rows[-1].at,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--azure", type=Path)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--first", type=int, default=0, help="of Mooncake's requests, so many; 0 for all")
    parser.add_argument("--record", action="store_true", help="keep the figures in benchmarks/results")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    if options.azure:
        figures["azure"] = azure(options.azure)
        print(json.dumps(figures["azure"], indent=1))
    if options.mooncake:
        figures["mooncake"] = mooncake(options.mooncake, options.first)
        print(json.dumps(figures["mooncake"], indent=1))
    if options.record:
        from benchmarks import harness

        print(f"written: {harness.write('plan_traces', figures).relative_to(harness.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

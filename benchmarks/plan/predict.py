# SPDX-License-Identifier: Apache-2.0
"""Predictions that are committed before anything of the kind is measured: `python -m benchmarks.plan.predict` writes
benchmarks/results/plan_predictions.json, with the commit of the coefficients. `--measured FILE` sets the figures of a
`phalanx bench all --json FILE` beside them.

H100: a GPU that was never measured. Contexts of 2k to 32k on H200: the fit saw 200 tokens a row, and layers of 1,500. Mixtures of
experts: no row of them is in the fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from phalanx.bench.workloads import parse
from phalanx.plan import burst, search, subject
from phalanx.plan.burst import Limits
from phalanx.plan.cost import Costs
from phalanx.plan.search import Figure, Layout, Wanted

NAME = "plan_predictions"


@dataclass(frozen=True)
class Asked:
    """One engine and its workloads, as `phalanx bench` names them."""

    group: str
    gpu: str
    model: str
    dtype: str
    kv: str
    layout: Layout
    workloads: tuple[str, ...]


DECODES = ("decode-1", "decode-64", "decode-256")
LONG = ("decode-1x2048x32", "decode-1x8192x32", "decode-1x32768x32", "decode-16x8192x32", "decode-8x32768x32")
ASKED = (
    Asked("H100", "H100", "llama-3-8b", "bf16", "model", Layout(1, 1, 1, 1), (*DECODES, "batch-512x1000x1000")),
    Asked("H100", "H100", "llama-3-8b", "bf16", "fp8", Layout(1, 1, 1, 1), (*DECODES, "batch-512x1000x1000")),
    Asked("H100", "H100", "llama-3-8b", "fp8", "fp8", Layout(1, 1, 1, 1), (*DECODES, "batch-512x1000x1000")),
    Asked("contexts", "H200", "llama-3.1-8b", "bf16", "model", Layout(1, 1, 1, 1), LONG),
    Asked("contexts", "H200", "llama-3.1-8b", "bf16", "fp8", Layout(1, 1, 1, 1), LONG),
    Asked("contexts", "H200", "llama-3.1-70b", "fp8", "fp8", Layout(2, 1, 1, 1), LONG),
    Asked("experts", "H200", "mixtral-8x7b", "fp8", "model", Layout(1, 1, 1, 1), ("decode-1", "decode-64", "batch-512x1000x1000")),
    Asked("experts", "H200", "mixtral-8x22b", "fp8", "model", Layout(2, 1, 1, 1), ("decode-1", "decode-64")),
    Asked("experts", "H200", "qwen3-30b-a3b", "fp8", "model", Layout(1, 1, 1, 1), ("decode-1", "decode-64", "batch-512x1000x1000")),
    Asked("experts", "H200", "qwen3-235b-a22b", "fp8", "fp8", Layout(2, 1, 1, 1), ("decode-1", "decode-64")),
    Asked("experts", "H200", "gpt-oss-120b", "bf16", "model", Layout(1, 1, 1, 1), ("decode-1", "decode-64", "batch-512x1000x1000")),
    Asked("experts", "H200", "deepseek-v2-lite", "fp8", "model", Layout(1, 1, 1, 1), ("decode-1", "decode-64")),
)


def predicted(asked: Asked) -> dict[str, Any]:
    """KV tokens, and each workload's figure with its interval: ms per token, or output tokens per second."""
    shape, machine = subject.shape_for(asked.model), subject.machine_for(asked.gpu)[0]
    kv_size = 1 if asked.kv == "fp8" else 2
    longest = max(parse(name).seq_len for name in asked.workloads)
    wanted = Wanted(dtype=asked.dtype, kv_cache_dtype=asked.kv, max_seq_len=max(4096, longest))
    _, kv_tokens, _ = search.memory(shape, machine, wanted, asked.layout.split, 512, kv_size)
    costs = Costs(shape, asked.dtype, kv_size, asked.layout.split, machine)
    half = search.half_width(shape, machine, asked.layout, costs)
    figures = {}
    for name in asked.workloads:
        work = parse(name)
        if work.kind == "decode":
            value = 1e3 * burst.decode_round(costs, work.requests, work.input_len + work.output_len / 2)
        else:
            value = burst.run(
                costs, work.requests, work.input_len, work.output_len, Limits(512, 8192, kv_tokens)
            ).output_tokens_per_second
        figures[name] = Figure.of(value, half, costs.label).as_json()
    return {
        "group": asked.group, "gpu": asked.gpu, "model": asked.model, "dtype": asked.dtype, "kv_cache_dtype": asked.kv,
        "layout": asked.layout.as_json(), "kv_tokens": kv_tokens, "figures": figures,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="reports of `phalanx bench all`")
    asked = parser.parse_args()
    path = harness.RESULTS / f"{NAME}.json"
    if not asked.measured:
        print(f"written: {harness.write(NAME, {'rows': [predicted(each) for each in ASKED]}).relative_to(harness.ROOT)}")
        return 0
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for file in asked.measured:
        document = json.loads(file.read_text(encoding="utf-8"))
        for row in rows:
            said = document["asked"]
            same = row["model"] == said["model"] and row["layout"]["tp"] == said.get("tensor_parallel_size", 1)
            if not same or (row["kv_cache_dtype"] == "fp8") != (said.get("kv_cache_dtype") == "fp8"):
                continue
            for result in document["results"]:
                figure = row["figures"].get(result["workload"])
                if figure:
                    value = result.get("tpot_ms") or result["output_tok_s"]
                    inside = figure["low"] <= value <= figure["high"]
                    print(
                        f"{row['gpu']} {row['model']} {row['dtype']} {result['workload']:22} "
                        f"predicted {figure['value']:10,.2f} measured "
                        f"{value:10,.2f} {figure['value'] / value - 1:+7.1%} {'inside' if inside else 'OUTSIDE'}"
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

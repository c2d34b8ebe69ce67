# SPDX-License-Identifier: Apache-2.0
"""The overhead of the server: tokens per second over HTTP with 32 streams, compared to offline `generate` with the same load.

Both run the demo model on CPU: 32 requests at once with the same prompt ids and lengths; over HTTP they stream. The client is that
of `phalanx bench serve`: on a machine with few cores, a slow client would limit the result.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from benchmarks import harness
from benchmarks.serve import equal_streams, started
from phalanx.bench.load import Load, run

TARGET = 0.80


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    equal_streams.add_arguments(parser, new_tokens=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tp_size", type=int, default=1)
    arguments = parser.parse_args()
    load = equal_streams.load_of(arguments)
    offline = offline_rates(load, arguments.repeats, arguments.tp_size)
    served = served_rates(load, arguments.repeats, arguments.tp_size)
    ratio = statistics.median(served) / statistics.median(offline)
    print(f"offline generate: {statistics.median(offline):8.1f} tokens/s (median of {len(offline)})")
    print(f"over HTTP:        {statistics.median(served):8.1f} tokens/s (median of {len(served)}) with {arguments.streams} streams")
    print(f"ratio: {ratio:.2f} (target: at least {TARGET:.2f})")
    figures = {"asked": vars(arguments), "offline_tokens_per_s": offline, "served_tokens_per_s": served, "ratio": ratio}
    print(f"written: {harness.write('serve_overhead_cpu', figures).relative_to(harness.ROOT)}")
    return 0 if ratio >= TARGET else 1


def offline_rates(load: Load, repeats: int, tp: int) -> list[float]:
    from phalanx import LLM, SamplingParams

    params, prompts = SamplingParams(max_tokens=load.output_len, temperature=0, ignore_eos=True), load.prompts()
    rates = []
    with LLM("demo", tensor_parallel_size=tp, enable_prefix_caching=False, device="cpu") as llm:
        llm.generate(prompts[:2], params, use_tqdm=False)
        for _ in range(repeats):
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            rates.append(sum(len(o.outputs[0].token_ids) for o in outputs) / seconds)
    return rates


def served_rates(load: Load, repeats: int, tp: int) -> list[float]:
    command = [sys.executable, "-m", "phalanx", "serve", "demo", "--tp_size", str(tp), "--device", "cpu"]
    with started.server(lambda port: [*command, "--port", str(port), "--no_enable_prefix_caching"]) as (_, url):
        results = [run(url, None, load)["results"] for _ in range(repeats)]
        assert all(each["completed"] == load.requests for each in results), results
        return [each["output_tok_s"] for each in results]


if __name__ == "__main__":
    sys.exit(main())

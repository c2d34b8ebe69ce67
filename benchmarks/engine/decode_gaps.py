# SPDX-License-Identifier: Apache-2.0
"""Gaps between the tokens of streams beside one long prompt, with and without a bound on them: a real engine and its ranks.

For each bound it prints the median, the 99th percentile and the maximum of the gaps while the prompt is computed, the time of the
prompt, and the tokens per second of all streams together. On CPU with the demo model by default, or a shape of `phalanx bench` with
dummy weights; the limit of positions is raised: answers beyond that make no sense, and take as long as others.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from phalanx.bench import shapes
from phalanx.config.locate import locate
from phalanx.config.options import EngineOptions
from phalanx.config.sampling_params import SamplingParams
from phalanx.serve.client import EngineProcessClient

STREAM_PROMPT, STREAM_TOKENS = 32, 4000


def longer(model: str, positions: int, folder: Path) -> Path:
    """A copy of a model, or of a shape's folder, that takes so many positions."""
    target = folder / "model"
    if shapes.config_of(model) is None:
        shutil.copytree(locate(model, None), target)
    else:
        shapes.write(model, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = max(positions, config["max_position_embeddings"])
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


async def measure(options: EngineOptions, streams: int, prompt: int, warm: int) -> dict[str, float]:
    """The figures of one engine. warm: tokens of a prompt before the one that is measured."""
    client = await EngineProcessClient.start(options)
    chance = random.Random(1)
    tokens = lambda count: [chance.randrange(10, 1000) for _ in range(count)]  # noqa: E731
    times: dict[str, list[float]] = {}

    async def run(name: str, count: int, output: int) -> None:
        at = times[name] = []
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        async for update in client.add(name, tokens(count), params):
            at += [time.monotonic()] * len(update.tokens)

    try:
        tasks = [asyncio.create_task(run(f"stream {n}", STREAM_PROMPT, STREAM_TOKENS)) for n in range(streams)]
        while not all(len(times.get(f"stream {n}", ())) > 50 for n in range(streams)):
            await asyncio.sleep(0.1)
        if warm:
            await run("warm", warm, 1)
        begin = time.monotonic()
        await run("prompt", prompt, 1)
        end = time.monotonic()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await client.close()
    gaps: list[float] = []
    count = 0
    for n in range(streams):
        within = [at for at in times[f"stream {n}"] if begin <= at <= end]
        count += len(within)
        gaps += [later - earlier for earlier, later in itertools.pairwise(within)]
    gaps.sort()
    return {
        "gaps": len(gaps), "p50_ms": 1000 * gaps[len(gaps) // 2], "p99_ms": 1000 * gaps[int(0.99 * len(gaps))],
        "max_ms": 1000 * gaps[-1], "prompt_s": end - begin, "stream_tokens_per_s": count / (end - begin),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv_cache_dtype", default="auto")
    parser.add_argument("--kv_cache_bytes", type=int, help="per rank; the default of a CPU has no room for 200,000 tokens")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=16_000, help="tokens")
    parser.add_argument("--warm", type=int, default=4000, help="tokens of a prompt before the measured one")
    parser.add_argument("--bounds", default="none,200,100,50", help="ms")
    parser.add_argument("--record", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = longer(args.model, args.prompt + 65_536, Path(folder))
        print(f"{'bound, ms':>10} {'p50':>8} {'p99':>8} {'max':>8} {'prompt, s':>10} {'stream tokens/s':>16}")
        for bound in args.bounds.split(","):
            options = EngineOptions(
                model=str(model), device=args.device, tensor_parallel_size=args.tp_size, enable_prefix_caching=False,
                dtype=args.dtype, kv_cache_dtype=args.kv_cache_dtype, kv_cache_bytes=args.kv_cache_bytes,
                load_format="auto" if shapes.config_of(args.model) is None else "dummy",
                max_decode_gap_ms=None if bound == "none" else bound if bound == "auto" else float(bound),
            )  # fmt: skip
            figures[bound] = one = asyncio.run(measure(options, args.streams, args.prompt, args.warm))
            print(
                f"{bound:>10} {one['p50_ms']:8.1f} {one['p99_ms']:8.1f} {one['max_ms']:8.1f} {one['prompt_s']:10.1f} "
                f"{one['stream_tokens_per_s']:16.0f}", flush=True,
            )  # fmt: skip
    if args.record:
        setting = {name: getattr(args, name) for name in ("model", "device", "dtype", "tp_size", "streams", "prompt")}
        print(f"written: {harness.write(args.record, {'asked': setting, 'bounds': figures}).relative_to(harness.ROOT)}")


if __name__ == "__main__":
    main()

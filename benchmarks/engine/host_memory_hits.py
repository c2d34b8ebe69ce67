# SPDX-License-Identifier: Apache-2.0
"""Prefixes that come back from host memory: time to the first token beside computing them, and what decodes beside the copies feel.
A shape of `phalanx bench` with dummy weights; its limit of positions is raised.

1. computed: prompts that are new, one after the other. They are more than the KV cache holds.
2. found: the same prompts again. 3. more: the same with some tokens of their own behind them.
4. beside: the same again while streams decode: their tokens per second and gaps in the second and a half before, and during it.

    python -m benchmarks.engine.host_memory_hits --model llama-3-70b --tp_size 2 --dtype fp8 --record NAME
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.engine.decode_gaps import longer
from phalanx.config.options import EngineOptions
from phalanx.config.sampling_params import SamplingParams
from phalanx.serve.client import EngineProcessClient

QUIET_SECONDS = 1.5


class Measurement:
    def __init__(self, client: EngineProcessClient, streams: int) -> None:
        self._client, self._streams = client, streams
        self._times: dict[str, list[float]] = {}
        self._names = itertools.count()

    async def _run(self, name: str, tokens: list[int], output: int) -> None:
        at = self._times[name] = []
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        async for update in self._client.add(name, tokens, params):
            at += [time.monotonic()] * len(update.tokens)

    async def first_token(self, prompt: list[int]) -> float:
        """Seconds to it."""
        begin, name = time.monotonic(), f"request {next(self._names)}"
        await self._run(name, prompt, 1)
        return round(self._times.pop(name)[0] - begin, 3)

    async def beside(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        streams = [f"stream {number}" for number in range(self._streams)]
        tasks = [asyncio.create_task(self._run(name, [7 + at] * 64, 100_000)) for at, name in enumerate(streams)]
        while not all(len(self._times.get(name, ())) > 50 for name in streams):
            await asyncio.sleep(0.05)
        rows = []
        for prompt in prompts:
            begin = time.monotonic()
            await asyncio.sleep(QUIET_SECONDS)
            middle = time.monotonic()
            first = await self.first_token(prompt)
            end = time.monotonic()
            quiet, during = self._of_streams(streams, begin, middle), self._of_streams(streams, middle, end)
            rows.append({"first_token_s": first, "quiet": quiet, "during": during})
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return rows

    def _of_streams(self, names: list[str], begin: float, end: float) -> dict[str, float]:
        within = [[at for at in self._times[name] if begin <= at <= end] for name in names]
        gaps = sorted(later - earlier for each in within for earlier, later in itertools.pairwise(each))
        rate = sum(map(len, within)) / (end - begin)
        return {"tokens_per_s": round(rate, 1), "p50_ms": round(1e3 * gaps[len(gaps) // 2], 2), "max_ms": round(1e3 * gaps[-1], 2)}


async def measure(options: EngineOptions, args: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(1)
    draw = lambda count: [chance.randrange(10, 1000) for _ in range(count)]  # noqa: E731
    prompts, figures = [draw(args.prompt) for _ in range(args.prompts)], dict[str, Any]()
    client = await EngineProcessClient.start(options)
    try:
        run = Measurement(client, args.streams)
        for name in ("computed", "found"):
            figures[name] = [await run.first_token(prompt) for prompt in prompts]
        figures["more"] = [await run.first_token(prompt + draw(args.more)) for prompt in prompts]
        figures["beside"] = await run.beside(prompts)
    finally:
        await client.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--kv_cache_dtype", default="fp8")
    parser.add_argument("--kv_cache_bytes", type=int, default=12 << 30)
    parser.add_argument("--kv_host_memory", type=int, default=40 << 30)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=57_600, help="tokens")
    parser.add_argument("--more", type=int, default=6400, help="tokens")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--record", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        positions = 2 * (args.prompt + args.more)
        options = EngineOptions(
            model=str(longer(args.model, positions, Path(folder))), device=args.device, tensor_parallel_size=args.tp_size,
            dtype=args.dtype, kv_cache_dtype=args.kv_cache_dtype, load_format="dummy", kv_cache_bytes=args.kv_cache_bytes,
            kv_host_memory=args.kv_host_memory, max_seq_len=positions, max_batch_size=64,
        )  # fmt: skip
        figures = asyncio.run(measure(options, args))
    for name, value in figures.items():
        print(name, *value, sep="\n  ")
    if args.record:
        setting = {name: value for name, value in vars(args).items() if name != "record"}
        print(f"written: {harness.write(args.record, {'asked': setting, **figures}).relative_to(harness.ROOT)}")


if __name__ == "__main__":
    main()

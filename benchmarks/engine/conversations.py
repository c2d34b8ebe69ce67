# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns, more of them than the KV cache holds, with and without host memory for prefixes: a real engine.

Each prompt is the conversation so far and new tokens; in each turn the conversations come in another order, a few at once. For each
size of host memory it prints which part of the later turns' prompts was found on the device and in host memory, the median time to
their first token, and the time of all turns. On CPU with the demo model by default.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

from benchmarks import harness
from phalanx import LLM, SamplingParams
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout.memory import block_bytes, stage_caches

BLOCK = 16


async def converse(llm: LLM, args: argparse.Namespace) -> dict[str, float]:
    """The figures of all turns."""
    chance = random.Random(1)
    texts: list[list[int]] = [[] for _ in range(args.conversations)]
    params = SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True)
    first_tokens: list[float] = []
    limit = asyncio.Semaphore(args.at_once)

    async def one(user: int, turn: int) -> None:
        texts[user] += [chance.randrange(10, 1000) for _ in range(args.input)]
        async with limit:
            begin, first, answer = time.monotonic(), 0.0, list[int]()
            async for output in llm.generate_async(texts[user], params):
                first, answer = first or time.monotonic() - begin, output.outputs[0].token_ids
            texts[user] += answer
        if turn:
            first_tokens.append(first)

    begin, first_turn = time.monotonic(), llm.stats()
    for turn in range(args.turns):
        order = chance.sample(range(args.conversations), args.conversations)
        await asyncio.gather(*(one(user, turn) for user in order))
        if not turn:
            first_turn = llm.stats()
    stats, seconds = llm.stats(), time.monotonic() - begin
    later = stats.prefix_queries - first_turn.prefix_queries
    host = stats.host_hits - first_turn.host_hits
    return {
        "device": (stats.prefix_hits - first_turn.prefix_hits - host) / later, "host": host / later,
        "first_token_ms": 1000 * statistics.median(first_tokens), "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--input", type=int, default=400, help="new tokens of a turn")
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--at_once", type=int, default=2)
    parser.add_argument("--fits", type=float, default=3, help="conversations that the KV cache of the device holds")
    parser.add_argument("--host", default="0,6,12", help="conversations that host memory holds, one engine for each number")
    parser.add_argument("--record", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    args = parser.parse_args()
    longest = args.turns * (args.input + args.output)
    dtype = "fp32" if args.device == "cpu" else "bf16"
    (caches,) = stage_caches(ModelShape.from_folder(locate(args.model, None)), dtype, dtype, Layout())
    tokens = block_bytes(caches, 1) * longest
    figures: dict[str, Any] = {}
    print(f"{'in host memory':>15} {'found: device':>15} {'host':>8} {'first token, ms':>16} {'all, s':>8}")
    for count in args.host.split(","):
        with LLM(
            args.model, device=args.device, dtype=dtype, tensor_parallel_size=args.tp_size, max_batch_size=args.at_once,
            max_seq_len=longest, kv_block_size=BLOCK, kv_cache_bytes=int(args.fits * tokens) // args.tp_size,
            kv_host_memory=int(float(count) * tokens), skip_tokenizer_init=True,
        ) as llm:  # fmt: skip
            figures[count] = one = asyncio.run(converse(llm, args))
        print(
            f"{count:>15} {one['device']:15.0%} {one['host']:8.0%} {one['first_token_ms']:16.0f} {one['seconds']:8.1f}", flush=True
        )
    if args.record:
        setting = {name: value for name, value in vars(args).items() if name not in ("host", "record")}
        print(f"written: {harness.write(args.record, {'asked': setting, 'host': figures}).relative_to(harness.ROOT)}")


if __name__ == "__main__":
    main()

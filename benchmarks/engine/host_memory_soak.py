# SPDX-License-Identifier: Apache-2.0
"""A soak of the host tier at the edge of memory: conversations at random, more of them than device and host memory hold together.

    python -m benchmarks.engine.host_memory_soak --minutes 15 --tp_size 2

Ranks are real, on CPU, and know what is in each KV block: `host_memory_soak_rank` compares it at every copy and every hit. One
prompt in twenty is computed once more without a hit, and must have the same tokens, unless its two best ones are equally good. When
host memory is full, the resident memory of each process must stay flat. The status is 1 where it grows; a wrong block ends the
engine. Below a --duty of 1, all requests pause together: beside others' work, with as many of them at once.
--corrupt N changes what is in host memory after N copies: the soak must then fail.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import harness
from benchmarks.engine.host_memory_soak_rank import VARIABLE
from phalanx import LLM, SamplingParams
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.executor.launcher import HostRanks, LocalLauncher, LocalRank
from phalanx.layout import Layout
from phalanx.layout.memory import block_bytes, stage_caches

BLOCK, LONGEST, SLOTS = 8, 512, 6
USERS, AGAIN = 40, 0.05
"""Conversations, of which a tenth begin alike; and which part of the prompts is computed again without hits."""
TIE = 1e-3
"""Two tokens whose log probabilities differ by less are equally good: sums in fp32 have another order in another batch."""
SAMPLE_SECONDS = 5.0
DUTY_SECONDS = 4.0
FLAT_BYTES = 16 << 20
"""Growth of a process that is no leak: heaps are fragmented."""


class CheckingLauncher(LocalLauncher):
    """Starts ranks that check their blocks: `host_memory_soak_rank`."""

    module = "benchmarks.engine.host_memory_soak_rank"

    def start(self, ranks: HostRanks, config: Mapping[str, Any]) -> Mapping[int, LocalRank]:
        # A rank does not look for modules in its working folder.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(harness.ROOT), os.environ.get("PYTHONPATH"))))
        return super().start(ranks, config)


@dataclass
class Soak:
    """Random conversations with an engine. duty: requests begin in this part of each DUTY_SECONDS only. resident: bytes of each
    process, by its title, each SAMPLE_SECONDS since host memory is full."""

    llm: LLM
    chance: random.Random
    until: float
    duty: float = 1.0
    texts: dict[int, list[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    resident: dict[str, list[int]] = field(default_factory=dict)

    def _begin(self, user: int) -> list[int]:
        alike = random.Random(user // 4)  # four begin with the same tokens
        common = [alike.randrange(10, 1000) for _ in range(alike.randrange(8, 96))]
        return common + [self.chance.randrange(10, 1000) for _ in range(9)]

    async def _answer(self, prompt: Sequence[int], tokens: int, salt: str | None = None) -> tuple[list[int], list[float]]:
        """The tokens of an answer, and by how much each was better than the next best one."""
        params = SamplingParams(  # which may end at any time, for all that the scheduler knows: so requests are preempted
            temperature=0.0, max_tokens=tokens, ignore_eos=True, stop_token_ids=[3], cache_salt=salt, logprobs=2
        )  # fmt: skip
        outputs = [output async for output in self.llm.generate_async(list(prompt), params)]
        one = outputs[-1].outputs[0]
        gaps = [each.top[0][1] - each.top[1][1] for each in one.logprobs or []]
        return list(one.token_ids), gaps

    async def turn(self, user: int) -> None:
        """One request of a conversation, which begins anew where it is too long. Raises SystemExit for other tokens."""
        text = self.texts.get(user)
        if text is None or len(text) > LONGEST - 120 or self.chance.random() < 0.03:
            text = self._begin(user)
        text = text + [self.chance.randrange(10, 1000) for _ in range(self.chance.randrange(1, 80))]
        tokens, gaps = await self._answer(text, self.chance.randrange(1, 24))
        self.counts["requests"] += 1
        if self.chance.random() < AGAIN:
            again, _ = await self._answer(text, len(tokens), salt=str(self.counts["requests"]))
            pairs = enumerate(itertools.zip_longest(tokens, again))
            differing = next((number for number, (one, other) in pairs if one != other), None)
            self.counts["compared"] += 1
            if differing is not None and (differing >= len(gaps) or gaps[differing] > TIE):
                raise SystemExit(f"token {differing} of {len(tokens)} differs without hits, of a prompt of {len(text)} tokens")
            self.counts["ties"] += differing is not None
        self.texts[user] = text + tokens

    async def run(self) -> None:
        async def stream() -> None:
            while time.monotonic() < self.until:
                user = self.chance.choice([user for user in range(USERS) if user not in busy])
                busy.add(user)
                await self.turn(user)
                busy.discard(user)
                at = time.monotonic() % DUTY_SECONDS
                if at > self.duty * DUTY_SECONDS:
                    await asyncio.sleep(DUTY_SECONDS - at)

        busy: set[int] = set()
        watch = asyncio.create_task(self._watch())
        await asyncio.gather(*(stream() for _ in range(SLOTS + 2)))
        watch.cancel()

    async def _watch(self) -> None:
        """Sample the resident memory of all processes."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            stats = self.llm.stats()
            if stats.host_used == stats.host_total > 0:
                this = psutil.Process()
                for process in (this, *this.children(recursive=True)):
                    title = "this process" if process == this else " ".join(process.cmdline()).strip()[:40]
                    self.resident.setdefault(title, []).append(process.memory_info().rss)


def growth(samples: Sequence[int]) -> int:
    """By how much the last quarter is above the second one: what is bounded fills in the first."""
    quarter = len(samples) // 4
    return max(samples[3 * quarter :]) - max(samples[quarter : 2 * quarter]) if quarter else 0


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures. Raises EngineError for a wrong block."""
    os.environ[VARIABLE] = json.dumps({"folder": str(folder), "block_size": BLOCK, "corrupt": options.corrupt})
    (caches,) = stage_caches(ModelShape.from_folder(locate("demo", None)), "fp32", "fp32", Layout())
    token = block_bytes(caches, 1)
    with LLM(
        "demo", device="cpu", dtype="fp32", tensor_parallel_size=options.tp_size, kv_block_size=BLOCK, max_seq_len=LONGEST,
        max_batch_size=SLOTS, max_num_tokens=256, kv_cache_bytes=options.device * token // options.tp_size,
        kv_host_memory=options.host * token, launcher="benchmarks.engine.host_memory_soak:CheckingLauncher",
        skip_tokenizer_init=True, seed=options.seed,
    ) as llm:  # fmt: skip
        begin = time.monotonic()
        one = Soak(llm, random.Random(options.seed), begin + 60 * options.minutes, options.duty)
        asyncio.run(one.run())
        time.sleep(2.0)  # the last heartbeat
        stats, seconds = llm.stats(), time.monotonic() - begin
        checked = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return {
        "seconds": round(seconds), **one.counts, "blocks_checked_by_rank": checked,
        "found": {
            "device": round((stats.prefix_hits - stats.host_hits) / stats.prefix_queries, 3),
            "host": round(stats.host_hits / stats.prefix_queries, 3),
        },
        "preemptions": stats.preemptions, "blocks_referenced": stats.blocks_referenced,
        "host_blocks": stats.host_total, "host_used": stats.host_used, "dropped": stats.host_dropped,
        "samples": max(map(len, one.resident.values()), default=0),
        "growth_bytes": {title: growth(samples) for title, samples in one.resident.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp_size", type=int, default=2)
    parser.add_argument("--device", type=int, default=1280, help="tokens that the KV cache holds")
    parser.add_argument("--host", type=int, default=4096, help="tokens that host memory holds")
    parser.add_argument(
        "--duty", type=float, default=1.0, help="part of the time in which requests begin; 1 for a machine that is idle"
    )
    parser.add_argument("--corrupt", type=int, default=0)
    parser.add_argument("--name", help="keep the figures in benchmarks/results/NAME.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(options, Path(folder))
    print(json.dumps(figures, indent=1))
    if options.name:
        print(harness.write(options.name, {"asked": vars(options), **figures}))
    leaks = {title: size for title, size in figures["growth_bytes"].items() if size > FLAT_BYTES}
    if leaks or figures["blocks_referenced"]:
        print(f"FAILED: memory grew by {leaks}, {figures['blocks_referenced']} blocks are in use")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

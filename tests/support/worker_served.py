# SPDX-License-Identifier: Apache-2.0
"""Requests that ranks in processes serve, with drafts or without."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

from phalanx.config.model import ModelShape
from phalanx.config.sampling_params import SamplingParams
from phalanx.config.speculation import SpeculativeConfig
from phalanx.engine.dp_scheduler import DpScheduler
from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.messages import AddRequest, RequestUpdate, Stats
from phalanx.engine.scheduler import Scheduler
from phalanx.executor.rank_executor import RankExecutor
from phalanx.layout.cache import group_windows, request_bytes
from phalanx.layout.families import model_cache
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engine_client import each_update
from tests.support.engine_drive import BLOCK, await_results, options

LIMITS: dict[str, Any] = {
    "num_blocks": 60, "block_size": BLOCK, "max_batch_size": 8, "max_num_tokens": 24, "max_seq_len": 128, "vocab_size": VOCAB_SIZE,
}  # fmt: skip


def some_requests() -> list[AddRequest]:
    """Prompts that repeat themselves, of greedy requests and others; half of them go on with two tokens only."""
    chance, adds = random.Random(3), []
    for number in range(12):
        words = [chance.randrange(3, 380) for _ in range(chance.choice((2, 5, 9)))]
        prompt = (words * 8)[: chance.randrange(6, 40)]
        params = SamplingParams(
            temperature=number % 3 * 0.4, seed=number, max_tokens=chance.randint(20, 50), presence_penalty=number % 4 * 0.2,
            logprobs=0 if number % 5 == 0 else None, logit_bias={7: 40.0, 8: 40.0} if number % 2 else None,
        )  # fmt: skip
        adds.append(AddRequest(str(number), prompt, params, sorted({chance.randrange(VOCAB_SIZE) for _ in range(4)})))
    return adds


def served(
    folder: Path, config: dict[str, Any] | None = None, *, returns: bool = False, indices: int = 1, **sizes: Any
) -> tuple[dict[str, Any], Stats]:
    """Tokens, the tokens of their log probabilities and the reason of the end, of each request. config: the speculative_config."""
    speculative = {} if config is None else {"speculative_config": config}
    executor = RankExecutor(
        options(folder, max_batch_size=LIMITS["max_batch_size"] * indices, **speculative, **sizes), returns_tokens=returns
    )
    caches = model_cache(ModelShape.from_folder(folder))
    limits = SchedulerOptions(
        **LIMITS, prefix_caching=not request_bytes(caches), pipeline_stages=sizes.get("pipeline_parallel_size", 1),
        depth=executor.depth, returns_tokens=executor.returns_tokens,
        max_drafts=0 if config is None else config["num_speculative_tokens"],
        drafts_keep_kv=config is not None and SpeculativeConfig.of(config).keeps_kv, windows=group_windows(caches),
    )  # fmt: skip
    scheduler = Scheduler(limits) if indices == 1 else DpScheduler(limits, indices)
    coming, answers = deque(some_requests()), dict[str, list[Any]]()
    executor.start()
    try:
        while coming or not scheduler.idle:
            for _ in range(min(3, len(coming))):
                scheduler.add(coming.popleft())
            while (step := scheduler.schedule()) is not None:
                executor.submit(step)
            for result in await_results(executor.collect, 1) if scheduler.steps_in_flight else []:
                for update in each_update(scheduler.process_result(result)):
                    assert isinstance(update, RequestUpdate)
                    answer = answers.setdefault(update.request_id, [[], [], None])
                    answer[0] += update.tokens
                    answer[1] += [entry.token for entry in update.logprobs]
                    answer[2] = update.finish_reason
    finally:
        executor.shutdown()
    scheduler.check()
    return answers, scheduler.stats()

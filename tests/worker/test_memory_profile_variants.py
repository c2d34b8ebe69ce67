# SPDX-License-Identifier: Apache-2.0
"""No kernel is compiled after the start: steps of a running engine launch only variants that its first steps have launched."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from phalanx.comm.warmup import more_token_counts
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, StepBatch, StepRow
from phalanx.kernels.capabilities import has_gluon
from phalanx.worker import memory_profile
from phalanx.worker.model_runner import ModelRunner
from tests.support.kernels_steps import (
    BF16,
    BLOCK,
    BLOCKS,
    DEEPSEEK,
    EXPERTS,
    GPT_OSS,
    LONGEST,
    SLOTS,
    SPARSE,
    TOKENS,
    Case,
    made_runner,
)
from tests.support.kernels_variants import NUM_SMS, Variant, recorded

STEPS = int(os.environ.get("PHALANX_FUZZ_STEPS", "50"))
"""At random, after each start; `make fuzz` makes more."""

GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.7}
PARAMS_OF_REQUESTS: list[list[dict[str, Any]]] = [
    [GREEDY], [DRAWN], [GREEDY, DRAWN], [GREEDY | {"logprobs": 2}], [DRAWN | {"logprobs": 0}, GREEDY],
    [GREEDY | {"logit_bias": {3: 1.0}}], [DRAWN | {"logit_bias": {3: 1.0}}, GREEDY], [DRAWN | {"top_p": 0.9}],
    [DRAWN | {"top_k": 5}, GREEDY], [GREEDY | {"repetition_penalty": 1.2}], [GREEDY | {"prompt_logprobs": 1}, DRAWN],
]  # fmt: skip
"""What the rows of one step ask for, some of these each."""


class Recorded:
    """A capturer whose replays launch nothing: on a GPU a graph's replay needs no kernel that its capture did not. late: variants
    that a capture launched first."""

    def __init__(self, variants: set[Variant]) -> None:
        self.variants, self.late = variants, set[Variant]()

    def capture(self, work: Callable[[], None], warmup: Callable[[], None]) -> Callable[[], None]:
        warmup()
        loaded = set(self.variants)
        work()
        self.late |= self.variants - loaded
        return lambda: None

    def reset(self) -> None:
        return


CASES = {
    "graphs": Case({"vocab_size": 151936}),
    "eager": Case({"windows": (64, None), "vocab_size": 8193}, graphs=False),
    "fp8": Case(fp8=True),
    "normed heads, 2 ranks": Case({"architecture": "Qwen3ForCausalLM", "qk_norm": True}, ranks=2),
    "4 ranks, eager": Case({"vocab_size": 151936}, graphs=False, ranks=4),
    "fp8, few slots, eager": Case(fp8=True, graphs=False, slots=16),
    "blocks": Case({"quantization": BLOCKS}, fp8=True),
    "fp8, 4 ranks": Case({"qkv_bias": True, "intermediate_size": 4 * 12288}, fp8=True, ranks=4),
    "experts, fp8, 2 ranks": Case(EXPERTS, fp8=True, ranks=2),
    "of 2 stages": Case(fp8=True, ranks=2, slots=2 * SLOTS, stages=2),
    "of 3 stages, eager": Case(graphs=False, slots=3 * SLOTS, stages=3),
    "gpt-oss": Case(GPT_OSS),
    "gpt-oss, 4 ranks": Case(GPT_OSS, ranks=4),
    "deepseek": Case(DEEPSEEK),
    "deepseek, fp8, 2 ranks": Case(DEEPSEEK, fp8=True, ranks=2),
    "deepseek with an indexer of 64 heads": Case(SPARSE),
    "deepseek with an indexer, fp8, 2 ranks, eager": Case(SPARSE, fp8=True, ranks=2, graphs=False),
    "deepseek of 64 heads": Case(DEEPSEEK | {"num_heads": 64, "num_kv_heads": 64}),
}


def started(case: Case, capturer: Recorded) -> ModelRunner:
    """As a rank starts."""
    runner = made_runner(case, capturer)
    sizes = {"max_num_tokens": TOKENS, "max_seq_len": LONGEST, "max_batch_size": runner.max_rows, "block_size": BLOCK}
    model = runner._model
    of_collectives = partial(
        more_token_counts, model.context.group, max_tokens=TOKENS, hidden=model.shape.hidden_size, dtype=BF16, num_sms=NUM_SMS
    )
    memory_profile.run_profiling_steps(
        runner, memory_profile.profiling_steps(
            **sizes, more_counts=of_collectives, groups=model.cache_groups,
            topk=None if model.shape.indexer is None else model.shape.indexer.topk,
        ),
    )  # fmt: skip
    list(runner.capture())
    return runner


def any_step(rng: random.Random, slots_there: int, most: int, groups: int) -> StepBatch:
    """Decode rows, then prompts and parts of them, of any number up to `most` and any length; each row's request has just
    come."""
    slots = rng.sample(range(slots_there), rng.choice([1, 2, rng.randint(1, most), most]))
    decodes = rng.choice([0, len(slots), rng.randint(0, len(slots))])
    params_of_rows, longest, far = rng.choice(PARAMS_OF_REQUESTS), rng.choice([8, 200, LONGEST]), rng.choice([8, 200, LONGEST - 2])
    left, rows = TOKENS, list[StepRow]()
    for number, slot in enumerate(slots):
        start = rng.randint(0, far)
        room = min(left - 2 * (len(slots) - number), LONGEST - start)
        count = 1 if number < decodes else max(2, min(rng.randint(2, longest), room))
        left -= count
        samples = rng.random() < 0.9 or count == 1
        rows.append(StepRow(slot, start, count, [0] * count, [0] * groups * -(-(start + count) // BLOCK), samples=samples))
    admitted = [SlotAssignment(row.slot, [0], 1, SamplingParams(**rng.choice(params_of_rows)), seed=1) for row in rows]
    return StepBatch(admitted=admitted, rows=rows)


def later(case: Case, steps: int) -> tuple[set[Variant], set[Variant]]:
    """(The variants of the start, what else captures and steps of all kinds ask for.)"""
    rng = random.Random(0)
    with recorded() as variants:
        capturer = Recorded(variants)
        runner = started(case, capturer)
        first = set(variants) - capturer.late
        for _ in range(steps):
            runner.run(any_step(rng, case.slots, runner.max_rows, runner._model.cache_groups)).results()
    return first, variants - first


@pytest.mark.parametrize("name", list(CASES))
def test_steps_ask_for_no_kernel_that_the_start_has_not_compiled(name: str) -> None:
    first, new = later(CASES[name], STEPS)
    kernels = {variant.kernel for variant in first}
    assert {"_packed_argmax_keys", "_gumbel_max", "_filter_thresholds", "_decode_keys"} <= kernels
    if name.startswith("deepseek"):
        decode = "_latent_decode_bands" if has_gluon() and "64 heads" in name else "_latent_decode"
        assert {decode, "_latent_rope_store", "_topk_softmax", "_plan", "_prefill"} <= kernels
        assert ({"_index_rope_store", "_index_scores", "_best_slots"} <= kernels) == ("indexer" in name)
    else:
        assert {"_decode", "_prefill"} <= kernels
        long = {variant for variant in first if variant.kernel == "_prefill_long_rows"}
        assert bool(long) == (has_gluon() and not CASES[name].shape.get("sinks"))
    assert ("_embed" if CASES[name].ranks > 1 and CASES[name].stages == 1 else "_embed_norm") in kernels
    assert ("gemm_rs_norm_ag" in kernels) == (CASES[name].ranks > 1)
    assert ("_biased_gemm" in kernels) == name.startswith("gpt-oss")
    if CASES[name].fp8 and has_gluon():
        assert ("_block_scaled_gemm" if name == "blocks" else "_fp8_skinny") in kernels
    assert not new, "\n".join(sorted(map(str, new)))


@pytest.mark.parametrize("name", ["fp8, 4 ranks", "experts, fp8, 2 ranks", "gpt-oss", "deepseek, fp8, 2 ranks"])
def test_few_layers_load_all_that_many_launch(name: str) -> None:
    """The small steps of a start, and what comes before each capture, go through a few of the layers."""
    case = CASES[name]
    windows = case.shape.get("windows", (None, None))
    first, new = later(replace(case, shape=case.shape | {"num_layers": 4, "windows": windows * 2}), 5)
    assert first
    assert not new, "\n".join(sorted(map(str, new)))

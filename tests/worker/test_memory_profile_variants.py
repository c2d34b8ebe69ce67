# SPDX-License-Identifier: Apache-2.0
"""No kernel is compiled after the start: steps of a running engine launch only variants that its first steps have launched."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from phalanx.comm.choose import Rules
from phalanx.comm.group import Group, Solo
from phalanx.comm.strategies import symmetric_strategies
from phalanx.comm.symmetric import ReduceScatterBuffer
from phalanx.comm.tuned_group import TunedGroup
from phalanx.comm.warmup import more_token_counts
from phalanx.config.experts import ClampedSwiGlu, Experts, Scoring
from phalanx.config.latent import Latent
from phalanx.config.model import ModelShape
from phalanx.config.quantization import Quantization
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, StepBatch, StepRow
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.capabilities import has_gluon
from phalanx.models import registry
from phalanx.models.batch import empty_cache
from phalanx.models.layers.attention.sdpa import SdpaBackend
from phalanx.models.layers.attention.triton import TritonBackend
from phalanx.models.layers.attention.triton_latent import TritonLatentBackend
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.shipped import table_for
from phalanx.tables.strategy import Strategy
from phalanx.tables.table import Entry
from phalanx.worker import memory_profile
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.sampler import Sampler
from tests.support.comm_compiled import workspace
from tests.support.kernels_variants import NUM_SMS, SM, Variant, recorded

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SLOTS, BLOCK, LONGEST, TOKENS = 37, 16, 2048, 4095
"""Odd, so that what lies behind a row of facts lies on no 16 bytes."""

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


class Alike(Solo):
    """Rank 0 of ranks that all hold the same."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([x] * self.size, dim)


def group_of(size: int) -> Group:
    """A rank's group on NVLink, over a workspace that nobody maps; GEMM_RS runs from half the longest step's tokens on."""
    if size == 1:
        return Solo()

    def peer_tensor(rank: int, rows: int, columns: int, dtype: torch.dtype, before: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype)

    longest = TOKENS * 4096 * 2
    buffer = ReduceScatterBuffer(
        0, size, longest + size * 8192, longest, torch.zeros(4, dtype=torch.int32), (0,) * size, peer_tensor
    )
    space, machine = workspace(size, SM, TOKENS * 4096 * 2), Fingerprint(SM, "nvlink", size)
    table = table_for(machine)

    def lookup(dtype: str, fusion: Fusion, tokens: int, hidden: int, caller: Caller) -> Entry:
        long = caller is Caller.GEMM and fusion.shards and tokens * hidden >= (TOKENS // 2) * 4096
        return Entry(Strategy.GEMM_RS, True, "table", "long") if long else table.lookup(dtype, fusion, tokens, hidden, caller)

    rules = Rules(machine, {Strategy.NCCL: "there is none"}, lookup, deterministic=True)
    return TunedGroup(Alike(size), rules, symmetric_strategies(space, buffer), "")


@dataclass(frozen=True)
class Case:
    """graphs: steps are captured. ranks: of the group. slots: requests at once. stages: of the pipeline, and this is its last."""

    shape: dict[str, Any] = field(default_factory=dict)
    fp8: bool = False
    graphs: bool = True
    ranks: int = 1
    slots: int = SLOTS
    stages: int = 1


class Last(Solo):
    """The last stage of a pipeline: what it receives is there already."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = size - 1, size

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x


BLOCKS = Quantization("fp8", "block", "token", block=(128, 128), scale_name="weight_scale_inv")
GPT_OSS = {
    "architecture": "GptOssForCausalLM", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "windows": (128, None),
    "qkv_bias": True, "output_bias": True, "sinks": True,
    "experts": Experts(8, 4, 2880, biases=True, mxfp4=True, swiglu=ClampedSwiGlu(1.702, 7.0)),
}  # fmt: skip
EXPERTS = {"architecture": "MixtralForCausalLM", "experts": Experts(8, 2, 1024)}
DEEPSEEK = {
    "architecture": "DeepseekV3ForCausalLM", "num_kv_heads": 16, "head_dim": 192,
    "latent": Latent(1536, 512, 128, 64, 128, softmax_scale=0.1), "experts": Experts(
        16, 4, 2048, shared=1024, dense_layers=(0,), scoring_bias=True, scoring=Scoring("sigmoid", 4, 2, 2.5),
    ),
}  # fmt: skip
CASES = {
    "graphs": Case({"vocab_size": 151936}),
    "eager": Case({"windows": (64, None), "vocab_size": 8193}, graphs=False),
    "fp8": Case(fp8=True),
    "fp8, eager": Case(fp8=True, graphs=False),
    "normed heads, 2 ranks": Case({"architecture": "Qwen3ForCausalLM", "qk_norm": True}, ranks=2),
    "fp8, 2 ranks": Case({"vocab_size": 8193}, fp8=True, ranks=2),
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
    "deepseek of 64 heads": Case(DEEPSEEK | {"num_heads": 64, "num_kv_heads": 64}),
}


def made_runner(case: Case, capturer: Recorded) -> ModelRunner:
    """Of weights that nobody has set: nothing reads them, and their pages are never there."""
    sizes: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "vocab_size": 8192, "hidden_size": 4096, "intermediate_size": 1024, "num_layers": 2,
        "num_heads": 16, "num_kv_heads": 4, "head_dim": 128, "max_positions": LONGEST, "windows": (None, None),
    }  # fmt: skip
    shape = ModelShape(**(sizes | case.shape))
    layers = range(0 if case.stages == 1 else 1, shape.num_layers)
    model = registry.build(
        shape, group=group_of(case.ranks), layers=layers, dtype=BF16, device=CPU, fp8=case.fp8, fp8_cache=case.fp8,
        fp8_gemm=case.fp8,
    )  # fmt: skip
    attention: Any = TritonBackend(SdpaBackend(), CPU, "all")
    if shape.latent is not None:
        attention = TritonLatentBackend(CPU, own_prefill=True, most_tokens=TOKENS)
    attention.workspace.num_sms = NUM_SMS
    caches = [empty_cache(spec, 1, BLOCK, model.context.cache_dtype, CPU) for spec in model.kv_specs()]
    sampler, pipeline = Sampler(case.slots, shape.vocab_size, CPU), Solo() if case.stages == 1 else Last(case.stages)
    return ModelRunner(
        model, caches, attention, sampler, pipeline, max_batch_size=case.slots, max_seq_len=LONGEST, block_size=BLOCK, dtype=BF16,
        device=CPU, capturer=capturer if case.graphs else None, max_num_tokens=TOKENS,
    )  # fmt: skip


def started(case: Case, capturer: Recorded) -> ModelRunner:
    """As a rank starts."""
    runner = made_runner(case, capturer)
    sizes = {"max_num_tokens": TOKENS, "max_seq_len": LONGEST, "max_batch_size": runner.max_rows, "block_size": BLOCK}
    model = runner._model
    of_collectives = partial(
        more_token_counts, model.context.group, max_tokens=TOKENS, hidden=model.shape.hidden_size, dtype=BF16, num_sms=NUM_SMS
    )
    memory_profile.run_profiling_steps(runner, memory_profile.profiling_steps(**sizes, more_counts=of_collectives))
    list(runner.capture())
    return runner


def any_step(rng: random.Random, slots_there: int, most: int) -> StepBatch:
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
        rows.append(StepRow(slot, start, count, [0] * count, [0] * -(-(start + count) // BLOCK), samples=samples))
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
            runner.run(any_step(rng, case.slots, runner.max_rows)).results()
    return first, variants - first


@pytest.mark.parametrize("name", list(CASES))
def test_steps_ask_for_no_kernel_that_the_start_has_not_compiled(name: str) -> None:
    first, new = later(CASES[name], STEPS)
    kernels = {variant.kernel for variant in first}
    assert {"_packed_argmax_keys", "_gumbel_max", "_filter_thresholds", "_decode_keys"} <= kernels
    if name.startswith("deepseek"):
        decode = "_latent_decode_bands" if has_gluon() and "64 heads" in name else "_latent_decode"
        assert {decode, "_latent_rope_store", "_topk_softmax", "_plan", "_prefill"} <= kernels
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


@pytest.mark.parametrize("name", ["fp8, 2 ranks", "experts, fp8, 2 ranks", "gpt-oss", "deepseek, fp8, 2 ranks"])
def test_few_layers_load_all_that_many_launch(name: str) -> None:
    """The small steps of a start, and what comes before each capture, go through a few of the layers."""
    case = CASES[name]
    windows = case.shape.get("windows", (None, None))
    first, new = later(replace(case, shape=case.shape | {"num_layers": 4, "windows": windows * 2}), 5)
    assert first
    assert not new, "\n".join(sorted(map(str, new)))

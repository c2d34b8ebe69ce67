# SPDX-License-Identifier: Apache-2.0
"""What the doctor expects a rank to hold, beside what the planner does."""

from __future__ import annotations

import pytest

from phalanx.bench import shapes
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.health import memory
from phalanx.layout import Layout
from phalanx.layout.families.registry import known
from phalanx.layout.weights import weight_bytes


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 1), (4, 1, 1), (4, 1, 2), (2, 2, 4), (1, 1, 8)])
def test_weights_are_those_of_the_layout(tp: int, pp: int, ep: int) -> None:
    shape = ModelShape.from_config(shapes.SHAPES["mixtral-8x7b"])
    options = EngineOptions(
        model="m", tensor_parallel_size=tp, pipeline_parallel_size=pp, expert_parallel_size=ep, dtype="bf16", kv_cache_dtype="model"
    )
    planned = max(weight_bytes(shape, "bf16", Layout(tp=tp, pp=pp, dp=ep)))
    assert memory.budget(options, shape, on_gpu=True).rank.weights == pytest.approx(planned, rel=0.01)


def test_copies_of_experts_count_and_can_be_left_out() -> None:
    shape = ModelShape.from_config(shapes.SHAPES["mixtral-8x7b"])
    options = EngineOptions(
        model="m", tensor_parallel_size=2, moe_expert_parallel_size=2, redundant_experts=4, dtype="bf16", kv_cache_dtype="model"
    )
    planned = max(weight_bytes(shape, "bf16", Layout(tp=2, moe_ep=2, redundant=4)))
    need = memory.budget(options, shape, on_gpu=True)
    assert need.rank.weights == planned
    without = memory.budget(options.model_copy(update={"redundant_experts": 0}), shape, on_gpu=True)
    entries = [entry for entry in memory.remedies(options, shape, without.least, 2) if entry.options == {"redundant_experts": 0}]
    assert [(entry.fits, entry.freed) for entry in entries] == [(True, need.least - without.least)]


def test_ranks_may_divide_latents_where_a_request_is_too_long() -> None:
    """DeepSeek-V3 in FP8 at tp 8: a request of 163,840 tokens does not fit beside the weights in 105 GB, an eighth of one does."""
    shape = ModelShape.from_config(known("deepseek-v3"))
    options = EngineOptions(model="m", tensor_parallel_size=8, dtype="fp8", max_seq_len=163_840)
    need, free = memory.budget(options, shape, 105 * 10**9, on_gpu=True), 105 * 10**9
    assert memory.sequence_remedy(options, shape, need) is not None
    remedy = memory.divided_remedy(options, shape, free)
    assert remedy is not None
    assert remedy.flags == "--decode_context_parallel_size 8"
    divided = memory.budget(options.model_copy(update=remedy.options), shape, free, on_gpu=True)
    assert memory.sequence_remedy(options.model_copy(update=remedy.options), shape, divided) is None
    assert divided.rank.kv_tokens > 7 * need.rank.kv_tokens
    assert memory.divided_remedy(options.model_copy(update=remedy.options), shape, free) is None
    llama = ModelShape.from_config(shapes.SHAPES["mixtral-8x7b"])
    assert memory.divided_remedy(EngineOptions(model="m", tensor_parallel_size=8), llama, free) is None


def test_each_dp_index_on_cpu_has_cache_for_its_own_requests() -> None:
    """Two groups with 3 of the 5 requests each, which need less than the bytes that were given."""
    shape = ModelShape.from_config(shapes.SHAPES["mixtral-8x7b"])
    options = EngineOptions(
        model="m", expert_parallel_size=2, max_batch_size=5, max_seq_len=160, kv_cache_bytes=1 << 40, dtype="bf16",
        kv_cache_dtype="model",
    )  # fmt: skip
    need = memory.cpu_budget(options, shape)
    assert need.kv == 3 * need.sequence

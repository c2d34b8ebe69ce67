# SPDX-License-Identifier: Apache-2.0
"""Bytes from shapes alone against what committed starts held: weights to the byte, the KV cache never more than a start gave."""

from __future__ import annotations

import pytest

from benchmarks.plan import accuracy
from benchmarks.plan.rows import shape_named, starts
from phalanx.plan import footprint
from phalanx.plan.families import known, shape_of
from phalanx.plan.footprint import Split

WITH_BYTES = [start for start in starts() if start.bytes]


@pytest.mark.parametrize("start", WITH_BYTES, ids=lambda s: f"{s.file} tp{s.tp} pp{s.pp}")
def test_weights_are_those_of_the_start_to_the_byte(start):
    shape = shape_named(start.model)
    weights = footprint.weight_bytes(shape, start.dtype, start.split)
    for rank, kinds in start.bytes.items():
        assert kinds["weights"] == weights[int(rank) // (start.tp * start.ep)]


def test_kv_tokens_are_above_no_start_and_within_a_percent_of_the_least():
    lines = accuracy.kv_tokens()
    assert len(lines) >= 40
    assert max(line.error for line in lines) <= accuracy.GATES["KV tokens above a start"] == 0
    assert accuracy.kv_shortfall(lines) <= accuracy.GATES["KV tokens below the least start"] == 0.01
    for kind in (" on H100", "mixtral", "qwen3", "gpt-oss", "deepseek", "llama"):
        assert sum(kind in line.what for line in lines) >= 2, kind


def test_kv_tokens_of_layouts_that_only_older_engines_ran_are_not_above_theirs():
    lines, others = accuracy.kv_tokens_of_older()
    assert len(lines) >= 10
    assert max(line.error for line in lines) <= accuracy.GATES["KV tokens above an older engine's"] == 0
    assert len(accuracy.kv_tokens()) + len(lines) + len(others) == len(starts())


def test_what_is_beside_weights_and_cache_grows_with_the_step_and_the_slots():
    shape = shape_of(known("llama-3-70b"))
    sizes = [footprint.overhead_bytes(shape, Split(4), tokens) for tokens in (2048, 8192, 32768)]
    assert sizes == sorted(sizes)
    assert sizes[2] > 2 * sizes[1]
    activations = [footprint.activation_bytes(shape, Split(4), 8192, slots, "bf16") for slots in (256, 512, 1024)]
    logits = 4 * shape.vocab_size  # of a slot, in fp32: sampled from, sorted, and counted for penalties
    assert 2 * 512 * logits < activations[2] - activations[1] < 4 * 512 * logits
    assert activations[1] - activations[0] < 256 * 4 * logits
    assert footprint.graph_bytes(shape, "fp8", Split(4), 512, 8192) > footprint.graph_bytes(shape, "fp8", Split(4), 256, 8192)


def test_expert_parallelism_splits_experts_and_copies_the_rest():
    shape = shape_of(known("mixtral-8x22b"))
    unsplit = footprint.weight_bytes(shape, "fp8", Split())[0]
    inside, groups = (
        footprint.weight_bytes(shape, "fp8", Split(4, 1, 1, 4))[0],
        footprint.weight_bytes(shape, "fp8", Split(2, 1, 2))[0],
    )
    plain = footprint.weight_bytes(shape, "fp8", Split(4))[0]
    assert inside == pytest.approx(plain, rel=0.01)
    assert plain < groups < unsplit / 2
    assert unsplit / 1e9 == pytest.approx(141, abs=1)


def test_each_copy_of_an_expert_takes_the_memory_of_an_expert():
    shape = shape_of(known("mixtral-8x7b"))
    plain, copied = (footprint.weight_bytes(shape, "bf16", Split(2, moe_ep=2, redundant=redundant))[0] for redundant in (0, 4))
    expert = 3 * shape.hidden_size * shape.experts.intermediate * 2
    assert copied - plain == shape.num_layers * 2 * expert


def test_mxfp4_takes_four_and_a_quarter_bits():
    weights = footprint.weight_bytes(shape_of(known("gpt-oss-120b")), "bf16", Split())[0]
    assert weights / 1e9 == pytest.approx(65, abs=1)

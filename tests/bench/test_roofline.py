# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the roofline, against figures computed by hand; and that a bandwidth is measured, or its absence explained."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.bench import roofline, shapes, workloads
from phalanx.config.model import ModelShape
from phalanx.engine.messages import EngineFacts, RankFacts
from phalanx.layout import Layout
from phalanx.layout.families import known

pytestmark = pytest.mark.usefixtures("forked_python")

READ = 4.56e12  # bytes per second, as measured on an H200


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_config(shapes.SHAPES[name])


def facts_of(*, dtype: str = "bf16", tp: int = 1, pp: int = 1, token_bytes: int = 0, tokens: int = 1600, device: str = "cuda:0"):
    """token_bytes: of one token on one rank's layers."""
    ranks = [RankFacts(rank, 0, device, (0, 1), bytes={"kv": token_bytes * tokens}) for rank in range(tp * pp)]
    return EngineFacts(
        model="m", dtype=dtype, device=device, layout=Layout(pp=pp, tp=tp), max_seq_len=4096, max_batch_size=512,
        max_num_tokens=8192, block_size=16, num_blocks=tokens // 16, kv_tokens=tokens, vocab_size=128256, eos_token_ids=[],
        ranks=ranks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "tp", "floor_ms"),
    [("llama-3-70b", "fp8", 4, 3.87), ("llama-3-70b", "fp8", 2, 7.74), ("llama-3-8b", "bf16", 1, 3.29)],
)
def test_rooflines_computed_by_hand(name, dtype, tp, floor_ms):
    seconds = roofline.round_bytes(shape_of(name), facts_of(dtype=dtype, tp=tp), 1, 0) / READ
    assert seconds * 1e3 == pytest.approx(floor_ms, abs=0.01)


def test_weights_are_layers_and_head():
    one_layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    head = 128256 * 4096 + 4096
    assert roofline.weight_bytes(shape_of("llama-3-8b"), "bf16") == 2 * (32 * one_layer + head)


def test_experts_count_where_tokens_reach_them():
    """Mixtral: 2 of 8 for one token, 8 (1 - (6/8)^T) of them for T, and all in the limit."""
    shape = shape_of("mixtral-8x7b")
    expert = 3 * 4096 * 14336 * 2
    others = 2 * (32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 4096) + 32000 * 4096 + 4096)
    assert roofline.weight_bytes(shape, "bf16", 1) == pytest.approx(others + 32 * 2 * expert, rel=1e-9)
    assert roofline.weight_bytes(shape, "bf16", 4) == pytest.approx(others + 32 * 8 * (1 - 0.75**4) * expert, rel=1e-9)
    assert roofline.weight_bytes(shape, "bf16", 1000) == pytest.approx(others + 32 * 8 * expert, rel=1e-9)


def test_experts_that_one_tensor_has_count_where_tokens_reach_them():
    """gpt-oss-120b: 4 of 128 experts of 2,880 features for a token, in MXFP4 with 92 scales a row, and biases in 16 bit."""
    shape = shape_of("gpt-oss-120b")
    every = roofline.weight_bytes(shape, "bf16", 1e6)
    expert = 3 * 2880 * (2880 / 2 + 92) + 2 * 3 * 2880
    assert every - roofline.weight_bytes(shape, "bf16", 1) == pytest.approx(36 * 124 * expert, rel=1e-9)


def test_keys_and_values_are_read_by_every_request():
    shape, facts = shape_of("llama-3-8b"), facts_of(token_bytes=131072)
    assert roofline.kv_token_bytes(shape, facts) == 131072
    assert roofline.round_bytes(shape, facts, 64, 192) == roofline.weight_bytes(shape, "bf16") + 64 * 192 * 131072
    workload = workloads.parse("decode-64")
    assert roofline.decode_seconds(shape, facts, workload, 1e12) == roofline.round_bytes(shape, facts, 64, 192.5) / 1e12


def test_a_token_is_in_a_block_of_each_group_of_layers():
    """gpt-oss-120b: 18 layers without a window and 18 with one have blocks of 18 layers."""
    assert roofline.kv_token_bytes(shape_of("gpt-oss-120b"), facts_of(token_bytes=1000)) == 2000


def test_a_pipeline_reads_the_weights_for_every_micro_batch():
    shape, facts = shape_of("llama-3-8b"), facts_of(pp=2, token_bytes=65536)
    weights = roofline.weight_bytes(shape, "bf16")
    assert roofline.kv_token_bytes(shape, facts) == 131072
    assert roofline.round_bytes(shape, facts, 64, 100) == weights + 32 * 100 * 131072
    # One request passes the stages one after the other: its time is that of one rank.
    assert roofline.round_bytes(shape, facts, 1, 100) == weights + 100 * 131072


def test_replicas_share_the_requests():
    shape, one = shape_of("llama-3-8b"), facts_of(token_bytes=131072)
    two = facts_of(token_bytes=131072)
    two.num_blocks, two.max_batch_size, two.layout = 2 * one.num_blocks, 2 * one.max_batch_size, Layout(replicas=2)
    assert roofline.kv_token_bytes(shape, two) == 131072
    assert roofline.round_bytes(shape, two, 64, 192) == roofline.round_bytes(shape, one, 32, 192)


def test_data_parallel_indices_share_requests_and_experts():
    """Two indices of two ranks: a rank reads its quarter of the experts that all tokens reach, and its own requests' keys."""
    shape, facts = shape_of("mixtral-8x7b"), facts_of(tp=2, token_bytes=65536)
    together = msgspec.structs.replace(facts, layout=Layout(dp=2, tp=2), num_blocks=2 * facts.num_blocks)
    assert roofline.kv_token_bytes(shape, together) == roofline.kv_token_bytes(shape, facts)
    expert, reached = 3 * 4096 * 14336 * 2, 32 * 8 * (1 - 0.75**4)
    others = roofline.weight_bytes(shape, "bf16", 4) - reached * expert
    expected = others / 2 + reached * expert / 4 + 2 * 100 * 65536
    assert roofline.round_bytes(shape, together, 4, 100) == pytest.approx(expected, rel=1e-9)


def test_the_fullest_rank_of_a_stage_counts():
    shape, facts = shape_of("llama-3-8b"), facts_of(tp=2, token_bytes=100)
    facts.ranks[1].bytes["kv"] *= 2
    assert roofline.kv_token_bytes(shape, facts) == 200


def test_ranks_on_a_cpu_share_its_memory():
    shape = shape_of("llama-3-8b")
    assert roofline.round_bytes(shape, facts_of(tp=4, device="cpu"), 1, 0) == roofline.weight_bytes(shape, "bf16")


def test_a_window_bounds_what_is_read():
    shape = ModelShape("M", 8, 8, 8, 2, 1, 1, 8, 4096, windows=(100, None))
    assert roofline.attended_tokens(shape, 50) == 50
    assert roofline.attended_tokens(shape, 400) == (100 + 400) / 2


def test_a_batch_is_bounded_by_the_cache():
    shape, workload = shape_of("llama-3-8b"), workloads.parse("batch-512x1000x1000")
    weights = roofline.weight_bytes(shape, "bf16")
    roomy, tight = facts_of(token_bytes=1000, tokens=16_000_000), facts_of(token_bytes=1000, tokens=192_000)
    assert roofline.batch_seconds(shape, roomy, workload, 1e12) == pytest.approx(1000 * (weights + 512 * 1500 * 1000) / 1e12)
    assert roofline.batch_seconds(shape, tight, workload, 1e12) == pytest.approx(4000 * (weights + 128 * 1500 * 1000) / 1e12)


def test_short_requests_take_blocks_for_windows():
    """Gemma's six groups with a window of 1,024 take 66 blocks of 16 tokens each, beside the 75 of a request of 1,200 tokens."""
    shape = ModelShape.from_config(known("gemma-3-27b"))
    assert roofline.kv_tokens(shape, facts_of(tokens=16 * 9420), 1200) == 20 * 1200
    assert roofline.kv_tokens(shape_of("llama-3-8b"), facts_of(tokens=16 * 9420), 1200) == 16 * 9420


def test_fraction():
    assert roofline.fraction(2.0, 4.0) == 0.5
    assert roofline.fraction(None, 4.0) is None
    assert roofline.fraction(2.0, -1e-9) is None


def test_the_host_is_measured():
    measured = roofline.measure("cpu")
    assert measured.best is not None
    assert measured.best > 1e8
    assert measured.as_json() == {"best_GBps": round(measured.best / 1e9, 1), "ways_GBps": {"copy": round(measured.best / 1e9, 1)}}


def test_a_gpu_that_cannot_be_measured_is_explained(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    measured = roofline.measure("cuda")
    assert measured.best is None
    assert set(measured.as_json()) == {"not_measured"}
    assert measured.why


@pytest.mark.gpu1
def test_a_gpu_is_measured():
    measured = roofline.measure("cuda")
    assert measured.best is not None, measured.why
    assert set(measured.ways) == {"copy", "sum", "maximum", "matrix_vector"}
    assert measured.best > 1e11

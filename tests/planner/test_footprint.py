# SPDX-License-Identifier: Apache-2.0
"""Bytes from shapes alone against what committed starts held: weights to the byte, the KV cache never more than a start gave."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner import accuracy
from benchmarks.planner.rows import shape_named, starts
from phalanx.config.model import ModelShape
from phalanx.config.sampling_params import SamplingParams
from phalanx.config.speculation import SpeculativeConfig
from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.messages import AddRequest
from phalanx.engine.request import Request
from phalanx.engine.request_blocks import RequestBlocks
from phalanx.layout import Layout
from phalanx.layout.cache import kv_dtype, token_bytes
from phalanx.layout.draft import network_bytes, network_caches, network_for
from phalanx.layout.families import known
from phalanx.layout.memory import blocks_in, blocks_of_request, stage_caches, staging_bytes
from phalanx.layout.weights import weight_bytes
from phalanx.planner import explain, footprint, search, subject
from phalanx.planner.search import PlanRequest
from tests.support.layout_hybrid import hybrid

WITH_BYTES = [start for start in starts() if start.bytes]


@pytest.mark.parametrize("start", WITH_BYTES, ids=lambda s: f"{s.file} tp{s.tp} pp{s.pp}")
def test_weights_are_those_of_the_start_to_the_byte(start):
    shape = shape_named(start.model)
    weights = weight_bytes(shape, start.dtype, start.layout)
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
    shape = ModelShape.from_config(known("llama-3-70b"))
    sizes = [footprint.overhead_bytes(shape, Layout(tp=4), tokens) for tokens in (2048, 8192, 32768)]
    assert sizes == sorted(sizes)
    assert sizes[2] > 2 * sizes[1]
    activations = [footprint.activation_bytes(shape, Layout(tp=4), 8192, slots, "bf16") for slots in (256, 512, 1024)]
    logits = 4 * shape.vocab_size  # of a slot, in fp32: sampled from, sorted, and counted for penalties
    assert 2 * 512 * logits < activations[2] - activations[1] < 4 * 512 * logits
    assert activations[1] - activations[0] < 256 * 4 * logits
    more, less = (footprint.graph_bytes(shape, "fp8", Layout(tp=4), slots, 8192) for slots in (512, 256))
    assert more > less


def test_embeddings_by_layer_take_the_memory_of_a_step():
    """Of Gemma 4 E4B, whose vectors of 42 layers are wider than any other activation."""
    shape = ModelShape.from_config(known("gemma-4-e4b"))
    plain = replace(shape, layer_inputs=None)
    of_each, without = (footprint.activation_bytes(each, Layout(), 8192, 8, "bf16") for each in (shape, plain))
    vectors = 2 * 8192 * 42 * 256
    assert of_each - without == vectors > without / 4
    assert footprint.activation_bytes(shape, Layout(dp=2), 8192, 8, "bf16") < of_each


def test_expert_parallelism_splits_experts_and_copies_the_rest():
    shape = ModelShape.from_config(known("mixtral-8x22b"))
    unsplit = weight_bytes(shape, "fp8", Layout())[0]
    inside, groups = (
        weight_bytes(shape, "fp8", Layout(tp=4, moe_ep=4))[0],
        weight_bytes(shape, "fp8", Layout(tp=2, dp=2))[0],
    )
    plain = weight_bytes(shape, "fp8", Layout(tp=4))[0]
    assert inside == pytest.approx(plain, rel=0.01)
    assert plain < groups < unsplit / 2
    assert unsplit / 1e9 == pytest.approx(141, abs=1)


def test_each_copy_of_an_expert_takes_the_memory_of_an_expert():
    shape = ModelShape.from_config(known("mixtral-8x7b"))
    plain, copied = (weight_bytes(shape, "bf16", Layout(tp=2, moe_ep=2, redundant=redundant))[0] for redundant in (0, 4))
    expert = 3 * shape.hidden_size * shape.experts.intermediate * 2
    assert copied - plain == shape.num_layers * 2 * expert


def test_mxfp4_takes_four_and_a_quarter_bits():
    weights = weight_bytes(ModelShape.from_config(known("gpt-oss-120b")), "bf16", Layout())[0]
    assert weights / 1e9 == pytest.approx(65, abs=1)


LAYOUTS = {
    "tp1": Layout(), "tp2": Layout(tp=2), "tp8": Layout(tp=8), "tp2 pp2": Layout(pp=2, tp=2), "tp1 dp2": Layout(dp=2),
    "tp4 moe_ep4 redundant4": Layout(tp=4, moe_ep=4, redundant=4),
}  # fmt: skip


RECORDED = json.loads((Path(__file__).parent / "kv_tokens.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("model", RECORDED)
def test_weights_and_caches_are_those_that_were_recorded(model):
    """kv_tokens.json, by model and by layout, dtype and KV dtype: bytes of weights and of a block, and KV tokens on 1,128 GB."""
    shape = ModelShape.from_config(known(model))
    for case, recorded in RECORDED[model].items():
        name, dtype, kv = case.rsplit(" ", 2)
        sizes = footprint.Sizes(dtype, kv_dtype(kv, dtype), slots=256, max_num_tokens=8192)
        rank = footprint.rank_memory(shape, LAYOUTS[name], 8 * 141 * 10**9, sizes)
        assert [max(weight_bytes(shape, dtype, LAYOUTS[name])), rank.block, rank.kv_tokens] == recorded, case


@pytest.mark.parametrize("layout", [Layout(tp=8, dcp=8), Layout(tp=4, dcp=2, pp=2)])
def test_ranks_that_divide_latents_hold_as_many_times_the_tokens(layout):
    """What a rank of the engine allocates of the same budget is what the planner says."""
    shape, total = ModelShape.from_config(known("deepseek-v3")), 8 * 141 * 10**9
    sizes = footprint.Sizes("fp8", "bf16", slots=256, max_num_tokens=8192, block_size=16 * layout.dcp)
    rank = footprint.rank_memory(shape, layout, total, sizes)
    stages = stage_caches(shape, "bf16", "fp8", layout)
    assert rank.blocks == min(blocks_in(rank.budget, each, 16 * layout.dcp, states=0, usable=0, what="") for each in stages)
    assert rank.kv_tokens == rank.blocks * 16 * layout.dcp
    undivided = footprint.rank_memory(shape, replace(layout, dcp=1), total, replace(sizes, block_size=16))
    assert rank.block == undivided.block
    assert 0.99 * layout.dcp * undivided.kv_tokens < rank.kv_tokens <= layout.dcp * undivided.kv_tokens


LONG = 131_072


@pytest.mark.parametrize(("layout", "least"), [(Layout(), 1.95), (Layout(tp=2), 1.95), (Layout(tp=2, pp=2), 1.75)])
def test_layers_with_a_window_hold_their_window(layout, least):
    """gpt-oss-120b at 131,072 tokens: half of its layers see 128. What a rank of the engine allocates of the same budget, and what
    the scheduler lets requests of that length have of it, is what the planner says."""
    shape = ModelShape.from_config(known("gpt-oss-120b"))
    sizes = footprint.Sizes("bf16", "bf16", slots=256, max_num_tokens=8192, seq_len=LONG)
    rank = footprint.rank_memory(shape, layout, 141 * 10**9, sizes)
    stages = stage_caches(shape, "bf16", "bf16", layout)
    fitting = [blocks_in(rank.budget, caches, 16, states=0, usable=0, what="") for caches in stages]
    assert rank.blocks == min(fitting)
    one_group = rank.budget // (16 * max(map(token_bytes, stages))) * 16
    assert rank.kv_tokens >= least * one_group
    options = SchedulerOptions(
        num_blocks=rank.blocks, block_size=16, max_batch_size=256, max_num_tokens=8192, max_seq_len=LONG, windows=rank.windows
    )  # fmt: skip
    requests = rank.kv_tokens // LONG
    pool = RequestBlocks(options)
    for number in range(requests):
        request = Request(AddRequest(str(number), [0] * (LONG - 1), SamplingParams()), seed=0, limit=LONG, matcher=None)
        pool.share(request, [])
        for end in range(8192, LONG, 8192):
            pool.take_ahead(request, end, end, kept=0)
            request.submitted = end
            pool.release_out_of_window(request)
        pool.take_ahead(request, LONG - 1, LONG - 1, kept=0)
        request.submitted = LONG - 1
        pool.release_out_of_window(request)
    each = blocks_of_request(rank.windows, LONG, 16)
    assert requests * (each - 1) <= pool.pool.referenced <= requests * each
    assert rank.blocks - pool.pool.referenced < 1.01 * each, "not one more would fit"


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(dp=2), Layout(pp=2, tp=2)], ids=lambda layout: layout.name)
def test_the_states_of_slots_and_prefixes_are_counted(layout, monkeypatch):
    plain = ModelShape.from_config(known("llama-3-8b"))
    mixed = hybrid(monkeypatch, plain)
    total, sizes = 80 * 10**9, footprint.Sizes("bf16", "bf16", slots=256, max_num_tokens=8192)
    before, rank = (footprint.rank_memory(shape, layout, total, sizes) for shape in (plain, mixed))
    assert rank.state == (256 + 128) // layout.dp * 8 * 128 * 128 * 4 * 16 // (layout.tp * layout.pp)
    assert (before.state, before.block) == (0, 2 * rank.block)
    assert rank.least - rank.block == before.least - before.block + rank.state
    freed = total - rank.weights - rank.beside - rank.graphs
    assert rank.kv == pytest.approx(0.9 * (freed - rank.state), rel=0.001)
    more = replace(sizes, slots=512)
    assert footprint.rank_memory(mixed, layout, total, more).kv_tokens < rank.kv_tokens - 1000


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_network_that_drafts_takes_memory(tmp_path, method):
    """Its weights on the last stage, and a part of each block: exactly those of its declaration."""
    shape = ModelShape.from_config(known("llama-3.1-8b"))
    head = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000, "num_hidden_layers": 1}
    traits = head if method == "eagle3" else {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**known("llama-3.1-8b"), **traits}))
    config = SpeculativeConfig.of({"method": method, "model": str(tmp_path), "num_speculative_tokens": 3})
    network, layout = network_for(config, shape), Layout(tp=2)
    sizes = footprint.Sizes("bf16", "bf16", 64, 8192)
    plain, drafting = (footprint.rank_memory(shape, layout, 80 << 30, each) for each in (sizes, replace(sizes, draft=network)))
    assert drafting.weights - plain.weights == network_bytes(network, "bf16", 2)
    assert drafting.block - plain.block == 16 * token_bytes(network_caches(network, "bf16", 2))
    assert drafting.kv_tokens < plain.kv_tokens
    request = PlanRequest(draft=network, speculative_config=config.canonical())
    machine, _ = subject.machine_for("h100", gpus_per_node=2)
    result = search.search(shape, machine, request)
    staged = footprint.rank_memory(shape, Layout(pp=2), 80 << 30, replace(sizes, draft=network)).weights
    embedding = 2 * 128256 * 4096 if method == "eagle3" else 0  # the head shares it, on the last stage
    assert staged == weight_bytes(shape, "bf16", Layout(pp=2))[-1] + network_bytes(network, "bf16", 1) + embedding
    assert '--speculative_config \'{"method"' in explain.text("llama-3.1-8b", shape, machine, request, result)


@pytest.mark.parametrize(("model", "layout", "millions"), [
    # 16 * (inputs + outputs) of q, k, v, o, gate, up and down of each layer
    ("llama-3-8b", Layout(), 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432) / 1e6),
    ("llama-3-8b", Layout(tp=2), 32 * 16 * (4096 * 7 + (4096 + 2 * 1024 + 4096 + 3 * 14336) / 2) / 1e6),
])  # fmt: skip
def test_slots_for_adapters_take_memory(model, layout, millions):
    shape = ModelShape.from_config(known(model))
    sizes = footprint.Sizes("bf16", "bf16", slots=256, max_num_tokens=8192)
    before, rank = (footprint.rank_memory(shape, layout, 80 * 10**9, each) for each in (sizes, replace(sizes, adapters=(4, 9))))
    assert rank.weights - before.weights == pytest.approx(4 * 2 * millions * 1e6)
    assert rank.kv_tokens < before.kv_tokens


def test_the_buffers_on_the_way_to_host_memory_take_memory():
    shape = ModelShape.from_config(known("llama-3-8b"))
    sizes = footprint.Sizes("bf16", "bf16", slots=256, max_num_tokens=8192)
    before, rank = (footprint.rank_memory(shape, Layout(), 80 * 10**9, each) for each in (sizes, replace(sizes, host_tier=True)))
    assert rank.beside - before.beside == staging_bytes(rank.block) == 256 << 20
    assert before.kv_tokens - rank.kv_tokens == pytest.approx(0.9 * (256 << 20) / (rank.block / 16), abs=32)


def test_the_buffers_of_states_take_four_of_them():
    shape = subject.shape_for("qwen3-next-80b-a3b")
    sizes = footprint.Sizes("fp8", "bf16", slots=64, max_num_tokens=8192)
    before, rank = (footprint.rank_memory(shape, Layout(), 140 * 10**9, each) for each in (sizes, replace(sizes, host_tier=True)))
    assert rank.beside - before.beside == staging_bytes(rank.block) + 4 * 79_036_416

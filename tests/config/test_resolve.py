# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.config import EngineOptions
from phalanx.config.experts import Experts
from phalanx.config.latent import Indexer, Latent
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD, Int4, Quantization
from phalanx.config.resolve import compute_dtype, concrete_kv_cache_dtype, resolve
from phalanx.errors import LayoutError, OptionError

SHAPE = ModelShape(
    architecture="LlamaForCausalLM", vocab_size=100, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=16, max_positions=16384, dtype="bf16",
)  # fmt: skip


def options(**values):
    return EngineOptions.of(model="m", **values)


def test_on_cpu():
    resolved_options = resolve(options(), SHAPE, gpus=0)
    chosen = resolved_options.options
    assert (chosen.device, chosen.dtype, chosen.max_num_tokens, chosen.max_seq_len) == ("cpu", "fp32", 2048, 16384)
    assert (chosen.kv_cache_bytes, chosen.cuda_graphs) == (1 << 30, False)
    resolved = {"device", "dtype", "kv_cache_dtype", "max_num_tokens", "max_seq_len", "kv_cache_bytes", "cuda_graphs"}
    assert set(resolved_options.reasons) == resolved
    assert "no GPU" in resolved_options.reasons["device"]


def test_on_gpus():
    resolved_options = resolve(options(tensor_parallel_size=2), SHAPE, gpus=4)
    chosen = resolved_options.options
    assert (chosen.device, chosen.dtype, chosen.max_num_tokens, chosen.kv_cache_bytes, chosen.cuda_graphs) == (
        "cuda",
        "bf16",
        8192,
        None,
        True,
    )
    assert "4 GPUs" in resolved_options.reasons["device"]
    assert "checkpoint" in resolved_options.reasons["dtype"]


def test_what_is_said_stays_and_needs_no_reason():
    fixed = options(
        device="cpu", dtype="fp16", kv_cache_dtype="fp8", max_num_tokens=7, max_seq_len=9, kv_cache_bytes=5000, cuda_graphs=False
    )
    resolved_options = resolve(fixed, SHAPE, gpus=8)
    assert resolved_options.options == fixed
    assert resolved_options.reasons == {}


def test_nothing_is_left_open():
    chosen = resolve(options(), SHAPE, gpus=1).options
    assert "auto" not in (chosen.device, chosen.dtype, chosen.kv_cache_dtype)
    assert None not in (chosen.max_num_tokens, chosen.max_seq_len)


def test_fp8_stays_fp8_and_leaves_the_rest_in_16_bit():
    assert resolve(options(dtype="fp8"), SHAPE, gpus=1).options.dtype == "fp8"
    assert compute_dtype("fp8", SHAPE, "cuda") == "bf16"
    assert compute_dtype("fp8", replace(SHAPE, dtype="fp16"), "cuda") == "fp16"
    assert compute_dtype("fp8", replace(SHAPE, dtype="fp32"), "cuda") == "bf16"
    assert compute_dtype("fp8", SHAPE, "cpu") == compute_dtype("auto", SHAPE, "cpu") == "fp32"
    assert compute_dtype("auto", replace(SHAPE, dtype="fp32"), "cuda") == "fp32"
    assert compute_dtype("auto", replace(SHAPE, dtype="fp32", quantization=ON_LOAD), "cuda") == "bf16"


@pytest.mark.parametrize("kv", [False, True])
def test_the_cache_is_fp8_where_the_checkpoint_was_made_for_it(kv):
    shape = replace(SHAPE, quantization=replace(ON_LOAD, kv=kv))
    assert resolve(options(), shape, gpus=1).options.kv_cache_dtype == ("fp8" if kv else "model")
    assert resolve(options(kv_cache_dtype="model"), shape, gpus=1).options.kv_cache_dtype == "model"


def test_a_cache_of_latents_is_not_in_int8():
    """The engine's options and the planner's alike."""
    assert resolve(options(kv_cache_dtype="int8"), SHAPE, gpus=1).options.kv_cache_dtype == "int8"
    latent = replace(SHAPE, latent=Latent(None, 64, 32, 16, 32, 1.0, False))
    with pytest.raises(OptionError, match=r"^kv_cache_dtype='int8' does not work with latent attention"):
        resolve(options(kv_cache_dtype="int8"), latent, gpus=1)
    with pytest.raises(OptionError, match="use kv_cache_dtype='fp8' or 'model'"):
        concrete_kv_cache_dtype("int8", latent)
    assert concrete_kv_cache_dtype("fp8", latent) == "fp8"


def test_the_tokens_of_latents_are_divided_over_tensor_parallel_ranks():
    latent = replace(SHAPE, latent=Latent(None, 64, 32, 16, 32, 1.0, False))
    with pytest.raises(LayoutError, match=r"^decode_context_parallel_size=3 does not divide tensor_parallel_size=4; .*1, 2, 4"):
        resolve(options(tensor_parallel_size=4, decode_context_parallel_size=3), latent, gpus=4)
    indexer = Indexer(4, 32, 8, False, (True,))
    sparse = replace(SHAPE, latent=replace(latent.latent, indexer=indexer))
    with pytest.raises(LayoutError, match=r"^decode_context_parallel_size=2 does not work with sparse attention"):
        resolve(options(tensor_parallel_size=4, decode_context_parallel_size=2), sparse, gpus=4)
    resolved = resolve(options(tensor_parallel_size=4, decode_context_parallel_size=2), latent, gpus=4).options
    assert (resolved.kv_block_size, resolved.block_size) == (16, 32)


def test_longer_than_the_model_names_both_numbers():
    with pytest.raises(OptionError, match=r"^max_seq_len=16385 exceeds the model's limit of 16384"):
        resolve(options(max_seq_len=16385), SHAPE, gpus=0)


def test_whole_prompts_fit_a_step():
    assert resolve(options(enable_chunked_prefill=False), SHAPE, gpus=0).options.max_num_tokens == 16384
    with pytest.raises(OptionError, match=r"^max_num_tokens=512 is below max_seq_len=16384"):
        resolve(options(enable_chunked_prefill=False, max_num_tokens=512), SHAPE, gpus=0)
    with pytest.raises(OptionError, match=r"^max_decode_gap_ms=50.0 cannot be kept without chunked prefill"):
        resolve(options(enable_chunked_prefill=False, max_decode_gap_ms=50.0), SHAPE, gpus=0)


@pytest.mark.parametrize(
    ("values", "gpus", "message"),
    [
        ({"device": "cuda"}, 0, "^device='cuda' needs a GPU; .*no GPU"),
        (
            {"tensor_parallel_size": 4},
            2,
            "^tensor_parallel_size=4 x pipeline_parallel_size=1 needs 4 GPUs on this host; it has 2 GPUs",
        ),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 2, "device": "cuda"},
            1,
            "needs 2 GPUs on this host; it has 1 GPU;",
        ),
        ({"expert_parallel_size": 2}, 0, "^expert_parallel_size=2 needs a model with experts; .*has no experts"),
        ({"moe_expert_parallel_size": 2}, 0, "has no experts"),
        ({"expert_parallel_size": 2, "moe_expert_parallel_size": 2}, 0, "give one of them"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, 0, "caches keys and values, which ranks split by heads"),
        ({"nnodes": 2, "node_rank": 2}, 0, r"^node_rank=2 is not below nnodes=2; .*use 0\.\.1"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, 0, "^nnodes=2 does not divide"),
    ],
)
def test_what_cannot_be(values, gpus, message):
    with pytest.raises((OptionError, LayoutError), match=message):
        resolve(options(**values), SHAPE, gpus)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"expert_parallel_size": 3}, "^expert_parallel_size=3 does not divide the model's 8 experts; use one of 1, 2, 4, 8"),
        ({"expert_parallel_size": 2, "max_batch_size": 1}, "^max_batch_size=1 is below expert_parallel_size=2"),
        ({"expert_parallel_size": 4, "nnodes": 3}, "nnodes=3 does not divide .*expert_parallel_size=4 = 4 ranks"),
        (
            {"expert_parallel_size": 2, "enable_chunked_prefill": False, "max_seq_len": 100, "max_num_tokens": 150},
            "^max_num_tokens=150 is below max_seq_len=100 x 2; .*use max_num_tokens=200",
        ),
    ],
)
def test_what_data_parallel_attention_cannot_be(values, message):
    shape = replace(SHAPE, architecture="MixtralForCausalLM", experts=Experts(8, 2, 64))
    with pytest.raises((OptionError, LayoutError), match=message):
        resolve(options(device="cpu", **values), shape, gpus=0)


@pytest.mark.parametrize(
    ("values", "experts"),
    [
        ({}, Experts(8, 2, 64)),
        ({"tensor_parallel_size": 2, "moe_expert_parallel_size": 2}, Experts(8, 2, 64)),
        ({}, None),
    ],
)
def test_an_exchange_needs_groups_that_exchange(values, experts):
    shape = replace(SHAPE, architecture="MixtralForCausalLM", experts=experts)
    for exchange in ("ALL_TO_ALL", "ONE_SIDED"):
        message = f"^expert_exchange='{exchange}' has no effect with expert_parallel_size=1; .*raise expert_parallel_size"
        with pytest.raises(LayoutError, match=message):
            resolve(options(device="cpu", expert_exchange=exchange, **values), shape, gpus=0)
    resolve(options(device="cpu", expert_exchange="AUTO", **values), shape, gpus=0)


def test_each_data_parallel_index_has_its_part_of_a_step():
    shape = replace(SHAPE, architecture="MixtralForCausalLM", experts=Experts(8, 2, 64))
    resolved = resolve(options(device="cpu", expert_parallel_size=2, max_batch_size=5, max_num_tokens=99), shape, gpus=0).options
    assert (resolved.world_size, resolved.index_batch_size, resolved.index_num_tokens) == (2, 3, 50)
    unchunked = resolve(options(device="cpu", expert_parallel_size=4, enable_chunked_prefill=False), shape, gpus=0).options
    assert unchunked.index_num_tokens >= unchunked.max_seq_len


def test_more_ranks_than_gpus_is_fine_on_cpu():
    assert resolve(options(tensor_parallel_size=4, device="cpu"), SHAPE, gpus=1).options.device == "cpu"


@pytest.mark.parametrize(("text", "seconds"), [("100", 0.1), ("auto", "auto"), (2.5, 0.0025), (None, None)])
def test_a_bound_on_gaps_is_a_number_or_auto(text: Any, seconds: Any) -> None:
    assert EngineOptions.of(model="x", max_decode_gap_ms=text).max_decode_gap == seconds


@pytest.mark.parametrize("wrong", ["0", -1, "fast"])
def test_a_bound_on_gaps_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match="max_decode_gap_ms"):
        EngineOptions.of(model="x", max_decode_gap_ms=wrong)


@pytest.mark.parametrize(("text", "memory"), [("auto", "auto"), ("0", 0), ("64000000000", 64_000_000_000), (5, 5)])
def test_host_memory_is_bytes_or_auto(text, memory):
    assert EngineOptions.of(model="x", kv_host_memory=text).kv_host_memory == memory


@pytest.mark.parametrize("wrong", ["64GiB", "-1", 1.5, "none", True])
def test_host_memory_of_another_form_is_refused(wrong):
    with pytest.raises(OptionError, match=r"^kv_host_memory=.* is not valid; it must be a number of bytes, or 'auto'$"):
        EngineOptions.of(model="x", kv_host_memory=wrong)


def test_activations_in_fp8_need_weights_of_4_bit_integers() -> None:
    own = {"device": "cpu", "quantize_activations": True}
    with pytest.raises(OptionError, match=r"quantize_activations has no effect.*no weights of 4-bit integers"):
        resolve(options(**own), SHAPE, gpus=0)
    assert resolve(options(dtype="int4", **own), SHAPE, gpus=0).options.quantize_activations
    with pytest.raises(OptionError, match="does not work with deterministic"):
        resolve(options(dtype="int4", deterministic=True, **own), SHAPE, gpus=0)
    awq = replace(SHAPE, quantization=Quantization("awq", "int4", "none", int4=Int4("awq", 128, zeros=True)))
    assert resolve(options(**own), awq, gpus=0).options.quantize_activations
    with pytest.raises(OptionError, match="copies its dense layers to FP8"):
        resolve(options(dtype="fp8", **own), awq, gpus=0)

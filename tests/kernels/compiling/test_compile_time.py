# SPDX-License-Identifier: Apache-2.0
"""Triton's seconds are told apart; after the start of an engine there are none, nor in a start that finds its kernels kept."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.config.sampling_params import SamplingParams
from phalanx.kernels.compiling import compile_time
from phalanx.serve.llm import LLM
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint

PARAMS_OF_REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.8, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": {5: 1.0}}, {"temperature": 0.8, "logit_bias": {5: 1.0}}, {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2}, {"temperature": 0.0, "prompt_logprobs": 1},
]  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "fp8": {"dtype": "fp8", "kv_cache_dtype": "fp8"},
    "bf16, eager": {"dtype": "bf16", "cuda_graphs": False},
    "fp8, 2 stages": {"dtype": "fp8", "kv_cache_dtype": "fp8", "pipeline_parallel_size": 2},
}
SIZES: dict[str, Any] = {
    "max_batch_size": 48, "max_num_tokens": 3000, "max_seq_len": 2048, "start_timeout": 280, "skip_tokenizer_init": True,
}  # fmt: skip


def llama(folder: Path) -> Path:
    """A checkpoint whose sizes the kernels for GPUs take."""
    return write_checkpoint(
        folder / "llama", "llama", hidden_size=2048, intermediate_size=1024, num_attention_heads=16, num_key_value_heads=4,
        head_dim=128, max_position_embeddings=2048, std=0.02,
    )  # fmt: skip


def test_the_compiler_is_hashed_beside_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    cache.triton_key.cache_clear()
    thread = compile_time.begin_hashing_compiler()
    assert thread is not None
    thread.join(60)
    assert cache.triton_key.cache_info().currsize == 1
    cache.triton_key()
    assert cache.triton_key.cache_info().misses == 1
    monkeypatch.delattr(cache, "triton_key")
    assert compile_time.begin_hashing_compiler() is None


def test_compilation_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.compilation, "listener", None)
    seconds: dict[str, float] = {}
    compile_time.count_seconds(seconds)
    for hit in (False, False, True):
        times = SimpleNamespace(total=250_000)
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=hit)
    assert seconds == {"(kernels compiled)": 0.5, "(kernels from the cache)": 0.25}


@pytest.mark.gpu1
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.gpu2] if "stages" in name else []) for name in ENGINES])
def test_a_running_engine_compiles_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own Triton finds nothing, and leaves there whatever it compiles, on the engine's ranks too."""
    cache, rng = tmp_path / "triton", random.Random(0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    with LLM(llama(tmp_path), **SIZES, **ENGINES[name]) as llm:
        compiled = set(cache.rglob("*.cubin"))
        assert len(compiled) > 10
        end = time.monotonic() + 8
        while time.monotonic() < end:
            longest, kinds = rng.choice([4, 100, 1900]), rng.sample(PARAMS_OF_REQUESTS, rng.choice([1, 1, 2]))
            lengths = [rng.randint(1, longest) for _ in range(rng.choice([1, 2, 5, 70]))]
            prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
            params = [SamplingParams(max_tokens=rng.randint(1, 40), **rng.choice(kinds)) for _ in prompts]
            assert len(llm.generate(prompts, params, use_tqdm=False)) == len(prompts)
        new = sorted(path.stem for path in set(cache.rglob("*.cubin")) - compiled)
    assert not new


@pytest.mark.gpu1
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_second_start_with_the_same_folder_compiles_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In other processes than the first, as in the next container that has the folder mounted."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    model, kept = llama(tmp_path), tmp_path / "kernels"
    compiled, cached, files = list[float](), list[float](), list[set[Path]]()
    for _ in range(2):
        with LLM(model, kernel_cache_dir=kept, **SIZES, **ENGINES[name]) as llm:
            phases = llm.facts.ranks[0].phases
        compiled.append(phases.get(compile_time.COMPILED, 0.0))
        cached.append(phases.get(compile_time.CACHED, 0.0))
        files.append(set((kept / "triton").rglob("*.cubin")))
    assert compiled[0] > 0
    assert len(files[0]) > 10
    assert sorted(path.stem for path in files[1] - files[0]) == []
    assert compiled[1] == 0
    assert cached[1] > 0

# SPDX-License-Identifier: Apache-2.0
"""Triton's seconds are told apart, and after the start of an engine there are none."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.config.sampling import SamplingParams
from phalanx.kernels import compiling
from phalanx.serve.llm import LLM
from tests.checkpoints import VOCAB_SIZE, write_checkpoint

ASKED: list[dict[str, Any]] = [
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


def test_compilation_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.compilation, "listener", None)
    seconds: dict[str, float] = {}
    compiling.count(seconds)
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
    folder = write_checkpoint(
        tmp_path / "llama", "llama", hidden_size=2048, intermediate_size=1024, num_attention_heads=16, num_key_value_heads=4,
        head_dim=128, max_position_embeddings=2048, std=0.02,
    )  # fmt: skip
    sizes: dict[str, Any] = {"max_batch_size": 48, "max_num_tokens": 3000, "max_seq_len": 2048}
    with LLM(folder, skip_tokenizer_init=True, start_timeout=280, **sizes, **ENGINES[name]) as llm:
        compiled = set(cache.rglob("*.cubin"))
        assert len(compiled) > 10
        end = time.monotonic() + 8
        while time.monotonic() < end:
            longest, kinds = rng.choice([4, 100, 1900]), rng.sample(ASKED, rng.choice([1, 1, 2]))
            lengths = [rng.randint(1, longest) for _ in range(rng.choice([1, 2, 5, 70]))]
            prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
            asked = [SamplingParams(max_tokens=rng.randint(1, 40), **rng.choice(kinds)) for _ in prompts]
            assert len(llm.generate(prompts, asked, use_tqdm=False)) == len(prompts)
        new = sorted(path.stem for path in set(cache.rglob("*.cubin")) - compiled)
    assert not new

# SPDX-License-Identifier: Apache-2.0
"""`deterministic`: the same bits alone and in any crowd, on a CPU and on a GPU. PHALANX_CROWDS=50 for the whole of it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from phalanx import LLM, SamplingParams
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.resolve import resolve
from phalanx.config.serving import ServeOptions
from phalanx.errors import OptionError, PhalanxError
from phalanx.serve.outputs import RequestOutput
from tests.support.checkpoints import write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_python")

CROWDS = int(os.environ.get("PHALANX_CROWDS", "3"))
CACHE = 1 << 18
PROMPTS = 200 if CROWDS >= 50 else 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("deterministic") / "llama", "llama")


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of which some begin alike, and whose tokens are drawn or not; their logprobs tell the bits."""
    chance, cases = random.Random(7), []
    begin = [chance.randrange(3, 380) for _ in range(40)]
    for number in range(count):
        prompt = begin[: chance.choice((0, 16, 40))] + [chance.randrange(3, 380) for _ in range(chance.randint(1, 50))]
        temperature = number % 3 * 0.5
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=chance.randint(1, 9), ignore_eos=True, logprobs=2,
            prompt_logprobs=0 if number % 5 == 0 else None, presence_penalty=number % 4 * 0.3,
            top_p=0.9 if number % 7 == 0 else 1.0,
        )  # fmt: skip
        cases.append((prompt, params))
    return cases


def bits(output: RequestOutput) -> Any:
    part = output.outputs[0]
    return part.token_ids, part.logprobs, output.prompt_logprobs


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)], ids=["tp1", "tp2", "pp2"])
def test_the_same_bits_alone_and_in_any_crowd(folder: Path, tp: int, pp: int) -> None:
    """Steps are small, so that prompts are cut where the crowd has it, and the cache is too small for all of it."""
    with LLM(
        folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, device="cpu", max_seq_len=128, max_num_tokens=48,
        kv_block_size=8, kv_cache_bytes=CACHE, deterministic=True, max_batch_size=16,
    ) as llm:  # fmt: skip
        assert "alone" in llm.facts.reasons["deterministic"]
        compare_crowds(llm, CROWDS)


def compare_crowds(llm: LLM, crowds: int) -> None:
    cases, chance = requests(PROMPTS), random.Random(1)
    alone = [bits(llm.generate(prompt, params, use_tqdm=False)) for prompt, params in cases]
    for _ in range(crowds):
        crowd = chance.sample(range(len(cases)), chance.randint(len(cases) // 2, len(cases)))
        outputs = llm.generate([cases[i][0] for i in crowd], [cases[i][1] for i in crowd], use_tqdm=False)
        for index, output in zip(crowd, outputs, strict=True):
            assert bits(output) == alone[index], (index, crowd)


SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 400,
}  # fmt: skip
ON_A_GPU = [
    ("llama", {}), ("llama", {"dtype": "fp8", "kv_cache_dtype": "fp8"}), ("mistral", {}), ("qwen3", {"kv_cache_dtype": "int8"}),
    ("mixtral", {}), ("mixtral", {"dtype": "fp8"}), ("llama", {"cuda_graphs": False}),
    ("qwen3", {"max_num_tokens": 300}),
    ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
]  # fmt: skip


@pytest.mark.gpu1
@pytest.mark.parametrize(("family", "fields"), ON_A_GPU)
def test_the_same_bits_alone_and_in_any_crowd_on_a_gpu(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    """Decode rows in graphs of many sizes and prompts in pieces, over blocks that others have computed. Speculation changes no
    bit, as its rows of several tokens are like any others."""
    folder = write_checkpoint(tmp_path / family, family, **SIZES)
    options = {"dtype": "bf16", "max_seq_len": 128, "max_num_tokens": 48, "kv_cache_bytes": 4 << 20, "max_batch_size": 16}
    with LLM(folder, device="cuda", deterministic=True, kv_block_size=16, **{**options, **fields}) as llm:
        assert "batch" in llm.facts.reasons["deterministic"]
        compare_crowds(llm, max(CROWDS, 8))


@pytest.mark.gpu1
@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("gpt_oss", {}, "has experts in"),
        ("deepseek_v3", {}, "latents"),
        ("llama", {"dtype": "int4"}, "Int4"),
        ("llama", {"dtype": "fp32"}, "fp32"),
    ],
)
def test_kernels_that_depend_on_the_batch_are_refused_by_name(
    tmp_path: Path, family: str, fields: dict[str, Any], words: str
) -> None:
    sizes = {} if family != "llama" else SIZES
    with pytest.raises(PhalanxError, match="deterministic does not work with this") as raised:
        LLM(write_checkpoint(tmp_path / family, family, **sizes), device="cuda", deterministic=True, **{"dtype": "bf16", **fields})
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "excludes speculative_config"),
        ({"expert_parallel_size": 2}, "excludes expert_parallel_size"),
    ],
)
def test_what_it_cannot_promise_is_refused_by_name(folder: Path, fields: dict[str, Any], words: str) -> None:
    shape = ModelShape.from_folder(
        write_checkpoint(folder.parent / "moe", "mixtral") if "expert_parallel_size" in fields else folder
    )
    options = EngineOptions.of(model=str(folder), device="cpu", deterministic=True, **fields)
    with pytest.raises(OptionError, match=words):
        resolve(options, shape, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"allreduce_strategy": "NCCL", "tensor_parallel_size": 2}, "excludes allreduce_strategy NCCL on a GPU"),
        ({"max_loras": 2}, "excludes max_loras on a GPU"),
    ],
)
def test_what_gpus_cannot_promise_is_refused_by_name(folder: Path, fields: dict[str, Any], words: str) -> None:
    options = EngineOptions.of(model=str(folder), device="cuda", deterministic=True, **fields)
    with pytest.raises(OptionError, match=words):
        resolve(options, ModelShape.from_folder(folder), 2)


def test_a_mean_over_steps_is_refused() -> None:
    with pytest.raises(OptionError, match="pooling='mean' is not possible with deterministic"):
        ServeOptions.of(pooling="mean").require_possible(deterministic=True)
    ServeOptions.of(pooling="mean").require_possible(deterministic=False)

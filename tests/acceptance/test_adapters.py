# SPDX-License-Identifier: Apache-2.0
"""Tokens and log probabilities with a LoRA adapter equal those of the model into which it is merged, in fp32 on CPU, with real rank
processes: each layout, several adapters and none in one batch, prefix hits, preemption, drafts."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from phalanx import LLM, SamplingParams
from phalanx.config.sampling_params import StructuredOutputParams
from phalanx.errors import AdapterError, AdapterNotFound
from tests.support.adapters import merge, write_adapter
from tests.support.checkpoints import write_checkpoint
from tests.support.greedy_tokens import continued

pytestmark = pytest.mark.usefixtures("forked_python")

NEW_TOKENS = 10
NAMES = [f"adapter {number}" for number in range(8)]
KINDS = [
    {}, {"modules": ("q_proj",)}, {"modules": ("down_proj", "o_proj"), "use_rslora": True}, {"r": 7, "lora_alpha": 3},
    {"rank_pattern": {"v_proj": 2, "model.layers.1.mlp.up_proj": 9}, "alpha_pattern": {"gate_proj": 30}}, {"r": 1},
    {"modules": ("k_proj", "up_proj"), "r": 12}, {"lora_alpha": 16, "use_rslora": True},
]  # fmt: skip
"""Of the adapters."""


@dataclass
class Merged:
    base: Path
    adapters: list[Path]
    prompts: list[list[int]]
    wanted: list[tuple[list[int], list[float]]]
    """Tokens and log probabilities of each adapter's prompt, then of the base's."""


@pytest.fixture(scope="module")
def merged(tmp_path_factory) -> Merged:
    root = tmp_path_factory.mktemp("adapters")
    base = write_checkpoint(root / "base", "llama", num_hidden_layers=3, num_attention_heads=12, num_key_value_heads=3)
    adapters = [write_adapter(root / name, base, seed=seed, **KINDS[seed]) for seed, name in enumerate(NAMES)]
    shared = [(7 * at) % 380 for at in range(19)]
    prompts, wanted = [], []
    for number, adapter in enumerate([*adapters, None]):
        folder = base if adapter is None else merge(base, adapter, root / f"merged {number}")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        prompt = [*shared, 11 + number % 3]  # of all adapters the same blocks of tokens
        sequence = continued(model, prompt, NEW_TOKENS)
        with torch.inference_mode():
            scores = model(sequence).logits[0].log_softmax(-1)
        tokens = sequence[0, len(prompt) :].tolist()
        prompts.append(prompt)
        wanted.append((tokens, [scores[len(prompt) - 1 + at, token].item() for at, token in enumerate(tokens)]))
    assert len({tuple(tokens) for tokens, _ in wanted}) >= 8, "adapters change what the model says"
    return Merged(base, adapters, prompts, wanted)


def params_of(names: list[str | None]) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, adapter=name) for name in names
    ]  # fmt: skip


def check(merged: Merged, llm: LLM, numbers: list[int], names: list[str | None]) -> None:
    outputs = llm.generate([merged.prompts[number] for number in numbers], params_of(names), use_tqdm=False)
    for number, output in zip(numbers, outputs, strict=True):
        tokens, logprobs = merged.wanted[number]
        assert output.outputs[0].token_ids == tokens, f"adapter {number}"
        assert [entry.logprob for entry in output.outputs[0].logprobs] == pytest.approx(logprobs, abs=2e-4)


@pytest.mark.gpu1
def test_graphs_on_a_gpu_give_the_tokens_of_eager_steps(tmp_path):
    """Eight requests with seven adapters and none, in CUDA graphs that were captured before any adapter came. The graph of eight
    rows has the shapes of the eager step, and so its kernels. Heads are of a size that our attention kernels take."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    base = write_checkpoint(tmp_path / "base", "llama", num_hidden_layers=3, **sizes)
    adapters = [write_adapter(tmp_path / name, base, seed=seed, **KINDS[seed]) for seed, name in enumerate(NAMES[:7])]
    names, prompts, tokens = [*NAMES[:7], None], [[5, 9, 13, 40 + number] for number in range(8)], []
    for graphs in (True, False):
        with LLM(
            base, dtype="bf16", kv_cache_dtype="fp8", max_loras=7, max_lora_rank=12, max_batch_size=8, max_seq_len=40,
            cuda_graphs=graphs,
        ) as llm:  # fmt: skip
            for name, folder in zip(NAMES, adapters, strict=False):
                llm.load_adapter(name, folder)
            outputs = llm.generate(prompts, params_of(names), use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            deadline = time.monotonic() + 30
            while (ran := llm.stats().ran)["decode graph/steps" if graphs else "eager/steps"] < NEW_TOKENS - 1:
                assert time.monotonic() < deadline, ran  # counts come with the ranks' reports
                time.sleep(0.2)
            assert graphs or not ran["decode graph/steps"], ran
    assert tokens[0] == tokens[1]
    assert len({tuple(of_request) for of_request in tokens[0]}) >= 7


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_tokens_equal_those_of_the_merged_model(merged, tp, pp):
    """Eight adapters and none in one batch. The cache holds few of them, so that requests are preempted, and what they computed is
    found again; six slots, so that adapters take each other's."""
    with LLM(
        merged.base, device="cpu", tensor_parallel_size=tp, pipeline_parallel_size=pp, max_loras=6, max_lora_rank=12,
        kv_block_size=4, max_num_tokens=24, max_batch_size=9, max_seq_len=40, kv_cache_bytes=40 * 4608 // tp // pp,
    ) as llm:  # fmt: skip
        for name, folder in zip(NAMES, merged.adapters, strict=True):
            llm.load_adapter(name, folder)
        order = [8, *range(8)]
        for _ in range(2):
            check(merged, llm, order, [None if number == 8 else NAMES[number] for number in order])
        stats = llm.stats()
        assert stats.prefix_hits > 0
        assert stats.blocks_referenced == 0
        assert stats.max_adapters == len(stats.adapters_in_slots) == 6
        # Another adapter under a known name: neither its old weights nor its old keys and values.
        llm.unload_adapter(NAMES[0])
        with pytest.raises(AdapterNotFound, match="'adapter 0' is not loaded"):
            check(merged, llm, [0], [NAMES[0]])
        with pytest.raises(AdapterError, match="is already loaded"):
            llm.load_adapter(NAMES[1], merged.adapters[0])
        llm.load_adapter(NAMES[0], merged.adapters[4])
        check(merged, llm, [4], [NAMES[0]])


def test_a_grammar_beside_an_adapter(merged, tmp_path):
    """Of requests with the same grammar each gets what the model of its adapter says within it."""
    regex, numbers = StructuredOutputParams(regex="[a-z]{1,6}( [a-z]{1,6}){2,9}"), [0, 3, 8]

    def texts(folder: Path, names: list[str | None], prompts: list[list[int]], **slots: int) -> list[tuple[int, ...]]:
        with LLM(folder, device="cpu", kv_block_size=4, max_num_tokens=64, max_batch_size=4, max_seq_len=64, **slots) as llm:
            for name, adapter in zip(NAMES, merged.adapters, strict=True) if slots else ():
                llm.load_adapter(name, adapter)
            params = [
                msgspec.structs.replace(each, max_tokens=24, ignore_eos=False, structured_output=regex) for each in params_of(names)
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    prompts = [merged.prompts[number] for number in numbers]
    names = [None if number == 8 else NAMES[number] for number in numbers]
    wanted = []
    for number, prompt in zip(numbers, prompts, strict=True):
        folder = merged.base if number == 8 else merge(merged.base, merged.adapters[number], tmp_path / str(number))
        wanted += texts(folder, [None], [prompt])
    assert texts(merged.base, names, prompts, max_loras=2, max_lora_rank=12) == wanted
    assert len(set(wanted)) == len(numbers)


def test_drafts_and_a_sleep_between(merged):
    """Each row verifies three drafts of the base, for which its adapter counts, too; adapters outlast a sleep, which drops the
    cache."""
    config = {
        "method": "draft_model", "model": str(merged.base), "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 99, 3]],
    }  # fmt: skip
    with LLM(
        merged.base, device="cpu", max_loras=8, max_lora_rank=12, kv_block_size=4, max_num_tokens=64, max_batch_size=9,
        max_seq_len=40, speculative_config=config,
    ) as llm:  # fmt: skip
        for name, folder in zip(NAMES, merged.adapters, strict=True):
            llm.load_adapter(name, folder)
        order = [8, *range(8)]
        for _ in range(2):
            check(merged, llm, order, [None if number == 8 else NAMES[number] for number in order])
            llm.sleep(level=1)
            llm.wake_up()
        assert sum(llm.stats().accepted_tokens) > 0


def test_data_parallel_attention_beside_experts(tmp_path):
    """Each of two groups has rows of an adapter and of none, and computes experts for those of the other."""
    base = write_checkpoint(tmp_path / "base", "qwen3_moe")
    adapter = write_adapter(tmp_path / "adapter", base, modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    prompts = [[(7 * at + number) % 380 for at in range(9 + number)] for number in range(6)]
    wanted = []
    for folder in (base, merge(base, adapter, tmp_path / "merged")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        wanted.append([continued(model, prompt, NEW_TOKENS)[0, len(prompt) :].tolist() for prompt in prompts])
    adapted = [number % 3 == 0 for number in range(6)]
    with LLM(
        base, device="cpu", expert_parallel_size=2, max_loras=1, max_lora_rank=4, kv_block_size=4, max_num_tokens=48,
        max_batch_size=8, max_seq_len=40,
    ) as llm:  # fmt: skip
        llm.load_adapter("one", adapter)
        outputs = llm.generate(prompts, params_of(["one" if each else None for each in adapted]), use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == [wanted[each][number] for number, each in enumerate(adapted)]
    assert wanted[0] != wanted[1]


TENSORS: dict[str, Callable[[dict[str, torch.Tensor], str], object]] = {
    "NaN": lambda tensors, name: tensors[name].view(-1)[-1:].fill_(float("nan")),
    "infinity": lambda tensors, name: tensors[name].fill_(float("inf")),
    "an absent half": lambda tensors, name: tensors.pop(name),
    "a place that there is not": lambda tensors, name: tensors.update({name.replace("layers", "blocks"): tensors.pop(name)}),
    "another shape": lambda tensors, name: tensors.update({name: tensors[name].repeat(2, 1)}),
    "integers": lambda tensors, name: tensors.update({name: tensors[name].int()}),
    "experts": lambda tensors, name: tensors.update({re.sub("mlp|self_attn", "mlp.experts.0", name): tensors.pop(name)}),
    "DoRA": lambda tensors, name: tensors.update({name.rpartition(".lora")[0] + ".lora_magnitude_vector": torch.ones(48)}),
}  # fmt: skip
"""What breaks an adapter, in one of its tensors."""


def test_a_hundred_broken_adapters_end_no_engine(merged, tmp_path):
    """Loaded one after the other while requests of sound ones run, on two ranks: each is an error of its own, and the requests say
    what they would have said."""
    chance, broken = random.Random(0), tmp_path / "broken"
    shutil.copytree(merged.adapters[0], broken)
    sound, config = load_file(broken / "adapter_model.safetensors"), json.loads((broken / "adapter_config.json").read_text())
    with LLM(
        merged.base, device="cpu", tensor_parallel_size=2, max_loras=2, max_lora_rank=12, kv_block_size=4, max_num_tokens=24,
        max_batch_size=4, max_seq_len=40,
    ) as llm:  # fmt: skip
        llm.load_adapter(NAMES[0], merged.adapters[0])
        for number in range(100):
            tensors = {name: values.clone() for name, values in sound.items()}
            fields = dict(config)
            if number % 5 == 4:
                fields[chance.choice(("r", "lora_alpha", "peft_type"))] = chance.choice((0, -1, "x", []))
            else:
                TENSORS[chance.choice(list(TENSORS))](tensors, chance.choice(list(tensors)))
            (broken / "adapter_config.json").write_text(json.dumps(fields))
            save_file(tensors, broken / "adapter_model.safetensors")
            if number % 10 == 9:
                file = broken / "adapter_model.safetensors"
                file.write_bytes(file.read_bytes()[: chance.randrange(2000)])
            with pytest.raises(AdapterError, match="adapter 'broken' is not loaded: "):
                llm.load_adapter("broken", broken)
            if number % 20 == 0:
                check(merged, llm, [0, 8], [NAMES[0], None])
        check(merged, llm, [0, 8], [NAMES[0], None])

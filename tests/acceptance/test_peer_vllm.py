# SPDX-License-Identifier: Apache-2.0
"""vLLM beside `phalanx bench`: the same prompts and samples, through a stand-in that counts tokens as vLLM gives them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine import peer_vllm
from phalanx.bench import workloads


class StandIn:
    """vllm.LLM as far as it is asked. calls: (prompts, tokens) of each generate."""

    calls: list[tuple[int, int]]
    options: dict[str, Any]
    missing = 0

    def __init__(self, **options: Any) -> None:
        StandIn.options, StandIn.calls = options, []
        config = json.loads((Path(options["model"]) / "config.json").read_text())
        StandIn.options["config"] = config
        cache = SimpleNamespace(num_gpu_blocks=10, block_size=16)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))

    def generate(self, prompts: list[dict[str, list[int]]], params: SimpleNamespace, *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        StandIn.first_ids = prompts[0]["prompt_token_ids"]
        StandIn.calls.append((len(prompts), params.max_tokens))
        tokens = [1] * (params.max_tokens - StandIn.missing)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for _ in prompts]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    params = lambda **values: SimpleNamespace(**values)  # noqa: E731
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.24.0", LLM=StandIn, SamplingParams=params))
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "")  # it is put back afterwards
    monkeypatch.setattr(StandIn, "missing", 0)
    return StandIn


def run(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = peer_vllm.main([*arguments, "--out", str(out)])
    return code, json.loads((out / "peer_vllm.json").read_text())


def test_the_method_is_that_of_phalanx_bench(tmp_path: Path, vllm: type[StandIn]) -> None:
    code, report = run(tmp_path, "--model", "qwen3-30b-a3b", "--dtype", "fp8", "-w", "decode-3x8x5", "-w", "batch-20x1000x7")
    assert code == 0
    assert vllm.calls == [(3, 6), *[*[(3, 1)] * 3, (3, 6)] * 2, (9, 4), (20, 7)]
    assert vllm.first_ids == workloads.prompts(workloads.parse("batch-20x1000x7"), 151936, 0)[0]
    assert vllm.options["quantization"] == "fp8"
    assert vllm.options["config"]["model_type"] == "qwen3_moe"
    decode, batch = report["results"]
    assert (len(decode["samples_s"]["first_token"]), len(decode["samples_s"]["all_tokens"])) == (6, 2)
    assert batch["output_tok_s"] == pytest.approx(20 * 7 / batch["seconds"])
    assert (report["engine"], report["kv_tokens"], report["arguments"]["model"]) == ("vllm 0.24.0", 160, "qwen3-30b-a3b")


@pytest.mark.parametrize(("routing", "strategy"), [("uniform", "uniform_random"), ("router", "")])
def test_experts_are_drawn_by_its_simulation_or_its_router(
    tmp_path: Path, vllm: type[StandIn], monkeypatch: pytest.MonkeyPatch, routing: str, strategy: str
) -> None:
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "of another run")
    _, report = run(tmp_path, "--model", "qwen3-30b-a3b", "--routing", routing, "-w", "decode-1x8x2")
    assert os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] == strategy
    assert report["routing"] == routing


def test_mxfp4_is_in_the_configuration(tmp_path: Path, vllm: type[StandIn]) -> None:
    run(tmp_path, "--model", "gpt-oss-120b", "--dtype", "mxfp4", "-w", "decode-1x8x2", "--option", "block_size=32")
    assert vllm.options["config"]["quantization_config"]["quant_method"] == "mxfp4"
    assert vllm.options["block_size"] == 32


def test_too_few_tokens_are_an_error_of_their_workload(
    tmp_path: Path, vllm: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "missing", 1)
    code, report = run(tmp_path, "--model", "llama-3-8b", "-w", "decode-1x8x4")
    assert code == 1
    assert "new tokens instead of" in report["results"][0]["error"]

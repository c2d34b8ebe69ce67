# SPDX-License-Identifier: Apache-2.0
"""A family that is made in a test and touches no file of the package: its own order of norms, a layer of each kind, its own linear
method, and a state for each request. It is loaded, served over tensor and pipeline parallel ranks, and planned."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from phalanx import LLM
from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout.cache import default_snapshots, request_bytes, token_bytes
from phalanx.layout.memory import stage_caches
from phalanx.layout.weight_tensors import scales, tensors
from phalanx.layout.weights import weight_bytes
from phalanx.planner import search, subject
from tests.support.greedy_tokens import BLOCK, STEP_TOKENS, longest_request, params_of, prompts_of_all_lengths
from tests.support.layout_mosaic import CONFIG, INT8, ROOT, SITE, add

pytestmark = pytest.mark.usefixtures("forked_python")

SLOTS = 6
QUANTIZED = {"quantization_config": {"quant_method": INT8, "ignore": [r"model\.layers\.\d+\.mlp\.experts"]}}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints "stored", with linear layers in int8, and "meant", with the values that these stand for."""
    add(monkeypatch)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT / "src", ROOT))))
    shape = ModelShape.from_config({**CONFIG, **QUANTIZED})
    beside, generator = scales(shape), torch.Generator().manual_seed(5)
    stored, meant = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, dims in tensors(shape).items():
        values = 0.3 * torch.randn(dims, generator=generator) + (len(dims) == 1)
        if f"{name}_scale" in beside:
            scale = values.abs().amax(1) / 127
            stored[name], stored[f"{name}_scale"] = (values / scale[:, None]).round().to(torch.int8), scale
            values = stored[name].float() * scale[:, None]
        else:
            stored[name] = values
        meant[name] = values
    assert sum(values.dtype == torch.int8 for values in stored.values()) == 4 * 4 + 2 * 3 + 1  # of layers, and the head
    for kind, content, more in (("stored", stored, QUANTIZED), ("meant", meant, {})):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({**CONFIG, **more}))
        save_file(content, tmp_path / kind / "model.safetensors", {"format": "pt"})
    return tmp_path


def started(folder: Path, longest: int, **options: Any) -> LLM:
    return LLM(
        folder, device="cpu", skip_tokenizer_init=True, kv_block_size=BLOCK, max_num_tokens=STEP_TOKENS, max_batch_size=SLOTS,
        max_seq_len=longest, **options,
    )  # fmt: skip


def test_tokens_over_ranks_are_those_of_the_values_that_int8_stands_for(written: Path) -> None:
    prompts = prompts_of_all_lengths()
    longest, params = longest_request(prompts), params_of([[0] * 12])
    with started(written / "meant", longest) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)
    shape, layout = ModelShape.from_folder(written / "stored"), Layout(pp=2, tp=2)
    caches = stage_caches(shape, "fp32", "fp32", layout)
    blocks = -(-longest // BLOCK)  # room for one request at its largest, and for half of another, as windows bound some layers
    states = SLOTS + default_snapshots(SLOTS)
    room = max(blocks * BLOCK * token_bytes(stage) + states * request_bytes(stage) for stage in caches)
    with started(
        written / "stored", longest, tensor_parallel_size=2, pipeline_parallel_size=2, kv_cache_bytes=room
    ) as llm:  # fmt: skip
        planned = weight_bytes(shape, "fp32", layout)
        assert [rank.bytes["weights"] for rank in llm.facts.ranks] == [planned[rank // 2] for rank in range(4)]
        kept = [states * request_bytes(caches[rank // 2]) for rank in range(4)]
        assert [rank.bytes.get("state", 0) for rank in llm.facts.ranks] == kept
        for _ in range(2):  # the second time, slots hold what others left behind
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == alone
        assert llm.stats().preemptions > 0


def test_dummy_weights_have_its_forms(written: Path) -> None:
    """Which depend on the seed alone: ranks hold parts of one model."""
    prompts = prompts_of_all_lengths()[:3]
    longest, params = longest_request(prompts), params_of([[0] * 12])
    outputs = []
    for tp in (1, 2):
        with started(written / "stored", longest, load_format="dummy", tensor_parallel_size=tp) as llm:
            outputs.append([each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)])
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) == 3


def test_it_is_planned(written: Path) -> None:
    machine, _ = subject.machine_for("H100", gpus_per_node=4)
    request = search.PlanRequest(dtype="bf16", isl=64, osl=64)
    stored, meant = (search.search(subject.shape_for(str(written / kind)), machine, request).plans for kind in ("stored", "meant"))
    assert {plan.layout.name for plan in stored} >= {"tp 2 pp 2", "tp 4 pp 1"}
    assert all(plan.bytes["request_state"] for plan in stored)
    weights = [{plan.layout.name: plan.bytes["weights"] for plan in plans} for plans in (stored, meant)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name] < weights[1][name] for name in weights[0])

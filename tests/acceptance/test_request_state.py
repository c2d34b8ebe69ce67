# SPDX-License-Identifier: Apache-2.0
"""A family that is made in a test, half of whose layers keep a state for each request.

Its tokens over tensor and pipeline parallel ranks, in batches, in chunks and after preemptions, are those of each request alone.
Its bytes are those that the planner counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from phalanx import LLM
from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout.cache import default_snapshots, request_bytes, token_bytes
from phalanx.layout.memory import stage_caches
from phalanx.planner import search, subject
from tests.support.forked_python import FORKS_TOO
from tests.support.greedy_tokens import BLOCK, STEP_TOKENS, longest_request, params_of, prompts_of_all_lengths
from tests.support.layout_hybrid import HYBRID, add_family

pytestmark = pytest.mark.usefixtures("forked_python")

CONFIG = {
    "architectures": [HYBRID], "vocab_size": 384, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip
SLOTS = 6
STATES = SLOTS + default_snapshots(SLOTS)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with dummy weights. The engine's processes know the family as soon as they start."""
    add_family(monkeypatch)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "sitecustomize.py").write_text(
        FORKS_TOO + "from tests.support import layout_hybrid\nlayout_hybrid.add_family()\nimport tests.support.models_hybrid\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT / "src", ROOT))))
    return tmp_path / "model"


def started(folder: Path, longest: int, **options: object) -> LLM:
    return LLM(
        folder, device="cpu", load_format="dummy", skip_tokenizer_init=True, kv_block_size=BLOCK, max_num_tokens=STEP_TOKENS,
        max_batch_size=SLOTS, max_seq_len=longest, **options,
    )  # fmt: skip


def test_tokens_are_those_of_each_request_alone(folder: Path) -> None:
    prompts = prompts_of_all_lengths()
    longest = longest_request(prompts)
    params = params_of([[0] * 12])
    with started(folder, longest) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)
    shape, layout = ModelShape.from_folder(folder), Layout(pp=2, tp=2)
    caches = stage_caches(shape, "fp32", "fp32", layout)
    assert [request_bytes(each) for each in caches] == [12 * 12 * 4, 12 * 12 * 4]
    blocks = -(-longest // BLOCK) * 3 // 2  # room for one request at its largest and a half
    room = blocks * BLOCK * token_bytes(caches[0]) + STATES * request_bytes(caches[0])
    with started(folder, longest, tensor_parallel_size=2, pipeline_parallel_size=2, kv_cache_bytes=room) as llm:
        assert llm.facts.num_blocks == blocks
        assert {rank.bytes["state"] for rank in llm.facts.ranks} == {STATES * 12 * 12 * 4}
        for _ in range(2):  # the second time, slots hold what others left behind
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == alone
        assert llm.stats().preemptions > 0


def test_it_is_planned(folder: Path) -> None:
    shape = subject.shape_for(str(folder))
    machine, _ = subject.machine_for("H100", gpus_per_node=2)
    result = search.search(shape, machine, search.PlanRequest(dtype="bf16", isl=64, osl=64))
    assert {plan.layout.name for plan in result.plans} >= {"tp 2 pp 1", "tp 1 pp 2"}
    assert all(plan.bytes["request_state"] for plan in result.plans)

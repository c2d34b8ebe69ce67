# SPDX-License-Identifier: Apache-2.0
"""Sleep, wake-up and new weights of a running engine, over real ranks: every answer is of one set of weights, on all or none."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx import LLM, SamplingParams
from phalanx.engine.messages import ModelState
from phalanx.errors import EngineAsleep, ModelError, ModelNotFound, PhalanxError, RankDied, RequestError, WeightError
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import expected

pytestmark = pytest.mark.usefixtures("forked_python")

CHANGES = int(os.environ.get("PHALANX_MODEL_CHANGES", "10"))
"""Under load; acceptance: 100."""
COUNT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
PROMPTS = [list(range(3 + number, 43 + number)) for number in range(4)]  # longer than a block: the prefix cache has their beginning


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one model."""
    return [write_checkpoint(tmp_path_factory.mktemp("weights") / name, "llama", seed=seed) for seed, name in enumerate("ab")]


@pytest.fixture(scope="module")
def tokens(folders: list[Path]) -> list[list[list[int]]]:
    """By checkpoint, what each prompt is answered by."""
    both = [[expected(folder, prompt, COUNT) for prompt in PROMPTS] for folder in folders]
    assert all(a != b for a, b in zip(*both, strict=True))
    return both


@pytest.fixture(scope="module")
def llm(folders: list[Path]) -> Iterator[LLM]:
    with LLM(folders[0], tensor_parallel_size=2, device="cpu", max_seq_len=128, kv_cache_bytes=1 << 22) as running:
        yield running


@pytest.fixture
def on_a(llm: LLM, folders: list[Path]) -> LLM:
    """Awake, with the first weights."""
    llm.wake_up()
    llm.update_weights(folders[0])
    return llm


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def rank_bytes(llm: LLM, kind: str) -> list[int]:
    return [of_rank.get(kind, 0) for of_rank in llm.stats().rank_bytes.values()]


def test_weights_change_under_load_and_no_answer_is_a_mix(on_a: LLM, folders: list[Path], tokens: list[list[list[int]]]) -> None:
    changes, ended, faults, counts = CHANGES, threading.Event(), list[Any](), [0, 0]

    def ask(number: int) -> None:
        try:
            while not ended.is_set():
                answer = on_a.generate(PROMPTS[number], GREEDY).outputs[0].token_ids
                of = [checkpoint[number] for checkpoint in tokens].index(answer)
                counts[of] += 1
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    generation = on_a.update_weights(folders[0]).generation
    try:
        for number in range(1, changes + 1):
            state = on_a.update_weights(folders[number % 2])
            assert state.generation == generation + number
            assert answers(on_a) == tokens[number % 2], number
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    assert not faults, faults[0]
    assert min(counts) > 0


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_has_given_its_memory_back_and_wakes_as_it_was(
    on_a: LLM, folders: list[Path], tokens: list[list[list[int]]], level: int
) -> None:
    on_a.update_weights(folders[1])
    full = {kind: rank_bytes(on_a, kind) for kind in ("weights", "kv")}
    state = on_a.sleep(level)
    freed = sum(map(sum, full.values()))
    assert (state.level, state.weights, state.kv_cache) == (level, False, False)
    assert sum(state.bytes.values()) == pytest.approx(freed, rel=0.05)  # small buffers are no weights
    with pytest.raises(EngineAsleep, match="POST /wake_up"):
        answers(on_a)
    again = on_a.sleep(1)
    assert (again.level, again.bytes) == (level, {})
    woken = on_a.wake_up()
    assert (woken.level, sum(woken.bytes.values())) == (0, -sum(state.bytes.values()))
    assert answers(on_a) == tokens[1]


def test_weights_that_were_discarded_come_from_another_folder_before_the_kv_cache(
    on_a: LLM, folders: list[Path], tokens: list[list[list[int]]]
) -> None:
    """As a trainer does it: it needs the memory of the KV cache until the last moment."""
    on_a.sleep(2)
    state = on_a.update_weights(folders[1])
    assert (state.level, state.weights, state.kv_cache) == (2, True, False)
    with pytest.raises(EngineAsleep):
        answers(on_a)
    assert on_a.wake_up(["kv_cache"]).level == 0
    assert answers(on_a) == tokens[1]
    assert on_a.wake_up().bytes == {}  # nothing to do


def broken(folder: Path, copy: Path, how: str) -> Path:
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors") if how == "no weights" else None)
    config = json.loads((copy / "config.json").read_text())
    match how:
        case "sizes":
            config["intermediate_size"] //= 2
        case "quantized":
            config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        case "truncated":
            weights = (copy / "model.safetensors").read_bytes()
            (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        case "one tensor":
            from safetensors.torch import load_file, save_file

            tensors = load_file(copy / "model.safetensors")
            tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
            save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("sizes", ModelError, r"another model: intermediate_size is \d+; this one has \d+"),
        ("quantized", ModelError, "another model: quantization is"),
        ("no weights", WeightError, "holds no"),
        ("truncated", WeightError, "truncated or damaged"),
        ("one tensor", WeightError, r"model\.norm\.weight .* has shape"),
    ],
)
@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_that_cannot_be_used_leaves_the_old_weights(
    on_a: LLM, folders: list[Path], tokens: list[list[list[int]]], tmp_path: Path, how: str, error: type[PhalanxError], words: str,
    level: int,
) -> None:  # fmt: skip
    if level:
        on_a.sleep(level)
    with pytest.raises(error, match=rf"^rank 0.*{words}"):
        on_a.update_weights(broken(folders[1], tmp_path / "broken", how))
    on_a.wake_up()
    assert answers(on_a) == tokens[0]


def test_another_architecture_and_no_folder_are_refused(on_a: LLM, tokens: list[list[list[int]]], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="another model: architecture is 'Qwen3ForCausalLM'; this one has 'LlamaForCausalLM'"):
        on_a.update_weights(write_checkpoint(tmp_path / "qwen3", "qwen3"))
    with pytest.raises(ModelNotFound, match="is no folder on this host"):
        on_a.update_weights(tmp_path / "nothing")
    with pytest.raises(RequestError, match="a mix of old and new"):
        on_a.update_weights(tmp_path, mode="keep")
    with pytest.raises(RequestError, match="level=3"):
        on_a.sleep(3)
    with pytest.raises(RequestError, match="tag 'kv' is unknown"):
        on_a.wake_up(["kv"])
    assert answers(on_a) == tokens[0]


def test_running_requests_are_aborted_or_kept_as_asked(on_a: LLM, tokens: list[list[list[int]]], folders: list[Path]) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    complete = on_a.generate(PROMPTS[0], long).outputs[0].token_ids

    def while_it_runs(change: Any) -> tuple[Any, ModelState]:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(on_a.generate(PROMPTS[0], long).outputs[0]))
        before = on_a.stats().generation_tokens
        thread.start()
        while on_a.stats().generation_tokens < before + 3:
            pass
        state = change()
        if state.kept:
            assert not results
            with pytest.raises(RequestError, match="1 requests were kept"):
                on_a.update_weights(folders[1])
        on_a.wake_up()
        thread.join(60)
        return results[0], state

    output, state = while_it_runs(lambda: on_a.sleep(1, mode="keep"))
    assert (output.token_ids, output.finish_reason, state.kept) == (complete, "length", 1)
    output, state = while_it_runs(lambda: on_a.sleep(2, mode="abort"))
    assert (output.finish_reason, state.kept) == ("abort", 0)
    assert output.token_ids == complete[: len(output.token_ids)]
    output, _ = while_it_runs(lambda: on_a.update_weights(folders[1]))
    assert (output.token_ids, output.finish_reason) == (complete, "length")
    assert answers(on_a) == tokens[1]


def test_a_rank_killed_in_mid_change_is_named(on_a: LLM, folders: list[Path]) -> None:
    """The last test of this engine."""
    engine = psutil.Process(on_a._engine.client._child.pid)
    rank = next(child for child in engine.children(recursive=True) if child.cmdline()[0].strip() == "phalanx rank 1")
    rank.suspend()
    errors: list[BaseException] = []

    def update() -> None:
        try:
            on_a.update_weights(folders[1])
        except PhalanxError as error:
            errors.append(error)

    thread = threading.Thread(target=update)
    thread.start()
    time.sleep(0.5)
    rank.kill()
    thread.join(30)
    assert isinstance(errors[0], RankDied)
    assert "rank 1" in str(errors[0])

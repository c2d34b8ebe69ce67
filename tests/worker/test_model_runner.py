# SPDX-License-Identifier: Apache-2.0
"""One rank in this process: the runner's tokens and logprobs against transformers'."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch
import transformers

from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, Step, StepBatch, StepResult, StepRow
from phalanx.errors import EngineError
from phalanx.models import registry, weights
from phalanx.models.cache import empty_caches
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.slices import LayerContext
from phalanx.worker import memory_profile
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.sampler import Sampler
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import BLOCK, GREEDY, Drive, expected, prompts
from tests.support.worker_graphs import Stage

CPU = torch.device("cpu")


def make_runner(folder: Path, layers: range | None = None, pipe: object = None) -> ModelRunner:
    shape = ModelShape.from_folder(folder)
    model = registry.build(shape, layers or range(shape.num_layers), LayerContext(Solo(), torch.float32, CPU))
    weights.load(model, folder)
    caches = empty_caches(model.declared_caches(), 100, BLOCK, CPU)
    return ModelRunner(
        model, caches, select_backend(CPU, torch.float32, shape.head_dim), Sampler(4, shape.vocab_size, CPU), pipe or Solo(),  # type: ignore[arg-type]
        max_batch_size=4, max_seq_len=128, block_size=BLOCK, dtype=torch.float32, device=CPU,
    )  # fmt: skip


def drive(*stages: ModelRunner) -> Drive:
    results: deque[StepResult] = deque()

    def submit(step: Step) -> None:
        for stage in stages:
            rows, crc = stage.run(step.batches[0]).results()
            if stage is not stages[-1]:
                assert (rows, crc) == (None, None)
        assert rows is not None
        results.append(StepResult(step.number, [rows]))

    return Drive(submit, lambda: [results.popleft()] if results else [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("runner") / "llama", "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return make_runner(folder)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chunk", [64, 5])
def test_greedy_tokens_equal_transformers(folder: Path, runner: ModelRunner, chunk: int, ahead: bool) -> None:
    prompt_ids = prompts(4)
    assert drive(runner).generate(prompt_ids, 8, chunk=chunk, ahead=ahead) == [expected(folder, prompt, 8) for prompt in prompt_ids]


def test_stages_hand_on_the_residual_stream(folder: Path) -> None:
    lanes: list[deque[torch.Tensor]] = [deque(), deque()]
    first, second = (make_runner(folder, layers, Stage(i, lanes)) for i, layers in enumerate((range(2), range(2, 3))))
    prompt_ids = prompts(3, seed=2)
    assert drive(first, second).generate(prompt_ids, 6, chunk=7) == [expected(folder, prompt, 6) for prompt in prompt_ids]
    with pytest.raises(EngineError, match="before their last token is known"):
        first.run(StepBatch(admitted=[SlotAssignment(0, [5], 1, GREEDY, 1)], rows=[StepRow(0, 0, 1, [], [1], samples=True)]))


def test_prompt_logprobs_come_in_chunks_and_end_with_the_prompt(folder: Path, runner: ModelRunner) -> None:
    prompt = prompts(1, seed=4)[0]
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1)
    batches = drive(runner)
    cut, blocks = len(prompt) // 2, list(range(-(-len(prompt) // BLOCK)))
    known = -(-cut // BLOCK)
    first = batches.run(StepBatch(
        admitted=[SlotAssignment(1, prompt, len(prompt), params, 1), SlotAssignment(0, prompt[:3], 3, GREEDY, 1)],
        rows=[StepRow(1, 0, cut, prompt[:cut], blocks[:known]), StepRow(0, 0, 3, prompt[:3], [60], samples=True)],
    ))  # fmt: skip
    second = batches.run(StepBatch(rows=[StepRow(1, cut, len(prompt) - cut, prompt[cut:], blocks[known:], samples=True)]))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        raw = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    logprobs = first[0].prompt_logprobs + second[0].prompt_logprobs
    assert [entry.token for entry in logprobs] == prompt[1:]
    for position, entry in enumerate(logprobs):
        assert entry.logprob == pytest.approx(raw[position, prompt[position + 1]].item(), abs=1e-4)
        top = raw[position].topk(2)
        assert [token for token, _ in entry.top] == top.indices.tolist()
    assert first[1].prompt_logprobs == []
    assert first[0].tokens == []
    assert second[0].tokens[0] == raw[-1].argmax().item()
    assert len(second[0].logprobs) == 1
    assert second[0].logprobs[0].logprob == pytest.approx(raw[-1].max().item(), abs=1e-4)
    batches.run(StepBatch(released=[0, 1]))


def test_a_slot_begins_anew_with_each_admission(folder: Path, runner: ModelRunner) -> None:
    batches = drive(runner)
    first, second = prompts(2, seed=6)
    assert batches.generate([first], 3) == [expected(folder, first, 3)]
    assert batches.generate([second], 3) == [expected(folder, second, 3)]


def test_a_step_without_rows_yields_nothing(runner: ModelRunner) -> None:
    rows, crc = runner.run(StepBatch(released=[3])).results()
    assert rows == []
    assert crc == 0


def test_more_blocks_than_a_request_can_have_are_refused(runner: ModelRunner) -> None:
    with pytest.raises(EngineError, match="too many blocks: 33; max_seq_len needs 32 at most"):
        runner.run(
            StepBatch(admitted=[SlotAssignment(2, [5], 1, GREEDY, 1)], rows=[StepRow(2, 0, 1, [5], list(range(33)), samples=True)])
        )


def test_tokens_beyond_the_blocks_are_refused(runner: ModelRunner) -> None:
    with pytest.raises(EngineError, match="beyond their blocks"):
        runner.run(
            StepBatch(admitted=[SlotAssignment(2, [5] * 9, 9, GREEDY, 1)], rows=[StepRow(2, 0, 9, [5] * 9, [1, 2], samples=True)])
        )


def test_a_long_row_names_all_its_tokens(runner: ModelRunner) -> None:
    with pytest.raises(EngineError, match="only a decode row"):
        runner.run(StepBatch(admitted=[SlotAssignment(2, [5] * 4, 4, GREEDY, 1)], rows=[StepRow(2, 0, 4, [], [1], samples=True)]))


def test_the_steps_that_memory_is_measured_with_run_and_leave_the_slots_free(folder: Path) -> None:
    runner = make_runner(folder)
    steps = memory_profile.profiling_steps(max_num_tokens=64, max_seq_len=48, max_batch_size=4, block_size=BLOCK)
    assert [[row.count for row in step.rows] for step in (*steps[:2], steps[-1])] == [[48, 16], [1, 1, 1, 48], []]
    for step in steps:
        runner.run(step).results()
    prompt = prompts(1, seed=8)[0]
    assert drive(runner).generate([prompt], 4) == [expected(folder, prompt, 4)]

# SPDX-License-Identifier: Apache-2.0
"""Steps from graphs and eager steps find the same tokens as likely, where all are told which tokens come: on CPU with the kernels'
references in their place, on GPU with the kernels, and as the back end has it in eager steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, StepBatch, StepRow
from phalanx.worker.graph_buffers import GraphSize
from phalanx.worker.model_runner import ModelRunner
from tests.support.checkpoints import write_checkpoint
from tests.support.worker_graphs import kernels_backend
from tests.support.worker_profiled_runner import BLOCK, SLOTS, made_runner

CPU = torch.device("cpu")
REPORTING = SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=1)
TOKENS = 300


def steps(seed: int, count: int) -> list[StepBatch]:
    """Of up to TOKENS tokens: all slots go through texts of their own, by one token or by many, and begin anew."""
    chance, free, batches = random.Random(seed), list(range(399)), []
    texts: list[list[int]] = [[] for _ in range(SLOTS)]
    blocks: list[list[int]] = [[] for _ in range(SLOTS)]
    at = [0] * SLOTS
    for _ in range(count):
        rows, admitted, released, left = [], [], [], TOKENS - SLOTS
        most = chance.choice((3, 20, 130))
        for slot in chance.sample(range(SLOTS), chance.randint(1, SLOTS)):
            if at[slot] == len(texts[slot]):
                released += [slot] * bool(texts[slot])
                free, blocks[slot] = blocks[slot] + free, []
                texts[slot], at[slot] = [chance.randrange(3, 380) for _ in range(chance.randint(1, 200))], 0
                admitted.append(SlotAssignment(slot, texts[slot], len(texts[slot]), REPORTING, 1))
            begin = at[slot]
            end = at[slot] = min(len(texts[slot]), begin + (1 if chance.random() < 0.6 else chance.randint(1, min(most, left + 1))))
            left -= end - begin - 1
            new = [free.pop() for _ in range(-(-end // BLOCK) - len(blocks[slot]))]
            blocks[slot] += new
            rows.append(StepRow(slot, begin, end - begin, texts[slot][begin:end], new, samples=end == len(texts[slot])))
        rows.sort(key=lambda row: row.count > 1)
        batches.append(StepBatch(released=released, admitted=admitted, rows=rows))
    return batches


def watched(runner: ModelRunner) -> list[GraphSize]:
    """The sizes of the graphs that it will replay."""
    used: list[GraphSize] = []
    if runner.graphs is not None:
        replay = runner.graphs.replay

        def noted(size: GraphSize, *rest: Any) -> None:
            used.append(size)
            replay(size, *rest)

        runner.graphs.replay = noted  # type: ignore[method-assign, assignment]
    return used


def likelihoods(runner: ModelRunner, batches: list[StepBatch]) -> torch.Tensor:
    """Of the prompts' tokens, and of the most likely tokens that follow."""
    logprobs: list[float] = []
    for step in batches:
        for row in runner.run(step).results()[0] or []:
            logprobs += [entry.logprob for entry in row.prompt_logprobs]
            logprobs += [entry.logprob for entry in row.logprobs]
    return torch.tensor(logprobs)


def compare(
    folder: Path, device: torch.device, dtype: torch.dtype, off: float, *, count: int, backend_of: Any = None, **options: Any
) -> None:
    """Logprobs differ by `off` at most, and by a tenth of it as a rule."""
    batches = steps(4, count)
    assert 256 < max(sum(row.count for row in step.rows) for step in batches) <= TOKENS
    logprobs_of = []
    for graphs in (True, False):
        runner = made_runner(folder, device, dtype, graphs=graphs, tokens=TOKENS, attention=backend_of and backend_of(), **options)
        used = watched(runner)
        logprobs_of.append(likelihoods(runner, batches))
        assert len({size for size in used if size.prefill_rows}) >= (4 if graphs else 0)
        assert len(used) == (len(batches) if graphs else 0)
    assert len(logprobs_of[0]) > 30 * count
    assert not logprobs_of[0].isnan().any()
    apart = (logprobs_of[0] - logprobs_of[1]).abs()
    assert apart.max() < off
    assert apart.mean() < off / 10


CACHES = pytest.mark.parametrize("cache", [{}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}], ids=["model", "fp8", "int8"])


@pytest.mark.usefixtures("attention_by_reference")
@CACHES
def test_on_cpu(tmp_path: Path, cache: dict[str, bool]) -> None:
    folder = write_checkpoint(tmp_path / "mistral", "mistral", sliding_window=40, num_hidden_layers=1)
    compare(folder, CPU, torch.float32, 0.05 if cache else 1e-4, count=12, backend_of=kernels_backend, **cache)


@pytest.mark.gpu1
@CACHES
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_on_gpu(tmp_path: Path, family: str, cache: dict[str, bool]) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "std": 0.05}
    folder = write_checkpoint(tmp_path / family, family, **sizes, **({"sliding_window": 40} if family == "mistral" else {}))
    compare(folder, torch.device("cuda", 0), torch.bfloat16, 0.2, count=60, **cache)

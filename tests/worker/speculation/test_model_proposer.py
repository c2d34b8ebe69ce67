# SPDX-License-Identifier: Apache-2.0
"""Drafts of a language model, through scheduler, runner and graphs' buffers on CPU. Whatever it drafts, each request gets what it
gets without drafts. The target itself drafts what is accepted without exception: so its keys and values are there for each token,
across chunks of prompts, prefix hits, preemptions, blocks and numbers of drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.limits import depth_of
from phalanx.engine.messages import AddRequest, SlotAssignment, StepBatch, StepRow
from phalanx.models import registry, weights
from phalanx.models.slices import LayerContext
from phalanx.worker.graph_buffers import graph_sizes
from phalanx.worker.speculation.draft_model import DraftModel
from phalanx.worker.speculation.model_proposer import Lanes, ModelProposer
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import BLOCK
from tests.support.worker_drafts import K, Remainders, Together, draw_requests, pipeline_of, require_alike
from tests.support.worker_graphs import CPU, SLOTS, TOKENS, Steps, kernels_backend, serve, step_runner

pytestmark = pytest.mark.usefixtures("attention_by_reference")

FAMILIES = {"llama": {"num_hidden_layers": 3}, "small": {"num_hidden_layers": 1, "seed": 5}, "mistral": {"num_hidden_layers": 2}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("draft_models")
    return {name: write_checkpoint(parent / name, "llama" if name == "small" else name, **more) for name, more in FAMILIES.items()}


def drafting(folder: Path, group: Group | None = None) -> dict[str, Any]:
    """Of a runner of the last stage."""
    shape = ModelShape.from_folder(folder)
    model = registry.build(shape, range(shape.num_layers), LayerContext(group or Solo(), torch.float32, CPU))
    weights.load(model, folder)
    sizes: dict[str, Any] = {"slots": SLOTS, "max_rows": SLOTS, "max_seq_len": 128, "block_size": BLOCK}
    proposer = ModelProposer(DraftModel(model), kernels_backend(), **sizes, dtype=torch.float32, device=CPU)
    return {"max_drafts": K, "proposer": proposer}


def greedy_requests(seed: int, count: int = 12) -> list[tuple[int, AddRequest]]:
    """Prompts of one to 100 tokens, some of which begin alike; some stop at a token."""
    chance, shared = random.Random(seed), [random.Random(9).randrange(3, 380) for _ in range(24)]
    arrivals = []
    for number in range(count):
        prompt = shared[: chance.choice((0, 9, 24))] + [chance.randrange(3, 380) for _ in range(chance.randint(1, 26))]
        params = SamplingParams(temperature=0.0, max_tokens=chance.randint(6, 40))
        stops = [chance.randrange(3, 380) for _ in range(8)] if number % 3 == 0 else [381]
        arrivals.append((chance.randrange(12), AddRequest(str(number), prompt * (2 if number == 5 else 1), params, stops)))
    return sorted(arrivals, key=lambda each: each[0])


@pytest.mark.parametrize(("draft", "graphs"), [("small", False), ("llama", True)])
def test_drafts_change_no_answer(folders: dict[str, Path], draft: str, graphs: bool) -> None:
    """Of requests of every kind; also where blocks run out."""
    arrivals = draw_requests(0)
    wanted, _ = serve([step_runner(folders["llama"], None)], arrivals, open_matcher=Remainders)
    runner = step_runner(folders["llama"], Steps() if graphs else None, **drafting(folders[draft]))
    updates, scheduler = serve(
        [runner], arrivals, open_matcher=Remainders, max_drafts=K, drafts_keep_kv=True, num_blocks=24 if draft == "small" else 100
    )
    require_alike(updates, wanted)
    stats = scheduler.stats()
    assert stats.draft_tokens > 100
    assert stats.prefix_hits > 0
    assert (stats.preemptions > 0) == (draft == "small")
    rate = sum(stats.accepted_tokens) / stats.draft_tokens
    assert rate < 0.05 if draft == "small" else rate > 0.25, rate


@pytest.mark.parametrize(("deep", "graphs"), [(True, True), (False, False)], ids=["always", "now and then"])
def test_all_drafts_of_the_target_itself_are_accepted(folders: dict[str, Path], deep: bool, graphs: bool) -> None:
    """Also behind steps that propose none, or fewer."""
    arrivals, chance = greedy_requests(3), random.Random(1)
    wanted, _ = serve([step_runner(folders["llama"], None)], arrivals)
    runner = step_runner(folders["llama"], Steps() if graphs else None, **drafting(folders["llama"]))
    choose = None if deep else lambda _: chance.choice([0, 0, 1, 2, 3, 4])
    updates, scheduler = serve([runner], arrivals, choose, max_drafts=K, drafts_keep_kv=True, num_blocks=100)
    require_alike(updates, wanted)
    stats = scheduler.stats()
    assert stats.prefix_hits > 0
    assert sum(stats.accepted_tokens) == stats.draft_tokens > (200 if deep else 50)


def test_all_drafts_of_the_target_itself_are_accepted_behind_a_preemption(folders: dict[str, Path]) -> None:
    """Drafts for which there is no block are none: those that remain are right."""
    arrivals = greedy_requests(4)
    wanted, _ = serve([step_runner(folders["llama"], None)], arrivals)
    runner = step_runner(folders["llama"], Steps(), **drafting(folders["llama"]))
    updates, scheduler = serve([runner], arrivals, max_drafts=K, drafts_keep_kv=True, num_blocks=30)
    require_alike(updates, wanted)
    stats = scheduler.stats()
    assert stats.preemptions > 0
    assert sum(stats.accepted_tokens) == stats.draft_tokens > 50


@pytest.mark.parametrize(("target", "draft", "window"), [("llama", "mistral", None), ("mistral", "small", None)])
def test_either_model_may_have_windows(folders: dict[str, Path], target: str, draft: str, window: int | None) -> None:
    arrivals = greedy_requests(5, 6)
    wanted, _ = serve([step_runner(folders[target], None)], arrivals, windows=(window,))
    runner = step_runner(folders[target], Steps(), **drafting(folders[draft]))
    updates, _ = serve([runner], arrivals, windows=(window,), max_drafts=K, drafts_keep_kv=True)
    require_alike(updates, wanted)


@pytest.mark.parametrize("returns", [False, True])
def test_the_last_stage_drafts(folders: dict[str, Path], returns: bool) -> None:
    arrivals = greedy_requests(6)
    wanted, _ = serve([step_runner(folders["llama"], None)], arrivals)
    runners = pipeline_of(folders["llama"], [range(1), range(1, 3)], drafting(folders["llama"]), returns=returns)
    updates, scheduler = serve(
        runners, arrivals, max_drafts=K, drafts_keep_kv=True, returns_tokens=returns, num_blocks=100,
        depth=depth_of(2, returns_tokens=returns),
    )  # fmt: skip
    require_alike(updates, wanted)
    stats = scheduler.stats()
    assert sum(stats.accepted_tokens) == stats.draft_tokens > 100


def test_tensor_parallel_ranks_draft_together(folders: dict[str, Path]) -> None:
    arrivals, world = greedy_requests(7), LocalWorld(2)
    wanted, _ = serve([step_runner(folders["llama"], None)], arrivals)
    runners = world.run(lambda group: step_runner(folders["llama"], Steps(), group=group, **drafting(folders["llama"], group)))
    updates, scheduler = serve([Together(world, runners)], arrivals, max_drafts=K, drafts_keep_kv=True, num_blocks=100)  # type: ignore[list-item]
    require_alike(updates, wanted)
    stats = scheduler.stats()
    assert sum(stats.accepted_tokens) == stats.draft_tokens > 100


def test_slots_of_blocks_far_behind_are_not_cut_to_32_bits() -> None:
    lanes, block = Lanes(2, 4, torch.float32, CPU), 2**31 - 1
    lanes.capacities[:], lanes.positions[:] = 2 * BLOCK, torch.tensor([BLOCK, 2 * BLOCK])
    tables = torch.tensor([[0, block]], dtype=torch.int32)
    batch = lanes.batch(2, tables, BLOCK, fixed=True)
    assert batch.kv_slots.tolist() == [block * BLOCK, -1]


def test_its_passes_are_captured_for_each_size_of_a_step(folders: dict[str, Path]) -> None:
    capturer = Steps()
    runner = step_runner(folders["llama"], capturer, **drafting(folders["small"]))
    assert runner.graphs is not None
    decodes, sizes = graph_sizes(SLOTS * (1 + K), 0)[0], runner.graphs.sizes
    passes = {min(size.decode_rows, SLOTS) for size in decodes}
    assert capturer.recorded == runner.graphs.count == 2 * len(sizes) + len(passes)
    prompt = list(range(5, 12))
    admitted = [SlotAssignment(2, prompt, 7, SamplingParams(temperature=0.0), 1)]
    rows = [StepRow(2, 0, 7, prompt, [4, 7, 9], samples=True)]
    capturer.replays.clear()
    runner.run(StepBatch(admitted=admitted, rows=rows, propose=K)).results()
    assert sorted(capturer.replays.values()) == [1, 1, K], "the step, what takes its tokens in, and a pass for each draft"
    runner.graphs.reset()
    before = capturer.recorded
    runner.run(StepBatch(rows=[StepRow(2, 7 + K, 1 + K, [], [11], samples=True, drafts=K, late=K)], propose=K)).results()
    assert len(list(runner.capture())) == len(sizes)
    assert capturer.recorded == 2 * before
    assert TOKENS in {size.tokens for size in sizes}

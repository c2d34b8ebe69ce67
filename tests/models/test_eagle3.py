# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads in the published formats draft what plain torch makes of the same tensors, behind prompts in one chunk and in
several, behind accepted drafts, on one rank and on two; and whatever they draft, requests get what they get without."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.limits import depth_of
from phalanx.engine.messages import SlotAssignment, StepBatch, StepRow
from phalanx.errors import WeightError
from phalanx.kernels.speculation.drafts import DRAFTS
from phalanx.layout.eagle3 import Eagle3
from phalanx.models import registry, weights
from phalanx.models.eagle3 import Eagle3Head, head_tensors
from phalanx.models.slices import LayerContext
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.speculation.model_proposer import ModelProposer
from tests.support.checkpoints import write_checkpoint
from tests.support.eagle3_heads import reference_drafts, write_head
from tests.support.engine_drive import BLOCK
from tests.support.worker_drafts import K, Remainders, Staged, Together, draw_requests, pipeline_of, require_alike
from tests.support.worker_graphs import CPU, SLOTS, Steps, kernels_backend, serve, step_runner

pytestmark = pytest.mark.usefixtures("attention_by_reference")

LAYERS = 7
"""Of the target: the published default of inner states is then before layers 2, 3 and 4."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=LAYERS, std=0.2)


def drafting(target: Path, folder: Path, group: Group | None = None, first: int = 0) -> dict[str, Any]:
    """Of a runner of the target, or of its last stage, of the layers from `first` on."""
    shape, context = ModelShape.from_folder(target), LayerContext(group or Solo(), torch.float32, CPU, last_embeds=True)
    model = registry.build(shape, range(first, shape.num_layers), context)
    weights.load(model, target)
    assert model.embed_tokens is not None
    head = Eagle3.from_folder(folder, shape).with_embedding("embed_tokens.weight" in head_tensors(folder))
    drafter = Eagle3Head(head, model.embed_tokens, context)
    drafter.load(folder)
    sizes: dict[str, Any] = {"slots": SLOTS, "max_rows": SLOTS, "max_seq_len": 128, "block_size": BLOCK}
    proposer = ModelProposer(drafter, kernels_backend(), **sizes, dtype=torch.float32, device=CPU)
    return {"max_drafts": K, "proposer": proposer}


def drafted(runner: ModelRunner, prompt: list[int], chunks: list[int]) -> tuple[list[int], list[list[int]]]:
    """The tokens of a request, prompt and output, and the drafts behind its first one, and behind the next."""
    blocks, begin, drafts = iter(range(3, 90)), 0, []
    admitted = [SlotAssignment(2, prompt, len(prompt), SamplingParams(temperature=0.0), 1)]
    needed = -(-(len(prompt) + 3 * K) // BLOCK)
    for count in chunks:
        end = begin + count
        new = [next(blocks) for _ in range(needed)] if not begin else []
        row = StepRow(2, begin, count, prompt[begin:end], new, samples=end == len(prompt))
        ((result,), _) = runner.run(StepBatch(admitted=admitted, rows=[row], propose=K)).results()
        begin, admitted = end, []
    tokens = prompt + result.tokens
    drafts.append(runner._state[DRAFTS:, 2].tolist())
    row = StepRow(2, len(prompt) + K, 1 + K, [], samples=True, drafts=K, late=K)
    ((result,), _) = runner.run(StepBatch(rows=[row], propose=K)).results()
    drafts.append(runner._state[DRAFTS:, 2].tolist())
    return tokens + result.tokens, drafts


PROMPT = [5, 9, 200, 7, 11, 42, 99, 3, 250, 8, 17]
FORMS = {
    "specforge": ({"ids": [1, 2, 3]}, (2, 3, 4)),
    "safeailab": ({"ids": None}, (2, 3, 4)),
    "nvidia": ({"ids": [2, 4, 6], "norm_before_fc": True}, (2, 4, 6)),
    "speculators": ({"form": "speculators", "ids": [1, 3, 5], "norm_before_residual": True}, (1, 3, 5)),
    "another width": ({"hidden": 32, "target_hidden_size": 48, "embedding": True}, (2, 3, 4)),
    "eagle3.1": ({"norm_output": True, "embedding": True, "drafted": 384}, (2, 3, 4)),
}


@pytest.mark.parametrize(("form", "chunks", "graphs"), [
    ("specforge", [11], False), ("safeailab", [4, 1, 6], True), ("nvidia", [11], True), ("speculators", [8, 3], False),
    ("another width", [7, 4], True),
    ("eagle3.1", [11], True),
])  # fmt: skip
def test_drafts_are_those_of_the_reference(target: Path, tmp_path: Path, form: str, chunks: list[int], graphs: bool) -> None:
    traits, layers = FORMS[form]
    folder = write_head(tmp_path, **traits)  # type: ignore[arg-type]
    runner = step_runner(target, Steps() if graphs else None, **drafting(target, folder))
    tokens, (first, second) = drafted(runner, PROMPT, chunks)
    assert first == reference_drafts(folder, target, tokens[: len(PROMPT) + 1], layers, K)
    assert second == reference_drafts(folder, target, tokens, layers, K)


@pytest.mark.parametrize(("form", "cuts", "graphs"), [("specforge", [3], True), ("nvidia", [3, 5], True), ("eagle3.1", [6], False)])
def test_stages_bring_inner_states_to_the_head(target: Path, tmp_path: Path, form: str, cuts: list[int], graphs: bool) -> None:
    """Which is on the last stage. Prompts come in chunks."""
    traits, layers = FORMS[form]
    folder = write_head(tmp_path, **traits)  # type: ignore[arg-type]
    stages = [range(first, end) for first, end in itertools.pairwise([0, *cuts, LAYERS])]
    last = drafting(target, folder, first=cuts[-1])
    runners = pipeline_of(target, stages, last, returns=True, graphs=graphs, inner_layers=last["proposer"].inner_layers)
    tokens, (first, second) = drafted(Staged(runners), PROMPT, [4, 7])  # type: ignore[arg-type]
    assert first == reference_drafts(folder, target, tokens[: len(PROMPT) + 1], layers, K)
    assert second == reference_drafts(folder, target, tokens, layers, K)


def test_ranks_share_a_head(target: Path, tmp_path: Path) -> None:
    folder, world = write_head(tmp_path), LocalWorld(2)
    runners = world.run(lambda group: step_runner(target, None, group=group, **drafting(target, folder, group)))
    outputs = world.run(lambda group: drafted(runners[group.rank], PROMPT, [11]))
    tokens, (first, second) = outputs[0]
    assert outputs[1] == outputs[0]
    assert first == reference_drafts(folder, target, tokens[: len(PROMPT) + 1], (2, 3, 4), K)
    assert second == reference_drafts(folder, target, tokens, (2, 3, 4), K)


def test_a_prefix_hit_has_keys_and_values_of_the_head(target: Path, tmp_path: Path) -> None:
    """Blocks 3 and 4 have eight tokens of another request, which goes on with the same one."""
    folder = write_head(tmp_path)
    runner = step_runner(target, Steps(), **drafting(target, folder))
    drafted(runner, PROMPT, [11])
    prompt = [*PROMPT[:9], 77, 123, 4]
    admitted = [SlotAssignment(5, prompt, len(prompt), SamplingParams(temperature=0.0), 1)]
    row = StepRow(5, 8, 4, prompt[8:], [3, 4, 90, 91, 92], samples=True)
    ((result,), _) = runner.run(StepBatch(admitted=admitted, rows=[row], propose=K)).results()
    assert runner._state[DRAFTS:, 5].tolist() == reference_drafts(folder, target, prompt + result.tokens, (2, 3, 4), K)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_a_head_changes_no_answer(target: Path, tmp_path: Path, tp: int, pp: int) -> None:
    """Requests of every kind, where blocks run out, and where prefixes are shared. The head is random: nothing is accepted."""
    arrivals, world, folder = draw_requests(0), LocalWorld(2), write_head(tmp_path)
    wanted, _ = serve([step_runner(target, None)], arrivals, open_matcher=Remainders)
    stages = {"depth": depth_of(2, returns_tokens=True), "returns_tokens": True} if pp > 1 else {}
    if pp > 1:
        last = drafting(target, folder, first=3)
        runners: Any = pipeline_of(target, [range(3), range(3, LAYERS)], last, returns=True, inner_layers=(2, 3, 4))
    elif tp == 1:
        runners = [step_runner(target, Steps(), **drafting(target, folder))]
    else:
        each = world.run(lambda group: step_runner(target, None, group=group, **drafting(target, folder, group)))
        runners = [Together(world, each)]
    updates, scheduler = serve(
        runners, arrivals, open_matcher=Remainders, max_drafts=K, drafts_keep_kv=True, num_blocks=24, **stages
    )  # fmt: skip
    require_alike(updates, wanted)
    stats = scheduler.stats()
    assert stats.draft_tokens > 100
    assert stats.prefix_hits > 0 < stats.preemptions
    assert sum(stats.accepted_tokens) < 0.03 * stats.draft_tokens


def test_its_passes_are_captured(target: Path, tmp_path: Path) -> None:
    """The first draft comes with the step's tokens, so that there is one pass less than drafts."""
    capturer = Steps()
    runner = step_runner(target, capturer, **drafting(target, write_head(tmp_path)))
    assert runner.graphs is not None
    assert capturer.recorded == runner.graphs.count
    capturer.replays.clear()
    drafted(runner, PROMPT, [11])
    assert sum(capturer.replays.values()) == 2 * (2 + K - 1)


def test_what_a_checkpoint_has_is_checked(target: Path, tmp_path: Path) -> None:
    shape, context = ModelShape.from_folder(target), LayerContext(Solo(), torch.float32, CPU)
    model = registry.build(shape, range(shape.num_layers), context)
    assert model.embed_tokens is not None
    folder = write_head(tmp_path, norm_before_fc=True)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"norm_before_fc": true', '"norm_before_fc": false'))
    with pytest.raises(WeightError, match=r"input_norm\.weight"):
        Eagle3Head(Eagle3.from_folder(folder, shape), model.embed_tokens, context).load(folder)

# SPDX-License-Identifier: Apache-2.0
"""Steps that verify drafts, through scheduler, runner, sampler and graphs' buffers on CPU: whoever proposes, each request gets the
tokens and log probabilities that it gets without drafts."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.limits import depth_of
from phalanx.engine.messages import AddRequest, RequestUpdate, SlotAssignment, StepBatch, StepRow
from phalanx.worker.memory_profile import profiling_steps
from phalanx.worker.speculation.ngram import NgramProposer
from phalanx.worker.speculation.proposer import SampledRows
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import BLOCK
from tests.support.worker_drafts import (
    K,
    KnownAnswers,
    Remainders,
    Together,
    answers_of,
    draw_requests,
    key_of,
    pipeline_of,
    require_alike,
)
from tests.support.worker_graphs import CPU, SLOTS, TOKENS, Stage, Steps, serve, step_runner

pytestmark = pytest.mark.usefixtures("attention_by_reference")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("drafts")
    return {family: write_checkpoint(parent / family, family, num_hidden_layers=3) for family in ("llama", "mistral")}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Any:
    """Requests and what they get without drafts, by seed."""
    runs: dict[int, Any] = {}

    def of(seed: int) -> tuple[list[tuple[int, AddRequest]], dict[str, list[RequestUpdate]], dict[tuple[Any, ...], list[int]]]:
        if seed not in runs:
            arrivals = draw_requests(seed)
            updates, _ = serve([step_runner(folders["llama"], None)], arrivals, open_matcher=Remainders)
            runs[seed] = arrivals, updates, answers_of(arrivals, updates)
        result: tuple[Any, Any, Any] = runs[seed]
        return result

    return of


def drafting(answers: dict[tuple[Any, ...], list[int]], luck: float = 0.7, seed: int = 0) -> dict[str, Any]:
    """Of a runner of the last stage."""
    return {"max_drafts": K, "proposer": KnownAnswers(answers, luck, seed)}


@pytest.mark.parametrize("luck", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_change_no_answer(folders: dict[str, Path], plain: Any, graphs: bool, luck: float) -> None:
    """Also where blocks run out."""
    preemptions = 0
    for seed in range(2):
        arrivals, wanted, answers = plain(seed)
        capturer = Steps() if graphs else None
        runner = step_runner(folders["llama"], capturer, **drafting(answers, luck, seed))
        updates, scheduler = serve([runner], arrivals, open_matcher=Remainders, max_drafts=K, num_blocks=[24, 100][seed])
        require_alike(updates, wanted)
        stats = scheduler.stats()
        preemptions += stats.preemptions
        assert stats.draft_tokens > 0
        assert luck == 0.6 or (sum(stats.accepted_tokens) == 0) == (luck == 0.0)
        assert stats.prefix_hits > 0
    assert preemptions


def test_the_number_of_drafts_may_change_from_step_to_step(folders: dict[str, Path], plain: Any) -> None:
    arrivals, wanted, answers = plain(0)
    chance, numbers = random.Random(1), set[tuple[int, bool]]()
    runner = step_runner(folders["llama"], Steps(), **drafting(answers))
    run = runner.run

    def noted(step: StepBatch) -> Any:
        numbers.update((row.drafts, row.late > 0) for row in step.rows if row.decodes)
        return run(step)

    runner.run = noted  # type: ignore[method-assign]
    choose = lambda _: chance.choice([0, 0, 1, 2, 3, 4])  # noqa: E731
    updates, _ = serve([runner], arrivals, choose, Remainders, max_drafts=K)
    require_alike(updates, wanted)
    assert numbers >= {(drafts, late) for drafts in (0, 1, 4) for late in (False, True)}


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("stages", "returns"), [(2, False), (2, True), (3, True), (3, False)])
def test_stages_verify_drafts(folders: dict[str, Path], plain: Any, stages: int, returns: bool, graphs: bool) -> None:
    """Whether the engine must know tokens and drafts, or they return on the device."""
    arrivals, wanted, answers = plain(0)
    layers = [range(stage, stage + 1 if stage < stages - 1 else 3) for stage in range(stages)]
    runners = pipeline_of(folders["llama"], layers, drafting(answers), returns=returns, graphs=graphs)
    depth = depth_of(stages, returns_tokens=returns)
    updates, scheduler = serve(runners, arrivals, None, Remainders, max_drafts=K, returns_tokens=returns, depth=depth)
    require_alike(updates, wanted)
    assert sum(scheduler.stats().accepted_tokens) > 20


def test_tensor_parallel_ranks_accept_the_same_drafts(folders: dict[str, Path], plain: Any) -> None:
    arrivals, wanted, answers = plain(0)
    world = LocalWorld(2)
    runners = world.run(lambda group: step_runner(folders["llama"], Steps(), group=group, **drafting(answers)))
    updates, scheduler = serve([Together(world, runners)], arrivals, None, Remainders, max_drafts=K)  # type: ignore[list-item]
    require_alike(updates, wanted)
    assert sum(scheduler.stats().accepted_tokens) > 20


def test_a_window_forgets_no_accepted_token(folders: dict[str, Path]) -> None:
    arrivals = draw_requests(4)
    wanted, _ = serve([step_runner(folders["mistral"], None)], arrivals, None, Remainders, windows=(8,))
    answers = answers_of(arrivals, wanted)
    updates, _ = serve(
        [step_runner(folders["mistral"], Steps(), **drafting(answers))], arrivals, None, Remainders, windows=(8,), max_drafts=K
    )
    require_alike(updates, wanted)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_predicted_output_changes_no_token(folders: dict[str, Path], plain: Any, graphs: bool) -> None:
    """Half of the requests predict what they get, the others what another one gets. Blocks run out."""
    arrivals, wanted, _ = plain(0)
    outputs = {name: [token for update in updates for token in update.tokens] for name, updates in wanted.items()}
    others = dict(zip(outputs, [*list(outputs.values())[1:], *list(outputs.values())[:1]], strict=True))
    predicted, accepted = [], dict[bool, int]()
    for number, (turn, add) in enumerate(arrivals):
        prediction = others[add.request_id] if number % 2 else outputs[add.request_id]
        params = msgspec.structs.replace(add.params, prediction=prediction)
        predicted.append((turn, msgspec.structs.replace(add, params=params)))
    for longest in (0, 64):
        proposer = NgramProposer(SLOTS, 128, least=2, most=3, device=CPU, max_prediction=longest)
        runner = step_runner(folders["llama"], Steps() if graphs else None, max_drafts=K, proposer=proposer)
        updates, scheduler = serve([runner], predicted, open_matcher=Remainders, max_drafts=K, num_blocks=24)
        require_alike(updates, wanted)
        stats = scheduler.stats()
        accepted[longest] = sum(stats.accepted_tokens)
        assert sum(update.accepted for each in updates.values() for update in each) == accepted[longest]
        drafts = sum(update.accepted + update.rejected for each in updates.values() for update in each)
        assert drafts == stats.draft_tokens
        assert stats.preemptions
    right = sum(len(outputs[add.request_id]) for _, add in arrivals[::2])
    assert accepted[64] > 0.6 * right > 3 * accepted[0]


@pytest.mark.parametrize("longest", [8, 128])
def test_memory_is_measured_with_drafts(folders: dict[str, Path], longest: int) -> None:
    """Rows that verify drafts are among the steps of the start, unless no request is long enough; all slots are free again."""
    proposer = NgramProposer(SLOTS, longest, least=1, most=3, device=CPU)
    runner = step_runner(folders["llama"], None, longest=longest, max_drafts=K, proposer=proposer)
    steps = profiling_steps(max_num_tokens=TOKENS, max_seq_len=longest, max_batch_size=SLOTS, block_size=BLOCK, max_drafts=K)
    for step in steps:
        runner.run(step).results()
    rows = [[row for row in step.rows if row.drafts] for step in steps]
    assert max(map(len, rows)) == (SLOTS if longest == 128 else 0)
    assert not runner._sampler._state.occupied.any()  # type: ignore[union-attr]


def test_memory_is_measured_with_drafts_over_recurrent_states(tmp_path: Path) -> None:
    """The steps of the start begin anywhere, over slots whose states are elsewhere: no other memory is read or written."""
    folder = write_checkpoint(tmp_path / "qwen3_next", "qwen3_next")
    proposer = NgramProposer(SLOTS, 2048, least=1, most=3, device=CPU)
    runner = step_runner(folder, None, longest=2048, max_drafts=K, proposer=proposer)
    groups = runner._model.cache_groups
    steps = profiling_steps(
        max_num_tokens=TOKENS, max_seq_len=2048, max_batch_size=SLOTS, block_size=BLOCK, max_drafts=K, groups=groups
    )
    for step in steps:
        runner.run(step).results()
    assert not runner._sampler._state.occupied.any()  # type: ignore[union-attr]


class ReadsInner(KnownAnswers):
    """Keeps the inner states of the last step."""

    inner_layers = (3, 1)

    def propose(self, rows: SampledRows, count: int) -> Tensor | None:
        assert rows.inner is not None
        assert len(rows.inner) == rows.tokens
        self.states = rows.inner.clone()
        return super().propose(rows, count)


class RemembersInner(KnownAnswers):
    """Keeps the inner states of each token, by its slot and position."""

    inner_layers = (1, 0, 3)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.states: dict[tuple[int, int], Tensor] = {}

    def propose(self, rows: SampledRows, count: int) -> Tensor | None:
        assert rows.inner is not None
        starts = rows.batch.query_starts.tolist()
        assert rows.batch.table_rows is not None
        for slot, begin, end in zip(rows.batch.table_rows.tolist(), starts, starts[1:], strict=False):
            for token in range(begin, min(end, rows.tokens)):
                self.states[slot, int(rows.batch.positions[token])] = rows.inner[token].clone()
        return super().propose(rows, count)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_inner_states_travel_from_stage_to_stage(folders: dict[str, Path], plain: Any, stages: int, graphs: bool) -> None:
    """Those of prompts in chunks, of drafts and of decode rows are as on one stage, where both schedules compute a token last."""
    arrivals, wanted, answers = plain(0)
    states_by_stages = []
    for count in (1, stages):
        layers = [range(stage, stage + 1 if stage < count - 1 else 3) for stage in range(count)]
        last = drafting(answers) | {"proposer": (proposer := RemembersInner(answers, 1.0, 0))}
        runners = pipeline_of(folders["llama"], layers, last, returns=count > 1, graphs=graphs, inner_layers=(1, 0, 3))
        depth = depth_of(count, returns_tokens=True)
        more = {"returns_tokens": True} if count > 1 else {}
        updates, _ = serve(runners, arrivals[:1], None, Remainders, max_drafts=K, depth=depth, **more)
        require_alike(updates, {arrivals[0][1].request_id: wanted[arrivals[0][1].request_id]})
        states_by_stages.append(proposer.states)
    one, several = states_by_stages
    assert len(one) > 20
    assert one.keys() <= several.keys()
    length = len(arrivals[0][1].token_ids) + len([token for update in wanted[arrivals[0][1].request_id] for token in update.tokens])
    for (slot, position), states in one.items():
        if position < length - 1:  # drafts behind the end may differ
            torch.testing.assert_close(several[slot, position], states, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_proposer_may_read_inner_states(folders: dict[str, Path], tp: int, graphs: bool) -> None:
    """Before layer 1 they are what a stage of one layer sends; before layer 3, the end, what a stage of three would."""
    prompt = [5, 9, 200, 7, 11]
    batch = StepBatch(
        admitted=[SlotAssignment(2, prompt, 5, SamplingParams(temperature=0.0), 1)],
        rows=[StepRow(2, 0, 5, prompt, [4, 7], samples=True)], propose=1,
    )  # fmt: skip
    answers = {key_of(prompt, batch.admitted[0].params): [3] * 4}
    world = LocalWorld(tp)

    def states(group: Group) -> Tensor:
        proposer = ReadsInner(answers, 1.0)
        runner = step_runner(folders["llama"], Steps() if graphs else None, group=group, max_drafts=K, proposer=proposer)
        runner.run(batch).results()
        return proposer.states

    lanes: list[deque[Tensor]] = [deque(), deque()]
    wanted: list[Tensor] = []
    for layers in (range(3), range(1)):
        stage = step_runner(folders["llama"], None, layers, Stage(0, lanes))
        stage._model.norm = stage._model.lm_head = None
        stage.run(batch).results()
        wanted.append(lanes[1].pop())
    for each in world.run(states):
        torch.testing.assert_close(each, torch.cat(wanted, 1), rtol=1e-3, atol=1e-4)

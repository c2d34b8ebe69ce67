# SPDX-License-Identifier: Apache-2.0
"""Steps of any rows from graphs, on CPU (see test_graphs): what a scheduler makes of random requests gives the tokens that eager
steps give. The back end is the kernels', with the kernels' references in their place."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.config.sampling import SamplingParams
from phalanx.engine.messages import Add, Admission, Row, StepBatch, StepResult, Update
from phalanx.engine.ranks.graphs import StepGraphs
from phalanx.engine.ranks.places import Size, sizes
from phalanx.engine.ranks.ready import budget
from phalanx.engine.runner import Runner
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.kernels.attention import reference
from phalanx.models.batch import Batch
from phalanx.models.layers import attention_decode
from phalanx.models.layers.attention_decode import DecodeBackend, DecodePlan
from phalanx.models.layers.attention_sdpa import SdpaBackend
from phalanx.plan import graphs as plan_graphs
from tests.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.engine.drive import BLOCK, GREEDY, expected, prompts
from tests.engine.ranks.test_graphs import BLOCKS, CPU, ROWS, SLOTS, Counting, drive, held, make_runner
from tests.engine.test_runner import Pipe

TOKENS = 80
"""Of a step: so there are graphs of 32, 64 and 80."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("steps")
    return {family: write_checkpoint(parent / family, family, num_hidden_layers=3) for family in ("llama", "mistral")}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    put_references(monkeypatch)


def put_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the kernels of attention."""
    hints = "workspace", "short", "pieces", "early_lengths", "tiles"

    def decode(query: Tensor, *inputs: Any, out: Tensor, **options: Any) -> Tensor:
        asked = {name: given for name, given in options.items() if name not in hints}
        return out.copy_(reference.decode_attention(query, *inputs, **asked))

    def prefill(query: Tensor, *inputs: Any, **options: Any) -> Tensor:
        asked = {name: given for name, given in options.items() if name not in hints}
        return reference.prefill_attention(query, *inputs, **asked)

    monkeypatch.setattr(attention_decode.kernels, "decode_attention", decode)
    monkeypatch.setattr(attention_decode.kernels, "prefill_attention", prefill)


class Steps(Counting):
    """sized: how often was replayed, by size."""

    def __init__(self, tokens: int = TOKENS, rows: int = SLOTS) -> None:
        super().__init__()
        order = [size for kind in sizes(rows, tokens) for size in kind[::-1]]
        self.of = dict(enumerate(order))

    @property
    def sized(self) -> Counter[Size]:
        return Counter({self.of[number]: count for number, count in self.replays.items()})

    @property
    def mixed(self) -> dict[int, int]:
        """Of any rows, by tokens."""
        return {size.tokens: count for size, count in self.sized.items() if size.prompts}


def kernels_backend() -> DecodeBackend:
    return DecodeBackend(SdpaBackend(), CPU, "e4m3")


def step_runner(folder: Path, tape: Counting | None, layers: range | None = None, pipe: object = None, **options: Any) -> Runner:
    return make_runner(folder, tape, layers, pipe, attention=kernels_backend, **{"tokens": TOKENS, **options})


def requests(seed: int, count: int = 16) -> list[tuple[int, Add]]:
    """(turn at which it comes, request): short and long prompts, some that begin alike, some that draw, or ask for logprobs. Each
    might stop at some token, so that nobody knows how many blocks it will take."""
    chance = random.Random(seed)
    words = [[chance.randrange(3, 380) for _ in range(24)] for _ in range(2)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.0, "prompt_logprobs": 1}, {"temperature": 0.9, "seed": 7},
        {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.2},
    ]  # fmt: skip
    found = []
    for number in range(count):
        prompt = [chance.randrange(3, 380) for _ in range(chance.randint(1, 30))]
        prompt = chance.choice(words)[: chance.choice((0, 9, 24))] + prompt * (2 if number == count // 2 else 1)
        params = SamplingParams(max_tokens=chance.randint(1, 40), **kinds[chance.randrange(6) % 4])
        found.append((chance.randrange(12), Add(str(number), prompt, params, stop_token_ids=[381])))
    return sorted(found, key=lambda each: each[0])


def serve(
    stages: Sequence[Runner], asked: Sequence[tuple[int, Add]], **overrides: Any
) -> tuple[dict[str, list[Update]], Scheduler]:
    """What each request is told; the ranks have each step's results at once, and the scheduler takes them as late as it may."""
    settled: dict[str, Any] = {
        "num_blocks": 30, "block_size": BLOCK, "max_batch_size": SLOTS, "max_num_tokens": TOKENS, "max_seq_len": 128,
        "vocab_size": VOCAB_SIZE, "pipeline_stages": len(stages), **overrides,
    }  # fmt: skip
    scheduler = Scheduler(SchedulerOptions(**settled))
    coming, results, turn = deque(asked), deque[StepResult](), 0
    told: dict[str, list[Update]] = {add.request_id: [] for _, add in asked}
    while coming or not scheduler.idle:
        while coming and coming[0][0] <= turn:
            scheduler.add(coming.popleft()[1])
        while (step := scheduler.schedule()) is not None:
            for stage in stages:
                rows, _ = stage.run(step.batches[0]).results()
            assert rows is not None
            results.append(StepResult(step.number, [rows]))
        for said in scheduler.settle(results.popleft()) if results else []:
            assert isinstance(said, Update)
            told[said.request_id].append(said)
        turn += 1
        assert turn < 2000
    scheduler.check()
    return told, scheduler


def alike(got: dict[str, list[Update]], wanted: dict[str, list[Update]]) -> None:
    for name, updates in wanted.items():
        assert [update.tokens for update in got[name]] == [update.tokens for update in updates], name
        for mine, other in zip(got[name], updates, strict=True):
            for part, its in ((mine.logprobs, other.logprobs), (mine.prompt_logprobs or [], other.prompt_logprobs or [])):
                entries, wanted_entries = ([entry for entry in each if entry is not None] for each in (part, its))
                assert [entry.token for entry in entries] == [entry.token for entry in wanted_entries]
                close = pytest.approx([entry.logprob for entry in wanted_entries], abs=1e-3)
                assert [entry.logprob for entry in entries] == close


@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("llama", 1), ("mistral", 2), ("mistral", 3)])
def test_what_a_scheduler_asks_gives_the_tokens_of_eager_steps(folders: dict[str, Path], family: str, seed: int) -> None:
    tape, asked = Steps(), requests(seed)
    window = {"window": 8} if family == "mistral" else {}
    got, scheduler = serve([step_runner(folders[family], tape)], asked, **window)
    counted = scheduler.counters
    assert counted.prefix_hits
    assert counted.preemptions or family == "mistral"
    assert any(update.prompt_logprobs for updates in got.values() for update in updates)
    replayed, mixed = sum(tape.replays.values()), tape.mixed
    assert replayed == counted.steps  # none was eager
    assert sum(mixed.values()) >= 5
    assert len(mixed) >= 2
    wanted, _ = serve([step_runner(folders[family], None)], asked, **window)
    alike(got, wanted)
    greedy = [add for _, add in asked if add.params.temperature == 0 and add.params.repetition_penalty == 1]
    for add in greedy[:3]:
        tokens = [token for update in got[add.request_id] for token in update.tokens]
        assert tokens == expected(folders[family], add.token_ids, len(tokens))


def test_stages_hand_on_what_graphs_forwarded(folders: dict[str, Path]) -> None:
    lane, tapes, asked = deque[Tensor](), (Steps(rows=6), Steps(rows=6)), requests(5)
    stages = [
        step_runner(folders["llama"], tape, layers, Pipe(at, lane))
        for at, (tape, layers) in enumerate(zip(tapes, (range(2), range(2, 3)), strict=True))
    ]
    got, scheduler = serve(stages, asked)
    assert tapes[0].replays == tapes[1].replays
    assert sum(tapes[0].replays.values()) == scheduler.counters.steps
    assert len(tapes[0].mixed) >= 2
    assert not lane
    alike(got, serve([step_runner(folders["llama"], None)], asked, pipeline_stages=2)[0])


def test_ranks_agree(folders: dict[str, Path]) -> None:
    asked = requests(6, count=8)

    def run(group: Group) -> tuple[dict[str, list[Update]], dict[int, int]]:
        tape = Steps()
        return serve([step_runner(folders["llama"], tape, group=group)], asked)[0], tape.mixed

    (first, mixed), (second, _) = LocalWorld(2).run(run)
    assert len(mixed) >= 2
    assert first == second
    alike(first, serve([step_runner(folders["llama"], None)], asked)[0])


def admitted(slot: int, prompt: list[int], params: SamplingParams = GREEDY) -> Admission:
    return Admission(slot, prompt, len(prompt), params, 1)


def test_padding_writes_nothing_and_reads_nothing_that_matters(folders: dict[str, Path]) -> None:
    """All blocks that no row owns are poison, block 0 among them, which padding points at; and no graph writes its facts."""
    tape, prompt = Steps(), prompts(1, seed=5)[0][:6]
    runner, plain = step_runner(folders["mistral"], tape), step_runner(folders["mistral"], None)
    first = StepBatch(
        admitted=[admitted(7, prompt), admitted(2, prompt)],
        rows=[Row(7, 0, 6, prompt, [1, 2], samples=True), Row(2, 0, 6, prompt, [3, 4], samples=True)],
    )
    second = StepBatch(
        admitted=[admitted(0, prompt), admitted(5, prompt)],
        rows=[Row(7, 6, 1, [], [], samples=True), Row(2, 6, 1, [9], [], samples=True), Row(0, 0, 6, prompt, [5, 6], samples=True),
              Row(5, 0, 3, prompt[:3], [7])],
    )  # fmt: skip
    strangers = [slot for slot in range(BLOCKS * BLOCK) if not 1 <= slot // BLOCK <= 7]
    tokens = []
    for each in (runner, plain):
        for part in held(each):
            part[strangers] = float("nan")
        each.run(first).results()
        before = [part.clone() for part in held(each)]
        last = each._last_tokens.clone()
        rows, _ = each.run(second).results()
        assert rows is not None
        tokens.append([row.token for row in rows])
        written = {2 * BLOCK + 2, 4 * BLOCK + 2, *range(5 * BLOCK, 5 * BLOCK + 6), *range(7 * BLOCK, 7 * BLOCK + 3)}
        for part, old in zip(held(each), before, strict=True):
            changed = ((part != old) & ~(part.isnan() & old.isnan())).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(changed) <= written
            assert len(changed) > len(written) // 2
        assert set((each._last_tokens != last).nonzero().flatten().tolist()) <= {7, 2, 0}
    assert tokens[0] == tokens[1]
    assert tokens[0][3] is None
    assert tape.mixed == {32: 2}


def test_facts_stay_as_they_were_filled(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads lengths before the kernels before it have ended; and what it finds out of them, it finds first of all."""
    forward, planned, done = StepGraphs._forward, [], []

    def watched(graphs: StepGraphs, size: Size, *rest: Any) -> None:
        before = graphs.places(size).facts.clone()
        forward(graphs, size, *rest)
        assert torch.equal(graphs.places(size).facts, before)
        done.append(size)

    class Plan(DecodePlan):
        def __init__(self, backend: DecodeBackend, batch: Batch) -> None:
            super().__init__(backend, batch)
            planned.append(batch)

    monkeypatch.setattr(StepGraphs, "_forward", watched)
    monkeypatch.setattr(attention_decode, "DecodePlan", Plan)
    runner = step_runner(folders["llama"], Steps())
    assert len(planned) == len(done) == len(ROWS) + 3
    done.clear()
    serve([runner], requests(8, count=6))
    assert {size.prompts > 0 for size in done} == {True, False}


def test_the_smallest_size_that_holds_a_step(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens, and by rows of several; a step that none holds is eager, as is any once graphs are dropped."""
    monkeypatch.setattr(plan_graphs, "MOST_PROMPTS", 2)
    tape = Steps(tokens=100)
    runner = step_runner(folders["llama"], tape, tokens=100)
    assert [size.tokens for size in tape.of.values() if size.prompts] == [100, 64, 32]
    graphs = runner.graphs
    assert graphs is not None
    asked = {5: 32, 32: 32, 33: 64, 65: 100, 100: 100, 101: None}
    for count, size in asked.items():
        tape.replays.clear()
        prompt = [3 + at % 300 for at in range(count)]
        runner.run(StepBatch(admitted=[admitted(0, prompt)], rows=[Row(0, 0, count, prompt, list(range(26)), True)])).results()
        assert tape.mixed == ({} if size is None else {size: 1})
        runner.run(StepBatch(released=[0]))
    for rows, size in ((1, 32), (2, 32), (3, None)):
        tape.replays.clear()
        step = [Row(slot, 0, 2, [5, 6], [slot], samples=True) for slot in range(rows)]
        runner.run(StepBatch(admitted=[admitted(slot, [5, 6]) for slot in range(rows)], rows=step)).results()
        assert tape.mixed == ({} if size is None else {size: 1})
        runner.run(StepBatch(released=list(range(rows))))
    graphs.forget()
    tape.replays.clear()
    assert drive(runner).generate([prompts(1)[0]], 3) == [expected(folders["llama"], prompts(1)[0], 3)]
    assert not tape.replays


def test_steps_are_counted_by_how_they_ran(folders: dict[str, Path]) -> None:
    tape = Steps(tokens=40)
    runner = step_runner(folders["llama"], tape, tokens=40)
    assert not any(runner.ran.by_name.values()), "capturing runs no step"
    long, short = [3 + at for at in range(41)], [5, 6, 7]

    def run(*rows: Row, **changes: Any) -> None:
        runner.run(StepBatch(rows=[*rows], **changes)).results()

    run(Row(0, 0, 41, long, list(range(11)), True), admitted=[admitted(0, long)])  # more than any graph holds
    run(Row(0, 41, 1, [], [], True))
    run(Row(0, 42, 1, [], [], True), Row(1, 0, 3, short, [20], True), admitted=[admitted(1, short)])
    run(Row(0, 43, 1, [], [], True), Row(1, 3, 1, [], [], True))
    for slot in range(2, 4):
        run(Row(slot, 0, 3, short, [slot * 20], True), admitted=[admitted(slot, short)])
    run(*(Row(slot, start, 1, [], [60 + slot], True) for slot, start in enumerate((44, 4, 3))))
    run(released=[*range(4)])  # without rows there is nothing to forward
    assert tape.sized == {Size(1, 1): 1, Size(2, 2): 1, Size(4, 4): 1, Size(32, 11, 8): 3}
    assert runner.ran.by_name == {
        "decode graph/steps": 3, "decode graph/tokens": 6, "decode graph/padding": 1,
        "prompt graph/steps": 3, "prompt graph/tokens": 10, "prompt graph/padding": 86,
        "eager/steps": 1, "eager/tokens": 41, "eager/padding": 0,
    }  # fmt: skip


def test_more_new_blocks_than_a_graph_takes_go_before_it(folders: dict[str, Path]) -> None:
    """A row whose beginning the prefix cache holds brings all its blocks at once."""
    prompt, tape = [3 + at % 300 for at in range(125)], Steps(tokens=16)
    runner, plain = step_runner(folders["llama"], tape, tokens=16), step_runner(folders["llama"], None)
    said = []
    for each in (runner, plain):
        stored: list[int] = []
        each._store = lambda new, stored=stored: stored.append(len(new[0]))  # type: ignore[method-assign, misc]
        blocks = list(range(40, 72))
        each.run(StepBatch(admitted=[admitted(0, prompt)], rows=[Row(0, 0, 124, prompt[:124], blocks[:31])])).results()
        each.run(StepBatch(released=[0]))
        rows, _ = each.run(StepBatch(admitted=[admitted(3, prompt)], rows=[Row(3, 120, 5, prompt[120:], blocks, True)])).results()
        assert rows is not None
        assert stored == [31, 32]
        said.append(rows[0].token)
    assert tape.mixed == {16: 1}
    assert said == [expected(folders["llama"], prompt, 1)[0]] * 2


def test_memory_is_measured_by_the_largest_of_each_kind(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter((1000, 900, 650))
    monkeypatch.setattr(budget, "free_bytes", lambda device: next(free))
    tape = Steps()
    runner = step_runner(folders["llama"], tape)
    graphs = runner.graphs
    assert graphs is not None
    graphs.forget()
    recorded = tape.recorded
    assert recorded == graphs.count == len(graphs.sizes) == len(ROWS) + 3
    told: list[int] = []
    found = budget.graphs_of(runner, CPU, lambda: told.append(tape.recorded))
    assert found == 350 + budget.GRAPH_BYTES * graphs.count
    assert told == [recorded + 1, recorded + 2]
    assert tape.recorded == recorded + 2
    assert not graphs._captured
    assert [*runner.capture()] == [*tape.of.values()]  # of each kind the largest first


@pytest.mark.parametrize(("own", "tokens"), [("none", TOKENS), ("e4m3", 0), ("e4m3", 1)])
def test_only_rows_of_one_token_have_graphs(folders: dict[str, Path], own: Any, tokens: int) -> None:
    """Where there is no kernel for the others, or nobody asked."""
    tape = Steps(tokens=0)
    runner = make_runner(folders["llama"], tape, attention=lambda: DecodeBackend(SdpaBackend(), CPU, own), tokens=tokens)
    assert tape.recorded == len(ROWS)
    prompt = prompts(1)[0]
    assert drive(runner).generate([prompt], 4) == [expected(folders["llama"], prompt, 4)]
    assert tape.sized == {Size(1, 1): 3}

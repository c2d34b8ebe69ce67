# SPDX-License-Identifier: Apache-2.0
"""Runners with captured steps on CPU, whose captures and replays are counted, and the requests that tests serve with them."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.group import Group, Solo
from phalanx.config.model import ModelShape
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.grammar import OpenMatcher, no_grammars
from phalanx.engine.messages import AddRequest, RequestUpdate, Step, StepResult
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.kernels import reference
from phalanx.kernels.adapters.rows import AdapterBatch
from phalanx.models import registry, weights
from phalanx.models.adapters import ModelAdapters
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache, empty_caches
from phalanx.models.layers.attention import triton
from phalanx.models.layers.attention.backend import AttentionBackend, AttentionPlan
from phalanx.models.layers.attention.sdpa import SdpaBackend
from phalanx.models.layers.attention.triton import TritonBackend
from phalanx.models.slices import LayerContext
from phalanx.worker.cuda_graphs import EagerCapturer, GraphCapturer, Replay
from phalanx.worker.graph_buffers import GraphSize, graph_sizes
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.sampler import Sampler
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engine_drive import BLOCK, Drive


class Stage:
    """One of several stages in one process: what each sends the next receives."""

    def __init__(self, rank: int, lanes: Sequence[deque[Tensor]]) -> None:
        self.rank, self.size, self._lanes = rank, len(lanes), lanes

    def send(self, x: Tensor, to: int) -> None:
        self._lanes[to].append(x.clone())

    def receive(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._lanes[source + 1].popleft())


CPU = torch.device("cpu")


SLOTS, BLOCKS = 11, 100


ROWS = [size.tokens for size in graph_sizes(SLOTS, 0)[0]]


class Counting(EagerCapturer):
    """How often was replayed, by the number of the recording (0: the largest size)."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replays: Counter[int] = Counter()

    def capture(self, work: Callable[[], None], warmup: Callable[[], None]) -> Replay:
        number, self.recorded = self.recorded, self.recorded + 1
        again = super().capture(work, warmup)

        def replay() -> None:
            self.replays[number] += 1
            again()

        return replay


class Fixed(SdpaBackend):
    """Knows the rows of fixed batches by what lies on the device alone, as a kernel in a graph does. planned: such batches."""

    captures_prefill = False
    planned = 0

    @property
    def graphs(self) -> Fixed:  # type: ignore[override]
        return self

    def max_prefill_pairs(self) -> float:
        return math.inf

    def short_kv_limit(self, rows: int) -> int:
        return 0

    def plan(self, batch: Batch) -> AttentionPlan:  # type: ignore[override]
        if not batch.fixed:
            return super().plan(batch)
        self.planned += 1
        return Late(batch, super().plan)


class Late:
    """Plans when it is asked to attend, from the batch's tensors."""

    def __init__(self, batch: Batch, plan: Callable[[Batch], AttentionPlan]) -> None:
        self._batch, self._plan = batch, plan

    def forward(self, query: Tensor, cache: LayerCache, **options: Any) -> Tensor:
        assert self._batch.table_rows is not None
        rows, lengths = self._batch.table_rows, self._batch.kv_lengths.tolist()
        batch = replace(
            self._batch, block_tables=self._batch.block_tables[rows], table_rows=None, kv_lengths_cpu=lengths, fixed=False,
            more_groups=[each._replace(block_tables=each.block_tables[rows]) for each in self._batch.more_groups],
        )  # fmt: skip
        return self._plan(batch).forward(query, cache, **options)


def make_runner(
    folder: Path, capturer: GraphCapturer | None, layers: range | None = None, pipe: object = None, *, group: Group | None = None,
    attention: Callable[[], AttentionBackend] = Fixed, longest: int = 128, tokens: int = 0,
    dp: Group | None = None, ends: Any = None, adapters: AdapterBatch | None = None, **speculation: Any,
) -> ModelRunner:  # fmt: skip
    shape = ModelShape.from_folder(folder).with_drafts(speculation.get("max_drafts", 0))
    context = LayerContext(group or Solo(), torch.float32, CPU, dp=dp or Solo(), adapters=adapters)
    model = registry.build(shape, layers or range(shape.num_layers), context)
    weights.load(model, folder)
    proposer = speculation.get("proposer")
    declared = [*model.declared_caches(), *([] if proposer is None else proposer.declared_caches())]
    caches = empty_caches(declared, BLOCKS, BLOCK, CPU, slots=SLOTS)
    runner = ModelRunner(
        model, caches, attention(), Sampler(SLOTS, shape.vocab_size, CPU), pipe or Solo(),  # type: ignore[arg-type]
        max_batch_size=SLOTS, max_seq_len=longest, block_size=BLOCK, dtype=torch.float32, device=CPU, capturer=capturer,
        max_num_tokens=tokens, ends=ends, adapters=None if adapters is None else ModelAdapters(model, adapters), **speculation,
    )  # fmt: skip
    list(runner.capture())
    return runner


def drive(*stages: ModelRunner) -> Drive:
    results: deque[StepResult] = deque()

    def submit(step: Step) -> None:
        for stage in stages:
            rows, _ = stage.run(step.batches[0]).results()
        assert rows is not None
        results.append(StepResult(step.number, [rows]))

    return Drive(submit, lambda: [results.popleft()] if results else [], blocks=BLOCKS)


def tensors_of(runner: ModelRunner) -> list[Tensor]:
    """Keys and values by slot of the cache."""
    return [part.flatten(0, 1) for cache in runner.caches for part in (cache.key, cache.value)]


TOKENS = 80
"""Of a step: so there are graphs of 32, 64 and 80."""


def put_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the kernels of attention."""
    hints = "workspace", "short", "splits", "early_lengths", "tiles", "mean_length", "batch_invariant"

    def decode(query: Tensor, *inputs: Any, out: Tensor, **options: Any) -> Tensor:
        arguments = {name: value for name, value in options.items() if name not in hints}
        return out.copy_(reference.decode_attention(query, *inputs, **arguments))

    def prefill(query: Tensor, *inputs: Any, **options: Any) -> Tensor:
        arguments = {name: value for name, value in options.items() if name not in hints}
        return reference.prefill_attention(query, *inputs, **arguments)

    monkeypatch.setattr(triton.kernels, "decode_attention", decode)
    monkeypatch.setattr(triton.kernels, "prefill_attention", prefill)


class Steps(Counting):
    """sized: how often was replayed, by size."""

    def __init__(self, tokens: int = TOKENS, rows: int = SLOTS) -> None:
        super().__init__()
        order = [size for kind in graph_sizes(rows, tokens) for size in kind[::-1]]
        self.of = dict(enumerate(order))

    @property
    def sized(self) -> Counter[GraphSize]:
        return Counter({self.of[number]: count for number, count in self.replays.items()})

    @property
    def mixed(self) -> dict[int, int]:
        """Of any rows, by tokens."""
        return {size.tokens: count for size, count in self.sized.items() if size.prefill_rows}


def kernels_backend() -> TritonBackend:
    return TritonBackend(SdpaBackend(), CPU, "quantized")


def step_runner(
    folder: Path, capturer: Counting | None, layers: range | None = None, pipe: object = None, **options: Any
) -> ModelRunner:
    return make_runner(folder, capturer, layers, pipe, attention=kernels_backend, **{"tokens": TOKENS, **options})


def requests(seed: int, count: int = 16) -> list[tuple[int, AddRequest]]:
    """(turn at which it comes, request): short and long prompts, some that begin alike, some that draw, or ask for logprobs. Each
    might stop at some token, so that nobody knows how many blocks it will take."""
    chance = random.Random(seed)
    words = [[chance.randrange(3, 380) for _ in range(24)] for _ in range(2)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.0, "prompt_logprobs": 1}, {"temperature": 0.9, "seed": 7},
        {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.2},
    ]  # fmt: skip
    arrivals = []
    for number in range(count):
        prompt = [chance.randrange(3, 380) for _ in range(chance.randint(1, 30))]
        prompt = chance.choice(words)[: chance.choice((0, 9, 24))] + prompt * (2 if number == count // 2 else 1)
        params = SamplingParams(max_tokens=chance.randint(1, 40), **kinds[chance.randrange(6) % 4])
        arrivals.append((chance.randrange(12), AddRequest(str(number), prompt, params, stop_token_ids=[381])))
    return sorted(arrivals, key=lambda each: each[0])


def serve(
    stages: Sequence[ModelRunner], arrivals: Sequence[tuple[int, AddRequest]], choose_drafts: Callable[[int], int] | None = None,
    open_matcher: OpenMatcher = no_grammars, **overrides: Any,
) -> tuple[dict[str, list[RequestUpdate]], Scheduler]:  # fmt: skip
    """What each request is told; the ranks have each step's results at once, and the scheduler takes them as late as it may."""
    fields: dict[str, Any] = {
        "num_blocks": 30, "block_size": BLOCK, "max_batch_size": SLOTS, "max_num_tokens": TOKENS, "max_seq_len": 128,
        "vocab_size": VOCAB_SIZE, "pipeline_stages": len(stages), **overrides,
    }  # fmt: skip
    scheduler = Scheduler(SchedulerOptions(**fields), open_matcher)
    scheduler.choose_drafts = choose_drafts or scheduler.choose_drafts
    coming, results, turn = deque(arrivals), deque[StepResult](), 0
    updates: dict[str, list[RequestUpdate]] = {add.request_id: [] for _, add in arrivals}
    while coming or not scheduler.idle:
        while coming and coming[0][0] <= turn:
            scheduler.add(coming.popleft()[1])
        while (step := scheduler.schedule()) is not None:
            for stage in stages:
                rows, _ = stage.run(step.batches[0]).results()
            assert rows is not None
            results.append(StepResult(step.number, [rows]))
        for update in scheduler.process_result(results.popleft()) if results else []:
            assert isinstance(update, RequestUpdate)
            updates[update.request_id].append(update)
        turn += 1
        assert turn < 2000
    scheduler.check()
    return updates, scheduler


def alike(outputs: dict[str, list[RequestUpdate]], wanted: dict[str, list[RequestUpdate]]) -> None:
    for name, updates in wanted.items():
        assert [update.tokens for update in outputs[name]] == [update.tokens for update in updates], name
        for output, other in zip(outputs[name], updates, strict=True):
            for part, its in ((output.logprobs, other.logprobs), (output.prompt_logprobs or [], other.prompt_logprobs or [])):
                entries, wanted_entries = ([entry for entry in each if entry is not None] for each in (part, its))
                assert [entry.token for entry in entries] == [entry.token for entry in wanted_entries]
                close = pytest.approx([entry.logprob for entry in wanted_entries], abs=1e-3)
                assert [entry.logprob for entry in entries] == close

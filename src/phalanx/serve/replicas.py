# SPDX-License-Identifier: Apache-2.0
"""N engines behind one server or one LLM (`replicas`), each with processes, weights and GPUs of its own.

A request goes to the replica that has the least to do for it: tokens of the requests that run there, and those of the prompt that
its prefix cache lacks. When a replica fails, its streams end with its error, requests that have no token yet move to another, and
the others serve on; the whole fails when the last one has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from phalanx.config import EngineOptions, SamplingParams
from phalanx.config.resolve import require_one_host
from phalanx.engine.messages import AdapterFacts, EngineFacts, ExpertStats, ModelChange, ModelState, RequestUpdate, Stats
from phalanx.errors import EngineError, LayoutError, PhalanxError
from phalanx.hardware.probe import free_host_memory, usable_machine
from phalanx.layout.memory import host_budget
from phalanx.log import get_logger
from phalanx.serve.client import EngineClient, EngineProcessClient, MakeVocabulary

CHUNK_TOKENS = 64
"""Tokens of a prompt that are remembered together."""
MAX_CHUNKS = 128
"""Of one prompt that are looked at: a prefix beyond them is not told from another."""

logger = get_logger(__name__)

StartReplica = Callable[[EngineOptions, int], Awaitable[EngineProcessClient]]
"""Starts the replica of this number."""


class ReplicaChoice:
    """Which replica takes a request. `capacity`: tokens of one replica's KV cache, beyond which prefixes are forgotten."""

    def __init__(self, replicas: int, capacity: int) -> None:
        self.tokens = [0] * replicas
        """Of the requests that each replica has: prompts and outputs."""
        self._requests = [0] * replicas
        self._prefixes: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self._most_chunks = max(1, capacity // CHUNK_TOKENS)

    def choose(self, token_ids: Sequence[int], candidates: Iterable[int]) -> int:
        """The replica with the least to do for this prompt; the one with fewer requests, then the first, among equals."""
        chunks = _chunks(token_ids)

        def work(replica: int) -> tuple[int, int, int]:
            prefixes = self._prefixes[replica]
            cached = next((number for number, chunk in enumerate(chunks) if chunk not in prefixes), len(chunks)) * CHUNK_TOKENS
            return self.tokens[replica] + len(token_ids) - cached, self._requests[replica], replica

        return min(candidates, key=work)

    def begin(self, replica: int, token_ids: Sequence[int]) -> None:
        self.tokens[replica] += len(token_ids)
        self._requests[replica] += 1
        prefixes = self._prefixes[replica]
        for chunk in _chunks(token_ids):
            prefixes[chunk] = None
            prefixes.move_to_end(chunk)
        while len(prefixes) > self._most_chunks:
            prefixes.popitem(last=False)

    def grow(self, replica: int, tokens: int) -> None:
        self.tokens[replica] += tokens

    def end(self, replica: int, tokens: int) -> None:
        """tokens: prompt and output of the request."""
        self.tokens[replica] -= tokens
        self._requests[replica] -= 1


def _chunks(token_ids: Sequence[int]) -> list[int]:
    """A hash for each complete chunk of the prompt's beginning, which has all tokens up to its end in it."""
    hashes, last = [], 0
    for begin in range(0, min(len(token_ids), MAX_CHUNKS * CHUNK_TOKENS) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        last = hash((last, *token_ids[begin : begin + CHUNK_TOKENS]))
        hashes.append(last)
    return hashes


class ReplicatedEngineClient:
    """Several `EngineProcessClient`s as one `EngineClient`."""

    def __init__(self, engines: Sequence[EngineProcessClient], seed: int = 0) -> None:
        """seed: of requests without one of their own, which get the seeds that one engine would draw for them."""
        self._engines = list(engines)
        self._seeds = random.Random(seed)
        self.failure: PhalanxError | None = None
        self.facts = merged_facts([engine.facts for engine in engines])
        self._choice = ReplicaChoice(len(engines), engines[0].facts.kv_tokens)
        self._of_request: dict[str, int] = {}
        self._failure_callbacks: list[Callable[[PhalanxError], None]] = []
        for number, engine in enumerate(engines):
            engine.on_failure(lambda error, number=number: self._replica_failed(number, error))  # type: ignore[misc]
            if engine.failure is not None:
                self._replica_failed(number, engine.failure)

    @classmethod
    async def start(
        cls, options: EngineOptions, start: StartReplica | None = None, vocabulary: MakeVocabulary | None = None
    ) -> ReplicatedEngineClient:
        """Start `options.replicas` engines at once. Raises the error of the first that cannot start, and leaves none then;
        LayoutError where the host has too few GPUs, CapacityError where it lacks kv_host_memory, OptionError for several hosts."""
        environments = gpus_of_replicas(options)
        memory = options.kv_host_memory
        if memory:  # of all of them: each would find its own part free, before the others have theirs
            memory = host_budget(memory, free_host_memory(), "the host of the replicas")
        one = options.model_copy(update={"replicas": 1, "kv_host_memory": max(memory // options.replicas, 1) if memory else 0})

        async def start_one(number: int) -> EngineProcessClient:
            if start is not None:
                return await start(one, number)
            return await EngineProcessClient.start(
                one, title=f"phalanx engine {number}", environment=environments[number], vocabulary=vocabulary
            )

        starts = [asyncio.ensure_future(start_one(number)) for number in range(options.replicas)]
        try:
            return cls(await asyncio.gather(*starts), options.seed)
        except BaseException:
            for each in starts:
                each.cancel()
            engines = await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(engine.close(0.0) for engine in engines if isinstance(engine, EngineProcessClient)))
            raise

    @property
    def eos_token_ids(self) -> list[int]:
        return self._engines[0].eos_token_ids

    @eos_token_ids.setter
    def eos_token_ids(self, ids: list[int]) -> None:
        for engine in self._engines:
            engine.eos_token_ids = ids

    @property
    def alive(self) -> list[int]:
        """The replicas that take requests."""
        return [number for number, engine in enumerate(self._engines) if engine.failure is None]

    def latest_by_replica(self) -> list[Stats]:
        return [self._stats_of(number, engine.latest_by_replica()[0]) for number, engine in enumerate(self._engines)]

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        self._engines[0].check(token_ids, params)

    async def add(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, coalesce: bool = False
    ) -> AsyncGenerator[RequestUpdate]:
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
        while True:
            self._raise_if_failed()
            replica = self._choice.choose(token_ids, self.alive)
            tokens = len(token_ids)
            self._choice.begin(replica, token_ids)
            self._of_request[request_id] = replica
            engine = self._engines[replica]
            try:
                async with contextlib.aclosing(engine.add(request_id, token_ids, params, coalesce=coalesce)) as updates:
                    async for update in updates:
                        tokens += len(update.tokens)
                        self._choice.grow(replica, len(update.tokens))
                        yield update
                return
            except EngineError:
                # Where the replica has failed and nothing of the answer has left, another one can give all of it.
                if tokens > len(token_ids) or engine.failure is None or not self.alive:
                    raise
            finally:
                self._choice.end(replica, tokens)
                self._of_request.pop(request_id, None)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            replica = self._of_request.get(request_id)
            if replica is not None:
                self._engines[replica].abort([request_id])

    async def stats(self) -> Stats:
        return merged_stats(await self.stats_by_replica())

    async def stats_by_replica(self) -> list[Stats]:
        """The counters of each; of one that has failed the last ones, with nothing running."""
        self._raise_if_failed()
        await asyncio.gather(*(self._engines[number].stats() for number in self.alive), return_exceptions=True)
        return self.latest_by_replica()

    async def experts_by_replica(self) -> list[ExpertStats]:
        """Of each; empty ones of those that have failed."""
        return await self._of_each(lambda engine: engine.experts_by_replica())

    async def rebalance_experts(self) -> list[ExpertStats]:
        return await self._of_each(lambda engine: engine.rebalance_experts())

    async def change_model(self, message: ModelChange) -> list[ModelState]:
        """Of each that takes requests. Raises what the first raises that fails."""
        self._raise_if_failed()
        states = await asyncio.gather(*(self._engines[number].change_model(message) for number in self.alive))
        return [state for of_replica in states for state in of_replica]

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> list[AdapterFacts]:
        """In every replica, or, where one refuses it, in none; a name that was to be replaced is free then."""
        self._raise_if_failed()
        engines = [self._engines[number] for number in self.alive]
        loads = [engine.load_adapter(name, folder, replace=replace) for engine in engines]
        answers = await asyncio.gather(*loads, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not errors:
            return cast("list[AdapterFacts]", answers[0])
        if len(errors) < len(engines):
            pairs = zip(engines, answers, strict=True)
            taken = [engine for engine, answer in pairs if replace or not isinstance(answer, BaseException)]
            await asyncio.gather(*(engine.unload_adapter(name) for engine in taken), return_exceptions=True)
        raise errors[0]

    async def unload_adapter(self, name: str) -> list[AdapterFacts]:
        self._raise_if_failed()
        answers = await asyncio.gather(*(self._engines[number].unload_adapter(name) for number in self.alive))
        return answers[0]

    async def _of_each(self, ask: Callable[[EngineProcessClient], Awaitable[list[ExpertStats]]]) -> list[ExpertStats]:
        self._raise_if_failed()
        stats = [ExpertStats()] * len(self._engines)
        for number in self.alive:
            with contextlib.suppress(PhalanxError):
                stats[number] = (await ask(self._engines[number]))[0]
        return stats

    def on_failure(self, callback: Callable[[PhalanxError], None]) -> None:
        self._failure_callbacks.append(callback)

    async def close(self, timeout: float = 10.0) -> None:
        await asyncio.gather(*(engine.close(timeout) for engine in self._engines))

    def kill(self) -> None:
        for engine in self._engines:
            engine.kill()

    def _raise_if_failed(self) -> None:
        """Raise the error of the whole, or, once it is closed, that of an engine."""
        if not self.alive:
            failure = self.failure or self._engines[0].failure
            assert failure is not None
            raise failure.copy()

    def _stats_of(self, number: int, stats: Stats) -> Stats:
        if self._engines[number].failure is None:
            return stats
        return msgspec.structs.replace(
            stats, running=0, waiting=0, blocks_referenced=0, rank_gauges={}, adapters_running={}, adapters_waiting={},
            adapters_in_slots=[],
        )  # fmt: skip

    def _replica_failed(self, number: int, error: PhalanxError) -> None:
        alive = self.alive
        logger.error("replica %d of %d has failed; %d serve on: %s", number, len(self._engines), len(alive), error)
        if alive or self.failure is not None:
            return
        self.failure = error
        for callback in self._failure_callbacks:
            callback(error)


async def start_engine(options: EngineOptions, vocabulary: MakeVocabulary | None = None) -> EngineClient:
    """One engine, or as many as `replicas` says behind one. vocabulary: for structured output."""
    if options.replicas > 1:
        return await ReplicatedEngineClient.start(options, vocabulary=vocabulary)
    return await EngineProcessClient.start(options, vocabulary=vocabulary)


def gpus_of_replicas(options: EngineOptions) -> list[dict[str, str] | None]:
    """What the environment of each replica's engine has besides this process's: its GPUs, where there are any.

    Raises LayoutError where the visible GPUs do not suffice, OptionError for several hosts."""
    require_one_host(options)
    machine = usable_machine(options.device)
    gpus = machine.gpus
    if options.device == "cpu" or not gpus:
        return [None] * options.replicas
    world = options.world_size
    if options.replicas * world > len(gpus):
        raise LayoutError(
            f"replicas {options.replicas} x {world} ranks = {options.replicas * world} ranks need one GPU each",
            held="; ".join(filter(None, [f"this host has {len(gpus)}", machine.unusable])),
            next="use fewer replicas, or a smaller layout",
        )  # fmt: skip
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus[number * world : (number + 1) * world])}
        for number in range(options.replicas)
    ]


def merged_facts(facts: Sequence[EngineFacts]) -> EngineFacts:
    """Those of all replicas together: batch and blocks added up; lengths are of one request, the least; ranks are the first's."""
    names = dict.fromkeys(name for each in facts for name in each.phases)
    return msgspec.structs.replace(
        facts[0], max_batch_size=sum(each.max_batch_size for each in facts), num_blocks=sum(each.num_blocks for each in facts),
        kv_tokens=sum(each.kv_tokens for each in facts),
        max_seq_len=min(each.max_seq_len for each in facts), layout=replace(facts[0].layout, replicas=len(facts)),
        phases={name: max(each.phases.get(name, 0.0) for each in facts) for name in names},
    )  # fmt: skip


def merged_stats(stats: Sequence[Stats]) -> Stats:
    """Those of all replicas together: numbers added up, accepted drafts by their place; other lists one behind the other, ranks
    numbered on, reasons joined."""
    numbers: dict[str, Any] = {}
    first_ranks = list(itertools.accumulate((len(each.rank_bytes) for each in stats), initial=0))
    for name in Stats.__struct_fields__:
        values = [getattr(each, name) for each in stats]
        if name == "wrong_head":
            numbers[name] = max(values)
        elif isinstance(values[0], int):
            numbers[name] = sum(values)
        elif name == "accepted_tokens":
            numbers[name] = [sum(counts) for counts in itertools.zip_longest(*values, fillvalue=0)]
        elif name in ("rank_bytes", "rank_gauges"):
            numbers[name] = {
                first + rank: of_rank
                for first, of_replica in zip(first_ranks, values, strict=False)
                for rank, of_rank in sorted(of_replica.items())
            }
        elif isinstance(values[0], str):
            numbers[name] = "; ".join(filter(None, values))
        elif isinstance(values[0], list):
            numbers[name] = [value for each in values for value in each]
        else:
            numbers[name] = {key: sum(value.get(key, 0) for value in values) for key in dict.fromkeys(k for v in values for k in v)}
    return Stats(**numbers)

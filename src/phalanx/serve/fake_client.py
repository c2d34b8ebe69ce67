# SPDX-License-Identifier: Apache-2.0
"""A fake engine in this process, without a model, for tests of the layers above the engine."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import msgspec

from phalanx.config import SamplingParams
from phalanx.engine.messages import (
    AdapterFacts,
    AddRequest,
    EngineFacts,
    ExpertStats,
    ModelChange,
    ModelState,
    RequestUpdate,
    Sleep,
    Stats,
    TokenLogprobs,
    UpdateWeights,
    WakeUp,
)
from phalanx.errors import AdapterError, AdapterNotFound, EngineClosed, PhalanxError
from phalanx.layout import Layout
from phalanx.serve.client import EngineClient
from phalanx.serve.engine_requests import build_request, check_request

Tokens = Callable[[AddRequest], Iterable[int]]


def fake_facts(*, vocab_size: int = 1000, max_seq_len: int = 1024, eos_token_ids: Sequence[int] = ()) -> EngineFacts:
    return EngineFacts(
        model="fake", dtype="fp32", device="cpu", layout=Layout(), max_seq_len=max_seq_len, max_batch_size=8,
        max_num_tokens=256, block_size=16, num_blocks=256, kv_tokens=4096, vocab_size=vocab_size, eos_token_ids=list(eos_token_ids),
    )  # fmt: skip


class FakeEngineClient(EngineClient):
    """Answers each request with `tokens(add)`, one token per iteration of the event loop (or per `delay` seconds).

    Ends requests as the engine does: max_tokens, max_seq_len, stop tokens after min_tokens. All requested logprobs are -1; the
    vector of a prompt is its first four tokens. added,
    aborted: the requests, and the ids of those that were left early, for tests. `fail` makes the engine fail.
    """

    def __init__(self, tokens: Tokens, *, facts: EngineFacts | None = None, delay: float = 0.0) -> None:
        self.facts = facts or fake_facts()
        self.eos_token_ids = list(self.facts.eos_token_ids)
        self.failure: PhalanxError | None = None
        self.delay = delay
        self.added: list[AddRequest] = []
        self.aborted: list[str] = []
        self.latest = Stats(blocks_total=self.facts.num_blocks)
        self.experts = ExpertStats()
        self.state = ModelState()
        self.adapters: dict[str, AdapterFacts] = {}
        self._tokens = tokens
        self._running: dict[str, asyncio.Event] = {}
        self._failure_callbacks: list[Callable[[PhalanxError], None]] = []

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        check_request(build_request("", token_ids, params, self.eos_token_ids), self.facts)

    async def add(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, coalesce: bool = False
    ) -> AsyncGenerator[RequestUpdate]:
        add = build_request(request_id, token_ids, params, self.eos_token_ids)
        self._raise_if_failed()
        check_request(add, self.facts)
        self.added.append(add)
        aborted = self._running[request_id] = asyncio.Event()
        ended = False
        try:
            for update in self._updates(add):
                await asyncio.sleep(self.delay)
                self._raise_if_failed()
                if aborted.is_set():
                    update = RequestUpdate(request_id, [], finish_reason="abort")
                ended = update.finish_reason is not None
                yield update
                if ended:
                    return
        finally:
            self._running.pop(request_id, None)
            if not ended and self.failure is None:
                self.aborted.append(request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].set()

    async def stats(self) -> Stats:
        self._raise_if_failed()
        self.latest = Stats(running=len(self._running), blocks_total=self.facts.num_blocks, blocks_referenced=len(self._running))
        return self.latest

    @property
    def alive(self) -> list[int]:
        return [] if self.failure is not None else [0]

    def latest_by_replica(self) -> list[Stats]:
        return [self.latest]

    async def stats_by_replica(self) -> list[Stats]:
        return [await self.stats()]

    async def experts_by_replica(self) -> list[ExpertStats]:
        self._raise_if_failed()
        return [self.experts]

    async def rebalance_experts(self) -> list[ExpertStats]:
        return await self.experts_by_replica()

    async def change_model(self, message: ModelChange) -> list[ModelState]:
        """Asleep or awake at once."""
        self._raise_if_failed()
        match message:
            case Sleep():
                self.state = ModelState(message.level, weights=False, kv_cache=False, generation=self.state.generation)
            case WakeUp():
                weights, kv_cache = self.state.weights or message.weights, self.state.kv_cache or message.kv_cache
                level = 0 if weights and kv_cache else self.state.level
                self.state = ModelState(level, weights, kv_cache, generation=self.state.generation)
            case UpdateWeights():
                self.state = msgspec.structs.replace(self.state, generation=self.state.generation + 1)
        return [self.state]

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> list[AdapterFacts]:
        self._raise_if_failed()
        if name in self.adapters and not replace:
            raise AdapterError(f"adapter {name!r} is already loaded")
        self.adapters[name] = AdapterFacts(name, folder, 8)
        return list(self.adapters.values())

    async def unload_adapter(self, name: str) -> list[AdapterFacts]:
        self._raise_if_failed()
        if self.adapters.pop(name, None) is None:
            raise AdapterNotFound(f"adapter {name!r} is not loaded")
        return list(self.adapters.values())

    def on_failure(self, callback: Callable[[PhalanxError], None]) -> None:
        self._failure_callbacks.append(callback)

    def fail(self, error: PhalanxError) -> None:
        """Make the engine fail: every open stream raises this error."""
        self.failure = error
        for callback in self._failure_callbacks:
            callback(error)

    async def close(self, timeout: float = 10.0) -> None:
        self.kill()

    def kill(self) -> None:
        self.failure = self.failure or EngineClosed("the engine was shut down")

    def _updates(self, add: AddRequest) -> Iterable[RequestUpdate]:
        available = self.facts.max_seq_len - len(add.token_ids)
        limit = min(add.params.max_tokens or available, available)
        scored = add.params.prompt_logprobs is not None
        for count, token in enumerate(self._tokens(add), 1):
            update = RequestUpdate(add.request_id, [token])
            if add.params.logprobs is not None:
                update.logprobs = [TokenLogprobs(token, -1.0, 1, [(token, -1.0)][: add.params.logprobs])]
            if add.params.pooling is not None:
                length = len(add.params.pooled_tokens or "four")
                update.pooled = struct.pack(f"<{length}f", *(add.token_ids * length)[:length])
            if scored and count == 1:
                update.prompt_logprobs = [None, *(TokenLogprobs(known, -1.0, 1) for known in add.token_ids[1:])]
            if token in add.stop_token_ids and count >= add.params.min_tokens:
                update.finish_reason = "stop"
                update.stop_reason = None if token in add.eos_token_ids else token
            elif count >= limit:
                update.finish_reason = "length"
            yield update
        raise AssertionError(f"the fake engine's tokens ended before request {add.request_id!r} did")

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure.copy()

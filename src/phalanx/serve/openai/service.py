# SPDX-License-Identifier: Apache-2.0
"""The state that all routes of a server share: admission control, metrics, worker threads and, once it has started, the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from starlette.requests import Request

from phalanx.config.sampling_params import SamplingParams, StructuredOutputParams
from phalanx.engine.messages import EngineFacts
from phalanx.errors import EngineClosed, OptionError, Overloaded, PhalanxError, PromptTooLong
from phalanx.log import get_logger
from phalanx.metrics import Metrics
from phalanx.serve.admission import AdmissionControl, Phase
from phalanx.serve.client import Engine
from phalanx.serve.openai.api_errors import ApiError, api_error_of, bad_request
from phalanx.serve.openai.request_params import StructuredOutputField, with_structured_output
from phalanx.serve.openai.tools.formats import ToolFormat
from phalanx.serve.structured_output.compiler import compile_structured_output
from phalanx.serve.tokenizer import Tokenizer

logger = get_logger(__name__)

TOKENIZER_THREADS = 2
MAX_TEXTS = 512
"""Limit of texts that wait for a tokenizer thread; each takes milliseconds."""
MAX_WAITING_COMPILATIONS = 64
STATS_SECONDS = 1.0
"""Time that a scrape waits for the engine's counters; then it shows the last ones."""

T = TypeVar("T")


@dataclass(frozen=True)
class ServingEngine:
    """An engine that accepts requests, with the tokenizer and the tool format of its model."""

    client: Engine
    tokenizer: Tokenizer
    tool_format: ToolFormat | None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def facts(self) -> EngineFacts:
        return self.client.facts

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises PromptTooLong before it tokenizes a text that is far too long, since this takes a second
        and 200 MB per million characters."""
        min_tokens = len(text) // self._max_characters
        if min_tokens > self.facts.max_seq_len:
            raise PromptTooLong(
                f"the prompt has at least {min_tokens} tokens, and max_seq_len is {self.facts.max_seq_len}",
                next="shorten the prompt",
            )  # fmt: skip
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _max_characters(self) -> int:
        """Maximum number of characters in one token. A normalizer may join characters; no known one joins more than 4."""
        backend = self.tokenizer.backend
        longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if backend.normalizer is None else 4 * longest


class Threads:
    """A few threads, and a limit of tasks that wait for them."""

    def __init__(self, name: str, count: int, *, max_tasks: int, refused: Callable[[str], None]) -> None:
        self._name, self._max_tasks, self._tasks, self._refused = name, max_tasks, 0, refused
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, task: Callable[[], T]) -> T:
        """Run a task on a thread. Raises Overloaded if too many tasks wait."""
        if self._tasks >= self._max_tasks:
            self._refused("queue_full")
            raise Overloaded(
                f"the queue of {self._name} threads is full", held=f"{self._tasks} tasks wait", next="try again in 1 s"
            )
        self._tasks += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, task)
        finally:
            self._tasks -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Service:
    """One per server. model_name: the name of the model in the API."""

    def __init__(self, *, model_name: str, admission: AdmissionControl, metrics: Metrics) -> None:
        self.model_name, self.admission, self.metrics = model_name, admission, metrics
        self.engine: ServingEngine | None = None
        self._texts = Threads("tokenizer", TOKENIZER_THREADS, max_tasks=MAX_TEXTS, refused=metrics.refused)
        # Separate from texts: a compilation may take seconds, and only requests that need one should wait for it.
        self._compilations = Threads("structured output", 1, max_tasks=MAX_WAITING_COMPILATIONS, refused=metrics.refused)

    def require_engine(self, model: str | None = None) -> ServingEngine:
        """The engine. Raises ApiError 404 for a model that is not served, EngineClosed if there is no engine yet or any more."""
        if model is not None and model != self.model_name:
            message = f"the model {model[:200]!r} is not served here; {self.model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")
        if self.engine is None or self.admission.phase is Phase.FAILED:
            self.metrics.refused("not_ready")
            why = str(self.admission.failure) if self.admission.failure else "the server is still starting"
            raise EngineClosed("the engine does not accept requests", why=why, next="wait until /ready answers 200")
        return self.engine

    async def run_on_thread(self, task: Callable[..., T], *args: Any, inline: bool = False) -> T:
        """Run a task on a tokenizer thread, or here if it is short (inline). Raises Overloaded if too many tasks wait."""
        if inline:
            return task(*args)
        return await self._texts.run(partial(task, *args))

    async def compiled_params(
        self, engine: ServingEngine, params: SamplingParams, requested: StructuredOutputField | None
    ) -> SamplingParams:
        """The params with their structured output compiled. Raises ApiError 400 naming the field if it cannot be compiled."""
        if requested is None:
            return params
        width, eos = engine.facts.vocab_size, engine.client.eos_token_ids
        try:
            compiled = await self._compilations.run(
                partial(
                    compile_structured_output, requested.structured_output, engine.tokenizer, vocab_size=width, eos_token_ids=eos
                )
            )
        except OptionError as error:
            raise bad_request(f"{requested.param}: {error}", param=requested.param, code="invalid_value") from None
        return with_structured_output(params, compiled)

    async def warm_up(self, engine: ServingEngine) -> None:
        """Start the compiler of structured output, which takes seconds, before the first request needs it."""
        try:
            await self.compiled_params(
                engine, SamplingParams(), StructuredOutputField(StructuredOutputParams(json_object=True), "response_format")
            )
        except (ApiError, PhalanxError) as error:
            logger.warning("structured output is not available: %s", error)

    def api_error(self, error: BaseException) -> ApiError:
        """The error response to an exception."""
        return api_error_of(error, retry_after=self.admission.retry_after())

    async def refresh(self) -> None:
        """Update the engine's counters for a scrape; without an answer in time, the last ones stay."""
        if self.engine is None or self.admission.phase is Phase.FAILED:
            return
        try:
            self.metrics.engine = await asyncio.wait_for(self.engine.client.stats(), STATS_SECONDS)
        except (TimeoutError, PhalanxError) as error:
            logger.warning("/metrics shows the engine's last counters: %s", error or "the engine did not answer in time")

    def close(self) -> None:
        self._texts.close()
        self._compilations.close()


def service_of(request: Request) -> Service:
    """The service of the app that received this request."""
    service: Service = request.app.state.service
    return service

# SPDX-License-Identifier: Apache-2.0
"""What every route of one server shares: the door, the metrics, the threads that tokenize, and, once it is up, the engine."""

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
from phalanx.serve.openai.sampling import StructuredOutputField, with_structured_output
from phalanx.serve.openai.tools.formats import ToolFormat
from phalanx.serve.structured_output.compiler import compile_structured_output
from phalanx.serve.tokenizer import Tokenizer

logger = get_logger(__name__)

TOKENIZER_THREADS = 2
MAX_TEXTS = 512
"""Texts that may wait for a tokenizer thread; a thread takes milliseconds for each."""
MAX_WAITING_COMPILATIONS = 64
STATS_SECONDS = 1.0
"""How long a scrape waits for the engine's counters before it shows the last ones."""

T = TypeVar("T")


@dataclass(frozen=True)
class ServingEngine:
    """An engine that takes requests, and what its prompts are made with."""

    client: Engine
    tokenizer: Tokenizer
    tool_format: ToolFormat | None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def facts(self) -> EngineFacts:
        return self.client.facts

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises PromptTooLong, for a text that is far too long without tokenizing it: that costs a second
        and 200 MB per million characters."""
        least = len(text) // self._most_characters
        if least > self.facts.max_seq_len:
            raise PromptTooLong(
                f"a prompt of {least} tokens or more was asked for", held=f"max_seq_len is {self.facts.max_seq_len}",
                next="shorten the prompt",
            )  # fmt: skip
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _most_characters(self) -> int:
        """Of a text, in one token. A normalizer may join characters first; none that is in use makes one of more than 4."""
        backend = self.tokenizer.backend
        longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if backend.normalizer is None else 4 * longest


class Threads:
    """A few threads, and a bound on what may wait for them."""

    def __init__(self, name: str, count: int, *, most: int, refused: Callable[[str], None]) -> None:
        self._name, self._most, self._inside, self._refused = name, most, 0, refused
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, act: Callable[[], T]) -> T:
        """Run it there. Raises Overloaded when too much waits."""
        if self._inside >= self._most:
            self._refused("queue_full")
            raise Overloaded(f"a thread was asked for ({self._name})", held=f"{self._inside} tasks wait", next="try again in 1 s")
        self._inside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, act)
        finally:
            self._inside -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Service:
    """One per server. model_name: as clients call the model."""

    def __init__(self, *, model_name: str, admission: AdmissionControl, metrics: Metrics) -> None:
        self.model_name, self.admission, self.metrics = model_name, admission, metrics
        self.engine: ServingEngine | None = None
        self._texts = Threads("tokenizer", TOKENIZER_THREADS, most=MAX_TEXTS, refused=metrics.refused)
        # Apart from texts: a guide may take seconds, and only those who brought one should wait for it.
        self._compilations = Threads("guides", 1, most=MAX_WAITING_COMPILATIONS, refused=metrics.refused)

    def require_engine(self, model: str | None = None) -> ServingEngine:
        """The engine. Raises ApiError 404 for a model that is not served, EngineClosed while there is no engine."""
        if model is not None and model != self.model_name:
            message = f"the model {model[:200]!r} is not served here; {self.model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")
        if self.engine is None or self.admission.phase is Phase.FAILED:
            self.metrics.refused("not_ready")
            why = str(self.admission.failure) if self.admission.failure else "the server is still starting"
            raise EngineClosed("the engine does not take requests", why=why, next="ask /ready, and try again")
        return self.engine

    async def run_on_thread(self, act: Callable[..., T], *args: Any, inline: bool = False) -> T:
        """Run what reads texts beside the event loop, or here where it takes no time. Raises Overloaded when too much waits."""
        if inline:
            return act(*args)
        return await self._texts.run(partial(act, *args))

    async def compiled_params(
        self, engine: ServingEngine, params: SamplingParams, requested: StructuredOutputField | None
    ) -> SamplingParams:
        """The params with their guide compiled. Raises ApiError 400 naming the field whose guide cannot be used."""
        if requested is None:
            return params
        width, eos = engine.facts.vocab_size, engine.client.eos_token_ids
        try:
            made = await self._compilations.run(
                partial(
                    compile_structured_output, requested.structured_output, engine.tokenizer, vocab_size=width, eos_token_ids=eos
                )
            )
        except OptionError as error:
            raise bad_request(f"{requested.param}: {error}", param=requested.param, code="invalid_value") from None
        return with_structured_output(params, made)

    async def warm(self, engine: ServingEngine) -> None:
        """Start what compiles guides, which takes seconds, before a guide comes."""
        try:
            await self.compiled_params(
                engine, SamplingParams(), StructuredOutputField(StructuredOutputParams(json_object=True), "response_format")
            )
        except (ApiError, PhalanxError) as error:
            logger.warning("structured output is not at hand: %s", error)

    def api_error(self, error: BaseException) -> ApiError:
        """The answer to an exception."""
        return api_error_of(error, retry_after=self.admission.retry_after())

    async def refresh(self) -> None:
        """Ask the engine for its counters, for a scrape; without an answer in time the last ones stand."""
        if self.engine is None or self.admission.phase is Phase.FAILED:
            return
        try:
            self.metrics.engine = await asyncio.wait_for(self.engine.client.stats(), STATS_SECONDS)
        except (TimeoutError, PhalanxError) as error:
            logger.warning("/metrics shows the engine's last counters: %s", error or "no answer in time")

    def close(self) -> None:
        self._texts.close()
        self._compilations.close()


def service_of(request: Request) -> Service:
    """The server that this request came to."""
    found: Service = request.app.state.service
    return found

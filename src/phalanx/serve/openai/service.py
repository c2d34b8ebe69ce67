# SPDX-License-Identifier: Apache-2.0
"""The state that all routes of a server share: admission control, metrics, worker threads and, once it has started, the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from phalanx.config.sampling_params import SamplingParams, StructuredOutputParams
from phalanx.engine.messages import AdapterFacts, EngineFacts, ModelState
from phalanx.errors import EngineClosed, OptionError, PhalanxError
from phalanx.log import get_logger
from phalanx.metrics import Metrics
from phalanx.serve.admission import AdmissionControl, Phase
from phalanx.serve.client import EngineClient
from phalanx.serve.expert_load import counters
from phalanx.serve.openai.api_errors import ApiError, api_error_of, bad_request, with_fields_of
from phalanx.serve.openai.large_bodies.gate import Gate
from phalanx.serve.openai.large_bodies.processes import LargeBodies, setup_of
from phalanx.serve.openai.prepare import Prepared
from phalanx.serve.openai.prompts import naming
from phalanx.serve.openai.request_params import StructuredOutputField, require_model, with_structured_output
from phalanx.serve.openai.responses.store import ResponseStore
from phalanx.serve.openai.threads import Threads
from phalanx.serve.openai.yes_no import YesNo
from phalanx.serve.output_parsing import OutputFormat
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
    """An engine that accepts requests, with the tokenizer of its model and the format of its outputs.

    escape_special_tokens: texts of special tokens in messages stay text. yes_no: as of `PromptContext`.
    """

    client: EngineClient
    tokenizer: Tokenizer
    output: OutputFormat
    created: int = field(default_factory=lambda: int(time.time()))
    escape_special_tokens: bool = False
    yes_no: YesNo | None = None

    @property
    def facts(self) -> EngineFacts:
        return self.client.facts


class Service:
    """One per server. model_name: the name of the model in the API. model_alias: another name that requests may use."""

    def __init__(
        self,
        *,
        model_name: str,
        admission: AdmissionControl,
        metrics: Metrics,
        model_alias: str | None = None,
        responses: ResponseStore | None = None,
    ) -> None:
        self.model_name, self.admission, self.metrics = model_name, admission, metrics
        self._own_names = list(dict.fromkeys([model_name, model_alias or model_name]))
        self.adapters: list[AdapterFacts] = []
        """Those that requests may name as their model."""
        self.changes_adapters = False
        self.changing_adapters = asyncio.Lock()
        self.responses = ResponseStore(count=0, seconds=0.0) if responses is None else responses
        self.engine: ServingEngine | None = None
        self.pooling = "last"
        self.sleep_mode = False
        """Whether /sleep, /wake_up and /weights/update are enabled."""
        self.model_states: list[ModelState] = [ModelState()]
        """As of the last change, of each engine."""
        self.at_close: list[Callable[[], None]] = []
        self._texts = Threads("tokenizer", TOKENIZER_THREADS, max_tasks=MAX_TEXTS, refused=metrics.refused)
        # Separate from texts: a compilation may take seconds. Each waits on a thread of its own for the compiler's processes.
        self._compilations = Threads(
            "structured output", MAX_WAITING_COMPILATIONS, max_tasks=MAX_WAITING_COMPILATIONS, refused=metrics.refused
        )
        self.parsing = asyncio.Lock()
        """Held by the request whose body is parsed on the event loop."""
        self.gate = Gate(refused=metrics.refused)
        self.large_bodies = LargeBodies(
            lambda: setup_of(self.require_engine()), lambda: self.names, refused=metrics.refused, accepted=metrics.accepted_field
        )

    @property
    def names(self) -> list[str]:
        """Of the model and its adapters; an adapter is also the model's name, a colon and its own, as in SGLang."""
        adapters = [adapter.name for adapter in self.adapters]
        return [*self._own_names, *adapters, *(f"{own}:{name}" for own in self._own_names for name in adapters)]

    def is_model(self, name: str) -> bool:
        """Whether requests get the model without an adapter by this name."""
        return name in self._own_names

    def name_in_answers(self, model: str | None) -> str:
        """What answers to a request for this model call it."""
        return self.model_name if model is None or self.is_model(model) else model

    def adapter_of(self, model: str | None) -> AdapterFacts | None:
        """The adapter that this name of a model means; None: none."""
        prefixes = ("", *(f"{own}:" for own in self._own_names))
        return next((each for prefix in prefixes for each in self.adapters if model == prefix + each.name), None)

    def with_adapter(self, params: SamplingParams, model: str | None) -> SamplingParams:
        """The params of a request for this model, which may be the name of an adapter."""
        adapter = self.adapter_of(model)
        return params if adapter is None else msgspec.structs.replace(params, adapter=adapter.name)

    def require_engine(self, model: str | None = None) -> ServingEngine:
        """The engine. Raises ApiError 404 for a model that is not served, EngineClosed if there is no engine yet or any more."""
        require_model(model, self.names)
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

    async def token_ids(self, prepared: Prepared[Any], engine: ServingEngine) -> list[list[int]]:
        """The token ids of each prompt. Raises as `Prepared.encoded`, and Overloaded."""
        if prepared.token_ids is not None:
            return prepared.token_ids
        return await self.run_on_thread(prepared.encoded, engine, inline=prepared.encodes_quickly)

    async def check(
        self, prompts: Sequence[list[int]], params: SamplingParams, engine: ServingEngine, name: Callable[[int], str | None]
    ) -> None:
        """Raises ApiError or RequestError for the first prompt that the engine would refuse. name: as of `Prepared`."""
        for index, tokens in enumerate(prompts):
            with naming(name(index)):
                engine.client.check(tokens, params)
            if len(prompts) > 1:
                await asyncio.sleep(0)

    async def compiled_params(
        self, engine: ServingEngine, params: SamplingParams, requested: StructuredOutputField | None
    ) -> SamplingParams:
        """The params with their structured output compiled. Raises ApiError 400 naming the field if it cannot be compiled."""
        if requested is None:
            return params
        try:
            compiled = await self._compilations.run(partial(compile_structured_output, requested.structured_output))
        except OptionError as error:
            raise bad_request(f"{requested.param}: {error}", param=requested.param, code="invalid_value") from None
        return with_structured_output(params, compiled)

    async def warm_up(self, engine: ServingEngine) -> None:
        """Start the compiler of structured output and the readers of large bodies, which takes seconds, before a request needs
        them."""
        try:
            await self.large_bodies.warm_up()
            await self.compiled_params(
                engine, SamplingParams(), StructuredOutputField(StructuredOutputParams(json_object=True), "response_format")
            )
        except (ApiError, PhalanxError) as error:
            logger.warning("a process that some requests need does not start: %s", error)

    def api_error(self, error: BaseException) -> ApiError:
        """The error response to an exception."""
        return api_error_of(error, retry_after=self.admission.retry_after())

    def api_error_at(self, path: str) -> Callable[[BaseException], ApiError]:
        """As `api_error`, with the names of the fields of this endpoint."""
        return lambda error: with_fields_of(path, self.api_error(error))

    @property
    def stalled(self) -> str:
        """Why no engine that takes requests makes progress; empty while one does."""
        if self.engine is None:
            return ""
        client = self.engine.client
        latest = client.latest_by_replica()
        reasons = [latest[number].stalled for number in client.alive]
        return reasons[0] if all(reasons) and reasons else ""

    async def refresh(self) -> None:
        """Update the engine's counters for a scrape; without an answer in time, the last ones stay."""
        if self.engine is None or self.admission.phase is Phase.FAILED:
            return
        try:
            client = self.engine.client
            self.metrics.engines = await asyncio.wait_for(client.stats_by_replica(), STATS_SECONDS)
            self.metrics.engines_up = client.alive
            if any(rank.moe_layers for rank in client.facts.ranks):
                experts = await asyncio.wait_for(client.experts_by_replica(), STATS_SECONDS)
                self.metrics.experts = await asyncio.to_thread(
                    lambda: {number: counters(stats) for number, stats in enumerate(experts) if stats.layers}
                )
        except (TimeoutError, PhalanxError) as error:
            logger.warning("/metrics shows the engine's last counters: %s", error or "the engine did not answer in time")

    def close(self) -> None:
        for close in self.at_close:
            close()
        self._texts.close()
        self._compilations.close()
        self.large_bodies.close()


def asleep(states: Sequence[ModelState]) -> str:
    """Why a sleeping engine takes no requests."""
    level = max(state.level for state in states)
    return f"the engine sleeps at level {level}: POST /wake_up" if level else "the engine falls asleep, by POST /sleep"


def service_of(request: Request) -> Service:
    """The service of the app that received this request."""
    service: Service = request.app.state.service
    return service

# SPDX-License-Identifier: Apache-2.0
"""Offline use: `LLM`, an engine behind plain calls."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from phalanx.config import EngineOptions, SamplingParams
from phalanx.config.generation import defaults_line, with_defaults
from phalanx.config.home import ensure_home
from phalanx.config.locate import locate_tokenizer
from phalanx.config.model import known_eos_ids
from phalanx.config.sources import long_option_name, place_process
from phalanx.engine.messages import EngineFacts, ModelChange, ModelState, RequestMode, Sleep, Stats, UpdateWeights, WakeUp
from phalanx.errors import PhalanxError, RequestError, UnknownOption
from phalanx.log import get_logger
from phalanx.serve.background_engine import BackgroundEngineClient
from phalanx.serve.chat_template import MessageDict
from phalanx.serve.completions import stream_completions
from phalanx.serve.outputs import CompletionDelta, RequestOutput
from phalanx.serve.structured_output.compiler import compile_structured_output
from phalanx.serve.structured_output.vocabulary import vocabulary_of
from phalanx.serve.tokenizer import Tokenizer

logger = get_logger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""

_MESSAGE_HINT = "give [{'role': 'user', 'content': '...'}]"


class LLM:
    """A model on one or many ranks, for scripts: load, generate, shut down.

        with LLM("demo", tensor_parallel_size=2) as llm:
            print(llm.generate("What is a rank?", SamplingParams(temperature=0)).outputs[0].text)

    model: a folder, a Hub id or "demo". options: the fields of `EngineOptions`; an unknown one is a TypeError that names the
    nearest one. The processes of the engine end with `shutdown`, with this object, or with this process, however it ends. Several
    threads may call the methods at once; their requests share batches. If the engine fails, every waiting call raises its error.

    Under torchrun (one process per rank, all with the same script), and with node_rank > 0, the constructor returns on rank 0 only:
    the other processes run ranks until rank 0 is done, and then leave the script with SystemExit.

    options: the given options. facts: the values that the engine chose. tokenizer: None with skip_tokenizer_init.
    default_sampling_params: of requests without `sampling_params`; the checkpoint's own, see the option generation_config.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        for name in options:
            if long := long_option_name(name):
                raise UnknownOption(f"LLM option {name!r} is unknown", next=f"did you mean {long!r}?")
        ensure_home()
        engine_options = EngineOptions.of(model=model, **options)
        if engine_options.plan == "auto":
            from phalanx.planner.auto import planned

            engine_options = planned(engine_options)
        self.options, local_rank = place_process(engine_options)
        if self.options.node_rank > 0:
            from phalanx.executor.node import join

            raise SystemExit(join(self.options, local_rank=local_rank))
        self.tokenizer: Tokenizer | None = None
        if not self.options.skip_tokenizer_init:
            # Before anything is started, so that a missing model is an error within milliseconds.
            folder = locate_tokenizer(self.options.tokenizer, self.options.model, self.options.revision)
            self.tokenizer = Tokenizer.load(folder)
        self._numbers = itertools.count()
        tokenizer = self.tokenizer
        self._engine = BackgroundEngineClient(self.options, None if tokenizer is None else partial(vocabulary_of, tokenizer))
        self._finalizer = weakref.finalize(self, self._engine.stop)
        client = self._engine.start()
        if not client.eos_token_ids and self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            client.eos_token_ids = list(known_eos_ids([self.tokenizer.eos_token_id], client.facts.vocab_size, "the tokenizer"))
        self.facts: EngineFacts = client.facts
        self.default_sampling_params = SamplingParams(**with_defaults({}, self.facts.sampling_defaults))
        logger.info("%s", defaults_line(self.facts.sampling_defaults))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        adapter: str | None = None,
    ) -> Any:
        """Complete one prompt (returns a RequestOutput) or a list of prompts (returns a list of RequestOutput in the same order).

        prompts: a text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, or a list of these; a list of ints is one prompt.
        sampling_params: one for all prompts, or one for each. use_tqdm: show a progress bar, for a list of prompts. adapter: the
        name of a loaded adapter, for all of them; without it, as each one's sampling_params say.

        All prompts are checked before the first one runs: a prompt that is too long raises PromptTooLong (with both numbers), and
        no work is lost. If the engine rejects a request later, or fails, the rest of the call is aborted and the error is raised.
        Ctrl-C aborts the requests of this call; the LLM stays usable.
        """
        single = _is_one(prompts)
        every = cast("list[Prompt]", [prompts] if single or not isinstance(prompts, Iterable) else list(prompts))
        jobs = self._jobs([self._tokens_of(prompt) for prompt in every], sampling_params, single=single, adapter=adapter)
        outputs = self._finish(jobs, use_tqdm=use_tqdm and not single)
        return outputs[0] if single else outputs

    def generate_async(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, and yield its RequestOutput each time it has grown; the last one is `finished`.

        Leaving the iterator early aborts the request. Errors in the prompt are raised at the call, before anything runs.
        """
        return self._grow(self._jobs([self._tokens_of(prompt)], sampling_params, single=True)[0])

    def chat(
        self,
        messages: Sequence[MessageDict] | Sequence[Sequence[MessageDict]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        adapter: str | None = None,
    ) -> Any:
        """Answer one conversation (returns a RequestOutput) or a list of them (returns a list), with the model's chat template.

        messages: [{"role": "user", "content": "..."}, ...]. `RequestOutput.prompt` is the rendered template. Otherwise like
        `generate`.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise RequestError(
                f"a chat must be a list of messages, or a list of such lists, not {_named(messages)}", next=_MESSAGE_HINT
            )
        single = isinstance(messages[0], Mapping)
        talks = cast("list[Sequence[MessageDict]]", [messages] if single else list(messages))
        variables = {"tools": tools, "add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        prompts = [self._tokens_of_chat(talk, **variables) for talk in talks]
        jobs = self._jobs(prompts, sampling_params, single=single, adapter=adapter)
        outputs = self._finish(jobs, use_tqdm=use_tqdm and not single)
        return outputs[0] if single else outputs

    def chat_async(
        self,
        messages: Sequence[MessageDict],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation, like `generate_async` for a prompt."""
        prompt = self._tokens_of_chat(messages, tools=tools, **(chat_template_kwargs or {}))
        return self._grow(self._jobs([prompt], sampling_params, single=True)[0])

    def sleep(self, level: int = 1, mode: RequestMode = "wait") -> ModelState:
        """Give the memory of the model back: level 1 moves weights to the host's memory, level 2 discards them; both discard the KV
        cache. mode: requests of other threads finish (wait), end with finish_reason "abort" (abort), or go on later (keep)."""
        return self._change(Sleep(level, mode))

    def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> ModelState:
        """Take the memory again, or a part of it. Discarded weights are read from their folder."""
        if unknown := [tag for tag in tags if tag not in ("weights", "kv_cache")]:
            raise RequestError(f"tag {unknown[0]!r} is unknown", next="use 'weights', 'kv_cache' or both")
        return self._change(WakeUp("weights" in tags, "kv_cache" in tags))

    def update_weights(self, folder: str | Path, mode: RequestMode = "wait") -> ModelState:
        """Read the weights of another checkpoint of the same model, on all ranks or none. Requests that run finish on the old
        weights, or end (abort). Raises the error for a folder that cannot be used: the old weights stay."""
        return self._change(UpdateWeights(str(Path(folder).resolve()), mode))

    def _change(self, message: ModelChange) -> ModelState:
        states = self._engine.run(self._engine.client.change_model(message))
        for state in states:
            if state.error is not None:
                raise PhalanxError.from_wire(state.error)
        return states[0]

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter, in peft's format, under a name that requests may give. Needs max_loras of at least 1.

        Raises AdapterError where the name is taken, and where the adapter cannot be used with this model: nothing has changed then.
        """
        self._engine.run(self._engine.client.load_adapter(name, str(Path(folder).absolute())))

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; those that have begun go on with it. Raises AdapterNotFound."""
        self._engine.run(self._engine.client.unload_adapter(name))

    def stats(self) -> Stats:
        """The current counters of the engine."""
        return self._engine.run(self._engine.client.stats())

    def shutdown(self) -> None:
        """End the engine and its ranks, and return when they have ended. Waiting calls raise EngineClosed. Can be called again."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # ---- requests ---------------------------------------------------------------------------------------------------------

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text of a prompt, if it has one, and its token ids."""
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or next(iter(prompt)) not in ("prompt", "prompt_token_ids"):
                raise RequestError(f"a prompt has the keys {list(prompt)}", next="give either 'prompt' or 'prompt_token_ids'")
            prompt = cast("Prompt", next(iter(prompt.values())))
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("a text prompt").encode(prompt)
        if isinstance(prompt, (Sequence, Mapping)) and _are_ids(prompt):
            return None, list(cast("Sequence[int]", prompt))
        raise RequestError(f"a prompt must be a text or a list of token ids, not {_named(prompt)}")

    def _tokens_of_chat(self, messages: Sequence[MessageDict], **variables: Any) -> tuple[str, list[int]]:
        tokenizer = self._need_tokenizer("a chat")
        if not messages:
            raise RequestError("a chat has no message", next=_MESSAGE_HINT)
        text = tokenizer.apply_chat_template(messages, **variables)
        # The template has already written the special tokens around the prompt.
        return text, tokenizer.encode(text, add_special_tokens=False)

    def _need_tokenizer(self, feature: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{feature} needs the tokenizer", held="skip_tokenizer_init is set", next="give token ids, or unset it"
            )
        return self.tokenizer

    def _jobs(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        single: bool,
        adapter: str | None = None,
    ) -> list[_Job]:
        """Requests that the engine accepts. Raises the first error."""
        client = self._engine.client
        every = [sampling_params or self.default_sampling_params] * len(prompts)
        if isinstance(sampling_params, Sequence):
            if single or len(sampling_params) != len(prompts):
                raise RequestError(
                    f"{len(sampling_params)} sampling_params do not match {len(prompts)} prompts",
                    next="give one for all, or one for each of a list of prompts",
                )  # fmt: skip
            every = list(sampling_params)
        jobs = []
        for (text, token_ids), params in zip(prompts, cast("list[SamplingParams]", every), strict=True):
            if not isinstance(params, SamplingParams):
                raise RequestError(f"sampling_params must be SamplingParams, not {_named(params)}")
            if params.pooling is not None:
                raise RequestError("pooling is for the server's /v1/embeddings", next="remove it")
            if adapter is not None:
                params = msgspec.structs.replace(params, adapter=adapter)
            client.check(token_ids, params)
            jobs.append(_Job(text, token_ids, self._prepared(params)))
        for job in jobs:
            job.request_id = str(next(self._numbers))
        return jobs

    def _prepared(self, params: SamplingParams) -> SamplingParams:
        """The params with their structured output compiled."""
        if params.stops:
            self._need_tokenizer("a stop string")
        if params.structured_output is None:
            return params
        self._need_tokenizer("structured output")
        return msgspec.structs.replace(params, structured_output=compile_structured_output(params.structured_output))

    # ---- execution -------------------------------------------------------------------------------------------------------

    def _finish(self, jobs: Sequence[_Job], *, use_tqdm: bool) -> list[RequestOutput]:
        client, tokenizer = self._engine.client, self.tokenizer
        with _progress(len(jobs), show=use_tqdm) as advance:

            async def one(job: _Job) -> RequestOutput:
                output = job.output()
                deltas = stream_completions(client, tokenizer, job.request_id, job.token_ids, job.params, coalesce=True)
                async with aclosing(deltas):
                    async for delta in deltas:
                        output.add(delta)
                advance()
                return output

            async def every() -> list[RequestOutput]:
                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(one(job)) for job in jobs]
                except* Exception as errors:
                    raise _first(errors) from None
                return [task.result() for task in tasks]

            return self._engine.run(every())

    async def _grow(self, job: _Job) -> AsyncIterator[RequestOutput]:
        """Pass deltas from the engine's event loop to the caller's, and add them to an output there."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[CompletionDelta | BaseException | None] = asyncio.Queue()
        client, tokenizer = self._engine.client, self.tokenizer

        async def pump() -> None:
            last: BaseException | None = None
            try:
                deltas = stream_completions(client, tokenizer, job.request_id, job.token_ids, job.params)
                async with aclosing(deltas):
                    async for delta in deltas:
                        loop.call_soon_threadsafe(queue.put_nowait, delta)
            except Exception as error:
                last = error
            loop.call_soon_threadsafe(queue.put_nowait, last)

        cancel = self._engine.begin(pump())
        output = job.output()
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                output.add(item)
                yield replace(output, outputs=[replace(part, token_ids=list(part.token_ids)) for part in output.outputs])
        finally:
            cancel()


@dataclass
class _Job:
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    request_id: str = ""

    def output(self) -> RequestOutput:
        return RequestOutput.empty(self.request_id, self.prompt, self.token_ids, self.params.n)


@contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Callable[[], Any]]:
    """A progress bar over `total` requests; yields the function that advances it by one."""
    if not show or total == 0:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True) as bar:
        yield bar.update


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, (str, Mapping)) or (isinstance(prompts, Sequence) and len(prompts) > 0 and _are_ids(prompts))


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)) and all(type(token) is int for token in prompt)


def _named(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first

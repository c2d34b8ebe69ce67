# SPDX-License-Identifier: Apache-2.0
"""Offline use: `LLM`. An engine behind plain calls; its event loop runs on a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from phalanx.config import EngineOptions, SamplingParams
from phalanx.config.locate import locate_tokenizer
from phalanx.config.sources import nearest_by_alias, placed
from phalanx.engine.messages import EngineFacts, Stats
from phalanx.errors import EngineClosed, RequestError, UnknownOption
from phalanx.plan.auto import planned
from phalanx.serve.chat_template import Message
from phalanx.serve.client import EngineClient
from phalanx.serve.fan_out import Piece, RequestOutput, completions, empty_output, grow
from phalanx.serve.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""

Result = TypeVar("Result")
_A_MESSAGE = "give [{'role': 'user', 'content': '...'}]"
_SETTLE = 15.0  # seconds that cancelled work may take to give back what it holds


class LLM:
    """A model on one or many ranks, for use from a script: load, generate, shut down.

        with LLM("demo", tensor_parallel_size=2) as llm:
            print(llm.generate("What is a rank?", SamplingParams(temperature=0)).outputs[0].text)

    model: a folder, a Hub id or "demo". options: the fields of `EngineOptions`; an unknown one is a TypeError that names the
    nearest. The processes of the engine end with `shutdown`, with this object, or with this process, however it ends. Methods may
    be called from many threads; requests of all of them share batches. An engine that fails raises its error in every call that
    waits.

    Under torchrun (one process per rank, all with the same script), and with node_rank > 0, only rank 0 returns from here: the
    others serve as ranks until it is done, and then leave the script by SystemExit.

    options, facts, tokenizer: what was asked, what the engine settled on, and the tokenizer (None with skip_tokenizer_init).
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        for name in options:
            if long := nearest_by_alias(name):
                raise UnknownOption(f"LLM option {name!r} is unknown", next=f"did you mean {long!r}?")
        self.options, local_rank = placed(planned(EngineOptions.of(model=model, **options)))
        if self.options.node_rank > 0:
            from phalanx.engine.executor import join

            raise SystemExit(join(self.options, local_rank=local_rank))
        self.tokenizer: Tokenizer | None = None
        if not self.options.skip_tokenizer_init:
            # Before anything is started: a model that is not there is known in milliseconds.
            asked = self.options
            self.tokenizer = Tokenizer.load(locate_tokenizer(asked.tokenizer, asked.model, asked.revision))
        self._numbers = itertools.count()
        self._engine = _Background(self.options)
        self._finalizer = weakref.finalize(self, self._engine.stop)
        client = self._engine.start()
        if not client.eos_token_ids and self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            client.eos_token_ids = [self.tokenizer.eos_token_id]
        self.facts: EngineFacts = client.facts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> Any:
        """Complete one prompt (gives a RequestOutput) or a list of them (gives a list of RequestOutput, in the same order).

        prompts: a text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, or a list of such; a list of ints is one prompt.
        sampling_params: one for all prompts, or one for each. use_tqdm: show progress, for a list of prompts.

        Everything is checked before anything runs: a prompt that is too long raises PromptTooLong (with both numbers) and no work
        is lost. Should the engine refuse a request later, or fail, the rest of the call is aborted and the error raised. Ctrl-C
        aborts the requests of this call; the LLM goes on.
        """
        single = _is_one(prompts)
        wanted = cast("list[Prompt]", [prompts] if single or not isinstance(prompts, Iterable) else list(prompts))
        jobs = self._jobs([self._tokens_of(prompt) for prompt in wanted], sampling_params, single=single)
        outputs = self._finish(jobs, use_tqdm=use_tqdm and not single)
        return outputs[0] if single else outputs

    def generate_async(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, and give its RequestOutput again each time that it has grown; the last one is `finished`.

        Leaving the iterator early aborts the request. What is wrong with the prompt raises here, before anything runs.
        """
        return self._grow(self._jobs([self._tokens_of(prompt)], sampling_params, single=True)[0])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> Any:
        """Answer one conversation (gives a RequestOutput) or a list of them (gives a list), through the model's chat template.

        messages: [{"role": "user", "content": "..."}, ...]. `RequestOutput.prompt` is the rendered template. Else as `generate`.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise RequestError(f"a chat is a list of messages, or a list of such lists, not {_named(messages)}", next=_A_MESSAGE)
        single = isinstance(messages[0], Mapping)
        talks = cast("list[Sequence[Message]]", [messages] if single else list(messages))
        variables = {"tools": tools, "add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        jobs = self._jobs([self._tokens_of_chat(talk, **variables) for talk in talks], sampling_params, single=single)
        outputs = self._finish(jobs, use_tqdm=use_tqdm and not single)
        return outputs[0] if single else outputs

    def chat_async(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation as `generate_async` completes a prompt."""
        prompt = self._tokens_of_chat(messages, tools=tools, **(chat_template_kwargs or {}))
        return self._grow(self._jobs([prompt], sampling_params, single=True)[0])

    def stats(self) -> Stats:
        """What the engine counts, now."""
        return self._engine.run(self._engine.client.stats())

    def shutdown(self) -> None:
        """End the engine and its ranks, and return when they are gone. Calls that wait raise EngineClosed. May be called again."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # ---- what is asked ---------------------------------------------------------------------------------------------------

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text of a prompt, if it is one, and its token ids."""
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or next(iter(prompt)) not in ("prompt", "prompt_token_ids"):
                raise RequestError(f"a prompt with {list(prompt)} was given", next="give either 'prompt' or 'prompt_token_ids'")
            prompt = cast("Prompt", next(iter(prompt.values())))
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("a text prompt was given").encode(prompt)
        if isinstance(prompt, (Sequence, Mapping)) and _are_ids(prompt):
            return None, list(cast("Sequence[int]", prompt))
        raise RequestError(f"a prompt is a text or a list of token ids, not {_named(prompt)}")

    def _tokens_of_chat(self, messages: Sequence[Message], **variables: Any) -> tuple[str, list[int]]:
        tokenizer = self._need_tokenizer("a chat was asked for")
        if not messages:
            raise RequestError("a chat without a message was asked for", next=_A_MESSAGE)
        text = tokenizer.apply_chat_template(messages, **variables)
        # The template wrote the special tokens that stand around a prompt.
        return text, tokenizer.encode(text, add_special_tokens=False)

    def _need_tokenizer(self, asked: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(asked, held="skip_tokenizer_init is set", next="give token ids, or load the tokenizer")
        return self.tokenizer

    def _jobs(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        single: bool,
    ) -> list[_Job]:
        """Requests that the engine will take, or the first error."""
        client = self._engine.client
        every = [sampling_params or SamplingParams()] * len(prompts)
        if isinstance(sampling_params, Sequence):
            if single or len(sampling_params) != len(prompts):
                raise RequestError(
                    f"{len(sampling_params)} sampling_params were given", held=f"there are {len(prompts)} prompts",
                    next="give one for all, or one for each of a list of prompts",
                )  # fmt: skip
            every = list(sampling_params)
        jobs = []
        for (text, token_ids), params in zip(prompts, cast("list[SamplingParams]", every), strict=True):
            if not isinstance(params, SamplingParams):
                raise RequestError(f"sampling_params are SamplingParams, not {_named(params)}")
            client.check(token_ids, params)
            jobs.append(_Job(text, token_ids, self._prepared(params)))
        for job in jobs:
            job.request_id = str(next(self._numbers))
        return jobs

    def _prepared(self, params: SamplingParams) -> SamplingParams:
        """The params with their guide compiled."""
        if params.stops:
            self._need_tokenizer("a stop string was given")
        if params.guide is None:
            return params
        from phalanx.serve.grammar import compile_guide

        tokenizer = self._need_tokenizer("structured output was asked for")
        client = self._engine.client
        guide = compile_guide(params.guide, tokenizer, vocab_size=client.facts.vocab_size, eos_token_ids=client.eos_token_ids)
        return msgspec.structs.replace(params, guide=guide)

    # ---- what runs -------------------------------------------------------------------------------------------------------

    def _finish(self, jobs: Sequence[_Job], *, use_tqdm: bool) -> list[RequestOutput]:
        client, tokenizer = self._engine.client, self.tokenizer
        with _progress(len(jobs), show=use_tqdm) as advance:

            async def one(job: _Job) -> RequestOutput:
                output = job.output()
                parts = completions(client, tokenizer, job.request_id, job.token_ids, job.params, patient=True)
                async with aclosing(parts):
                    async for piece in parts:
                        grow(output, piece)
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
        """Pieces come from the engine's loop to the caller's, and grow an output there."""
        here = asyncio.get_running_loop()
        ready: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        client, tokenizer = self._engine.client, self.tokenizer

        async def pump() -> None:
            last: BaseException | None = None
            try:
                parts = completions(client, tokenizer, job.request_id, job.token_ids, job.params)
                async with aclosing(parts):
                    async for piece in parts:
                        here.call_soon_threadsafe(ready.put_nowait, piece)
            except Exception as error:
                last = error
            here.call_soon_threadsafe(ready.put_nowait, last)

        cancel = self._engine.begin(pump())
        output = job.output()
        try:
            while (item := await ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                grow(output, item)
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
        return empty_output(self.request_id, self.prompt, self.token_ids, self.params.n)


class _Background:
    """An EngineClient and its event loop on a thread. Holds nothing of the LLM, so that the LLM can be collected."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._client: EngineClient | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="phalanx LLM", daemon=True)
        self._lock = threading.Lock()
        self._stopped = False
        self._pid = os.getpid()
        self._thread.start()

    @property
    def client(self) -> EngineClient:
        if os.getpid() != self._pid:
            raise EngineClosed(
                "a request was made", held=f"this LLM belongs to process {self._pid}, which forked", next="make another"
            )
        if self._client is None or self._stopped:
            raise EngineClosed("a request was made", held="this LLM was shut down", next="make another")
        return self._client

    def start(self) -> EngineClient:
        try:
            self._client = self.run(EngineClient.start(self._options))
        except BaseException:
            self.stop()
            raise
        return self._client

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run to the end on the engine's loop. When this thread is interrupted, the work is cancelled and has ended on return."""
        done = threading.Event()
        held: list[asyncio.Task[Result]] = []

        def begin() -> None:
            held.append(self._loop.create_task(work))
            held[0].add_done_callback(lambda _: done.set())

        self._loop.call_soon_threadsafe(begin)
        try:
            done.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: held[0].cancel())
            done.wait(_SETTLE)
            raise
        return held[0].result()

    def begin(self, work: Coroutine[Any, Any, None]) -> Callable[[], None]:
        """Run on the engine's loop, and go on here. Returns what cancels it; cancelling what has ended does nothing."""
        held: list[asyncio.Task[None]] = []
        self._loop.call_soon_threadsafe(lambda: held.append(self._loop.create_task(work)))

        def cancel() -> None:
            if not self._stopped:
                self._loop.call_soon_threadsafe(lambda: held[0].cancel())

        return cancel

    def stop(self) -> None:
        """Close the client and end the thread. Safe at the end of the interpreter, and from any thread."""
        if os.getpid() != self._pid:
            return  # a forked copy has neither the thread nor a say in the engine
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        if threading.current_thread() is self._thread:  # collected by a garbage collection that ran there
            if self._client is not None:
                self._client.kill()
            self._loop.stop()
            return
        try:
            if self._client is not None:
                self.run(self._client.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_SETTLE)
            if not self._thread.is_alive():
                self._loop.close()


@contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Callable[[], Any]]:
    """A progress bar over so many requests; gives the function that counts one more."""
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

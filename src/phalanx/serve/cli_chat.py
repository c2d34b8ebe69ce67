# SPDX-License-Identifier: Apache-2.0
"""`phalanx generate` and `phalanx chat` in a terminal: text goes to stdout as it arrives, everything else to stderr."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx

from phalanx.config import EngineOptions, SamplingParams
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import RawOptions, build_options
from phalanx.errors import EngineError, PhalanxError, RequestError
from phalanx.serve.llm import LLM
from phalanx.serve.outputs import RequestOutput

Messages = list[dict[str, str]]
Respond = Callable[[Messages], AsyncIterator[str]]


def complete(options: EngineOptions, prompts: Sequence[str], params: SamplingParams) -> None:
    """Print the completions in order. One prompt is streamed; with several, each completion is printed when all are done."""
    with LLM(**options.model_dump()) as llm:
        if len(prompts) > 1:
            for output in llm.generate(list(prompts), params):
                print(output.outputs[0].text, flush=True)
            return
        asyncio.run(_print(_new_text(llm.generate_async(prompts[0], params))))


def talk(target: str, raw_options: RawOptions, *, system: str | None, max_tokens: int, temperature: float) -> int:
    """Read questions from stdin, one per line, and print the answers until the input ends. Returns the exit status."""
    history: Messages = [{"role": "system", "content": system}] if system else []
    if target.startswith(("http://", "https://")):
        key = next(iter(build_options(ServeOptions, raw_options).read_api_keys()), None)
        return _talk(history, _over_http(target, key, max_tokens=max_tokens, temperature=temperature), target)
    raw_options = RawOptions({**raw_options.values, "model": target}, {**raw_options.origins, "model": "MODEL"})
    with LLM(**build_options(EngineOptions, raw_options).model_dump()) as llm:
        return _talk(history, _of_llm(llm, SamplingParams(max_tokens=max_tokens, temperature=temperature)), target)


HELP = """/help          this list
/clear         begin a new conversation
/system TEXT   begin a new conversation with this system message
/history       show the conversation
/exit          end (or Ctrl-D)"""


def _talk(messages: Messages, respond: Respond, target: str) -> int:
    """Answer one question after the other; an error ends only its own question. At a terminal, lines are edited, earlier ones come
    back with the arrow keys, and one that begins with a slash is a command.

    Returns 1 if a question had no answer and stdin is not a terminal, else 0. Lines are read outside of any event loop, which would
    delay Ctrl-C until the end of the line.
    """
    interactive, status = sys.stdin.isatty(), 0
    if interactive:
        import readline  # noqa: F401  input() edits lines and keeps earlier ones where it is loaded

        print(f"A chat with {target}. /help lists what else a line may be; Ctrl-D ends it.", file=sys.stderr)
    while True:
        line = _read_line(interactive)
        if line is None or (interactive and line == "/exit"):
            return status
        if not line:
            continue
        if interactive and line.startswith("/"):
            messages = _command(line, messages)
            continue
        question = [*messages, {"role": "user", "content": line}]
        try:
            text = asyncio.run(_print(respond(question)))
        except EngineError:
            raise
        except PhalanxError as error:
            print(f"phalanx: {error}", file=sys.stderr)
            status = 0 if interactive else 1
            continue
        messages = [*question, {"role": "assistant", "content": text}]


def _read_line(interactive: bool) -> str | None:
    """The next line without the space around it; None at the end of the input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except EOFError:
        print(file=sys.stderr)
        return None


def _command(line: str, messages: Messages) -> Messages:
    """Obey a line that begins with a slash; returns the conversation that goes on."""
    name, _, text = line.partition(" ")
    system = [message for message in messages if message["role"] == "system"]
    if name == "/clear":
        return system
    if name == "/system":
        return [{"role": "system", "content": text.strip()}] if text.strip() else []
    if name == "/history":
        print("\n".join(f"{message['role']}: {message['content']}" for message in messages) or "nothing yet", file=sys.stderr)
        return messages
    print(HELP if name == "/help" else f"there is no {name}\n{HELP}", file=sys.stderr)
    return messages


async def _print(parts: AsyncIterator[str]) -> str:
    """Print parts of a text as they arrive, and return the text."""
    text = ""
    try:
        async for part in parts:
            text += part
            print(part, end="", flush=True)
    finally:
        if text:
            print(flush=True)
    return text


async def _new_text(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[str]:
    printed = 0
    async for output in outputs:
        text = output.outputs[0].text
        yield text[printed:]
        printed = len(text)


def _of_llm(llm: LLM, params: SamplingParams) -> Respond:
    def respond(messages: Messages) -> AsyncIterator[str]:
        return _new_text(llm.chat_async(messages, params))

    return respond


def _over_http(url: str, key: str | None, *, max_tokens: int, temperature: float) -> Respond:
    """Answers of the first model of an OpenAI-compatible server. Its reasoning goes to stderr."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def respond(messages: Messages) -> AsyncIterator[str]:
        try:
            async with httpx.AsyncClient(base_url=base, headers=headers, timeout=httpx.Timeout(600.0, connect=10.0)) as client:
                models = _checked(await client.get("/v1/models")).json()
                body = {
                    "model": models["data"][0]["id"], "messages": messages, "stream": True, "max_tokens": max_tokens,
                    "temperature": temperature,
                }  # fmt: skip
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code != 200:
                        await response.aread()
                        _checked(response)
                    thinking = False
                    async for line in _lines(response):
                        if line.startswith("data: ") and line != "data: [DONE]":
                            delta = _delta(json.loads(line.removeprefix("data: ")))
                            if reasoning := delta.get("reasoning_content"):
                                thinking = True
                                print(reasoning, end="", file=sys.stderr, flush=True)
                            if content := delta.get("content"):
                                if thinking:
                                    print(end="\n\n", file=sys.stderr, flush=True)
                                thinking = False
                                yield content
        except httpx.ConnectError as error:
            raise EngineError(
                f"the server {base} cannot be reached", why=str(error), next="start one with `phalanx serve`"
            ) from None
        except (httpx.HTTPError, json.JSONDecodeError, LookupError) as error:
            raise EngineError(
                f"the server {base} did not answer as an OpenAI server", why=f"{type(error).__name__}: {error}"
            ) from None

    return respond


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines of server-sent events, which end at LF or CR LF: those of httpx also end at U+2028, which a text may have."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code == 200:
        return response
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.text[:200]
    raise RequestError(f"the server answered with status {response.status_code}", why=message)


def _delta(event: dict[str, Any]) -> dict[str, str]:
    if "error" in event:
        raise RequestError("the server ended the answer with an error", why=json.dumps(event["error"]))
    delta: dict[str, str] = event["choices"][0]["delta"] if event["choices"] else {}
    return delta

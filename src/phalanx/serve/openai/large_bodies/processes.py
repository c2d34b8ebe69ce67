# SPDX-License-Identifier: Apache-2.0
"""`LargeBodies`: the process whose forks read the large bodies of a server (see `worker`), and what they made of each.

The event loop and what parses a body in a thread beside it take turns at one interpreter lock, and at the cores of a loaded
machine: eight megabytes of token ids held up every stream for 0.2 to 1.5 s. A process of a lower priority takes only what the
streams leave.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from phalanx.errors import EngineClosed
from phalanx.serve.forks.server import ForkServer
from phalanx.serve.openai.api_errors import ApiError
from phalanx.serve.openai.body import parse
from phalanx.serve.openai.large_bodies import messages
from phalanx.serve.openai.large_bodies.messages import (
    ApiErrorMessage,
    Opening,
    PreparedMessage,
    ResponseBody,
    Setup,
    TextCount,
    Wanted,
)
from phalanx.serve.openai.prepare import Answer, Endpoint, Prepared, PreparedResponse, Result
from phalanx.serve.openai.prompt_context import PromptContext
from phalanx.serve.openai.request_params import StructuredOutputField
from phalanx.serve.openai.schema.responses_request import ResponsesRequest
from phalanx.serve.openai.threads import Threads

FEW_CORES = 4
AT_ONCE = 1 if (os.cpu_count() or 1) <= FEW_CORES else 2
"""Bodies that are read at once. On few cores a second one would take the streams' time."""
MAX_WAITING = 64
"""Bodies that are read or wait for it; each has up to 8 MiB."""
NICE = 10
"""How much lower the priority is than the server's."""
_ASK_SECONDS = 10.0
"""In which the event loop says what is stored. One that has ended says nothing."""

Accepted = Callable[[str], None]
StoredLookup = Callable[[Wanted], Sequence[bytes | memoryview]]
"""The JSON of an item, or of the lists of items of a conversation, the first ones first. Raises ApiError."""


class LargeBodies:
    """setup: describes the server's engine; names: of the model and its adapters, as they are now; refused: counts a refusal."""

    def __init__(
        self, setup: Callable[[], Setup], names: Callable[[], list[str]], *, refused: Callable[[str], None], accepted: Accepted
    ) -> None:
        self._accepted, self._names = accepted, names
        self._threads = Threads("large bodies", AT_ONCE, max_tasks=MAX_WAITING, refused=refused)
        self.forks = ForkServer(
            "large bodies", "phalanx.serve.openai.large_bodies.worker:make_task", at_once=AT_ONCE, nice=NICE,
            seconds=messages.MAX_SECONDS, memory=messages.MAX_BYTES, setup=lambda: messages.encode(setup()),
        )  # fmt: skip

    async def warm_up(self) -> None:
        """Start the process before a large body needs it: on a busy machine, starting a program holds up the streams, too."""
        await self._threads.run(self.forks.start)

    def close(self) -> None:
        """End the process. Threads that wait for a fork end with it, or the interpreter would wait for them."""
        self._threads.close()
        self.forks.close()

    async def read(self, endpoint: Endpoint[Any, Result], body: Sequence[bytes], lookup: StoredLookup) -> Result:
        """What a body says. body: its parts. lookup: finds what is stored; called on the event loop. Raises ApiError and
        Overloaded."""
        loop, opening = asyncio.get_running_loop(), Opening(endpoint.path, self._names())

        async def look(wanted: Wanted) -> Sequence[bytes | memoryview]:
            return lookup(wanted)

        def ask(wanted: Wanted) -> Sequence[bytes | memoryview]:
            return asyncio.run_coroutine_threadsafe(look(wanted), loop).result(_ASK_SECONDS)

        def read() -> tuple[list[str], Any]:
            try:
                with self.forks.task() as fork:
                    reply = _reply(fork, opening, body, ask)
            except (OSError, EOFError):  # it has ended, or says nothing any more
                raise EngineClosed("the server was shut down") if self.forks.closed else messages.too_much() from None
            if isinstance(reply, ApiErrorMessage):
                raise reply.error()
            return reply.accepted, _result(reply)

        result: Result
        accepted, result = await self._threads.run(read)
        for field in accepted:
            self._accepted(field)
        return result


def _reply(
    fork: Connection, opening: Opening, body: Sequence[bytes], ask: StoredLookup
) -> ResponseBody | PreparedMessage | ApiErrorMessage:
    """What a fork makes of a body."""
    for frame in (messages.encode(opening), *filter(None, body), b""):
        fork.send_bytes(frame)
    while isinstance(reply := messages.decode_reply(fork.recv_bytes()), Wanted):
        try:
            texts = ask(reply)
        except ApiError as error:
            fork.send_bytes(messages.encode(TextCount(0, ApiErrorMessage.of(error))))
            continue
        fork.send_bytes(messages.encode(TextCount(len(texts))))
        for text in texts:
            fork.send_bytes(text)
    return reply


def setup_of(context: PromptContext) -> Setup:
    """What the process is told of an engine."""
    tokenizer, output = context.tokenizer, context.output
    return Setup(
        facts=context.facts, tokenizer=tokenizer.text, special=tokenizer.special,
        split_special_tokens=tokenizer.backend.encode_special_tokens, templates=tokenizer.chat_templates, origin=tokenizer.origin,
        reasoning=output.reasoning, tools=output.tools,
        markers=output.markers.special, escape_special_tokens=context.escape_special_tokens, yes_no=context.yes_no,
    )  # fmt: skip


def _result(reply: ResponseBody | PreparedMessage) -> Answer | Prepared[Any] | PreparedResponse:
    """What the reply says to the server."""
    if isinstance(reply, ResponseBody):
        content = reply.content
        return Answer(lambda: content)
    field = None if reply.structured_output is None else StructuredOutputField(reply.structured_output, str(reply.param))
    token_ids = [messages.unpacked(one) for one in reply.token_ids]
    request = parse(reply.request, _KINDS[reply.kind])
    prepared: Prepared[Any] = Prepared(request, reply.params, field, reply.texts or token_ids, token_ids)
    if reply.items is None:
        return prepared
    return PreparedResponse(parse(reply.response, ResponsesRequest), reply.items, prepared)


_KINDS = {kind.__name__: kind for kind in messages.PLACEHOLDERS}

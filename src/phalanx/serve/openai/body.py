# SPDX-License-Identifier: Apache-2.0
"""Read and validate request bodies, with limits on size, nesting and time.

A body has a size limit (413), and a large one limits on its numbers of values, members and containers (400): beyond them one takes
up to 4 s to read, and other large ones wait. A parser holds the interpreter lock, so that even on a thread its time would delay
every stream: a large body is read by another process, within limits of time and memory (`large_bodies`). pydantic's JSON parser
rejects nesting beyond 200 levels, lone surrogates, and numbers beyond the range of a double.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from phalanx.serve.openai.api_errors import ApiError, bad_request, clip, validation_api_error
from phalanx.serve.openai.large_bodies.gate import Gate

MAX_BODY_BYTES = 8 * 2**20
"""A million tokens are about 4 MiB of English text; token ids in JSON take up to 8 bytes each."""
LARGE_BYTES = 64 * 2**10
"""A body of this size is parsed in about a millisecond; a larger one would delay the event loop."""
SMALL_BYTES = 4 * 2**10
MAX_VALUES = 2**19
"""Values of a body. So many token ids are parsed in 70 ms."""
MAX_MEMBERS = 2**15
MAX_CONTAINERS = 2**14
"""Objects and lists of a body: each takes as long as 30 numbers."""
SCANNED_BYTES = 2**16
"""Bytes that are scanned at once: milliseconds at worst, after which the event loop may run."""

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")

_ESCAPED = re.compile(rb"\\.", re.DOTALL)


class RequestRoute(APIRoute):
    """A route whose function takes nothing but the request: FastAPI would look for its other parameters for each request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


async def read_request(
    request: Request,
    model: type[Model],
    prepare: Callable[[Model], Result],
    prepare_large: Callable[[Sequence[bytes]], Awaitable[Result]],
    *,
    refers_to_much: Callable[[Model], bool] = lambda _: False,
) -> Result:
    """`prepare` of the body of `request`, validated as `model`; of a large body, which must not be parsed here, `prepare_large`,
    with the parts in which it came: to join them would hold up the streams. refers_to_much: whether a small body must be treated as
    a large one.

    Raises ApiError 400, 408 or 413, and what the two raise.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise bad_request("the body must be JSON, and Content-Type application/json", code="invalid_content_type")
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
        raise bad_request(
            f"Content-Encoding {clip(encoding)!r} is not supported; send the body as it is", code="unsupported_content_encoding"
        )
    service = request.app.state.service
    async with AsyncExitStack() as place:
        parts = without_mark(await _bounded(request, service.gate, place))
        if sum(map(len, parts)) > LARGE_BYTES:
            return await prepare_large(parts)
    body = b"".join(parts)
    accepted: set[str] = set()
    async with service.parsing:
        parsed = parse(body, model, accepted)
        result = None if refers_to_much(parsed) else prepare(parsed)
        if len(body) > SMALL_BYTES:  # of many that have arrived together, one is parsed in each iteration of the event loop
            await asyncio.sleep(0)
    if result is None:
        return await prepare_large([body])
    for field in accepted:
        service.metrics.accepted_field(field)
    return result


async def read_small_request(request: Request, model: type[Model]) -> Model:
    """The body of `request`, validated as `model`, which has a few short fields. Raises ApiError as `read_request`, and 400 for a
    large body."""

    async def too_large(parts: Sequence[bytes]) -> Model:
        raise bad_request(f"the body is too large: {sum(map(len, parts)):,} bytes for a few short fields", code="invalid_value")

    return await read_request(request, model, lambda parsed: parsed, too_large)


def without_mark(parts: list[bytes]) -> list[bytes]:
    """The parts of a body without its byte order mark, which RFC 8259 lets a reader ignore. Raises ApiError 400 for UTF-16."""
    head = b"".join(part[:4] for part in parts[:4])[:4]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise bad_request("the body must be UTF-8; it begins with the byte order mark of UTF-16", code="invalid_encoding")
    if not head.startswith(codecs.BOM_UTF8):
        return parts
    beginning = b"".join(parts[:4])
    return [beginning[len(codecs.BOM_UTF8) :], *parts[4:]]


def check_counts(text: bytes, param: str | None = None) -> None:
    """Raise ApiError 400 for JSON with too many values, members or containers. param: the field that has it; None: the body.

    Text that is not JSON may pass; then the parser finds its error.
    """
    values = members = containers = 0
    in_string, rest = False, b""
    for start in range(0, len(text), SCANNED_BYTES):
        part = rest + text[start : start + SCANNED_BYTES]
        if b"\\" in part:
            part = _ESCAPED.sub(b"", part)  # each escape is a pair, so what is left at the end begins one
        rest = b"\\" if part.endswith(b"\\") else b""
        pieces = part.removesuffix(b"\\").split(b'"')
        outside = b" ".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0
        values += outside.count(b",")
        members += outside.count(b":")
        containers += outside.count(b"[") + outside.count(b"{")
        for count, limit, name in (
            (values, MAX_VALUES, "values"), (members, MAX_MEMBERS, "members of objects"),
            (containers, MAX_CONTAINERS, "objects and lists"),
        ):  # fmt: skip
            if count > limit:
                message = f"{param or 'the body'} has more than {limit} {name}"
                raise bad_request(message, param=param, code="too_many_values")


def parse(body: bytes, model: type[Model], accepted: set[str] | None = None) -> Model:
    """Validate JSON. Raises ApiError 400 naming the field. accepted: gets the fields that are accepted without effect."""
    try:
        return model.model_validate_json(body, context=accepted)
    except ValidationError as error:
        raise validation_api_error(error, model) from None


def validated(fields: Mapping[str, Any], model: type[Model]) -> Model:
    """The same of a body that another one was translated to."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise validation_api_error(error, model) from None


async def _bounded(request: Request, gate: Gate, place: AsyncExitStack) -> list[bytes]:
    """The parts of the body. place: gets the place of a large one."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 15 or int(length) > MAX_BODY_BYTES):
        raise _too_large()
    parts, size, stream = [], 0, request.stream()
    large = length.isdigit() and int(length) > LARGE_BYTES  # what the client sends meanwhile stays in its socket
    try:
        if not large:
            async for part in stream:
                size += len(part)
                parts.append(part)
                if large := size > LARGE_BYTES:
                    break
        if large:
            await place.enter_async_context(gate.place())
            async with gate.arriving():
                async for part in stream:
                    size += len(part)
                    if size > MAX_BODY_BYTES:
                        raise _too_large()
                    parts.append(part)
    except ClientDisconnect:
        raise bad_request("the body is incomplete: the client disconnected") from None
    return parts


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"the body is larger than the limit of {MAX_BODY_BYTES} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def completed_object(text: str) -> dict[str, Any] | str:
    """A JSON object that is given as text; one that is cut off is completed with what it has, and no text is an empty object.

    A model that reached its limit of tokens wrote such text, and its client sends it back. What cannot be completed stays text.
    """
    if not text.strip():
        return {}
    try:
        value = from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text

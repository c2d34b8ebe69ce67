# SPDX-License-Identifier: Apache-2.0
"""From the bytes of a body to a checked request, with bounds on everything: size, nesting, and the time that either costs.

A body is read with a cap on its bytes (413) and parsed by pydantic's JSON reader, which refuses nesting beyond 200 levels, lone
surrogates, and numbers that no double holds. Grammars that a client brings are bounded again here, because compilers recurse over
them (`serve.json_schema` bounds schemas).
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from phalanx.serve.openai.api_errors import ApiError, bad_request, validation_api_error

MAX_BODY_BYTES = 8 * 2**20
"""A million tokens are some 4 MiB of English text; token ids as text take up to 8 bytes each."""
THREAD_BYTES = 64 * 2**10
"""A body of this size parses in about a millisecond; a larger one must not hold up the event loop."""
MAX_GRAMMAR_CHARACTERS = 2**16
MAX_GRAMMAR_DEPTH = 100

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The body of `request` as a `model`. Raises ApiError 400 or 413."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise bad_request("the body must be JSON, and Content-Type application/json", code="invalid_content_type")
    body = await _bounded(request)
    if len(body) <= THREAD_BYTES:
        return parse(body, model)
    return await asyncio.to_thread(parse, body, model)


def parse(body: bytes, model: type[Model]) -> Model:
    """Validate JSON. Raises ApiError 400 that names the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise validation_api_error(error, model) from None


async def _bounded(request: Request) -> bytes:
    too_large = ApiError(
        413,
        f"the body is larger than {MAX_BODY_BYTES} bytes, the most that is read",
        code="request_too_large",
        headers={"Connection": "close"},
    )
    said = request.headers.get("content-length", "")
    if said.isdigit() and (len(said) > 15 or int(said) > MAX_BODY_BYTES):
        raise too_large
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise too_large
            pieces.append(piece)
    except ClientDisconnect:
        raise bad_request("the body ended early") from None
    return b"".join(pieces)


def check_grammar(text: str, param: str) -> None:
    """Raise ApiError 400 for a regular expression or grammar that is too long, nested too deeply, or holds a NUL character."""
    if "\0" in text:
        raise bad_request(f"{param} holds a NUL character", param=param, code="invalid_value")
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise bad_request(f"{param} is longer than {MAX_GRAMMAR_CHARACTERS} characters", param=param, code="grammar_too_large")
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            if depth > MAX_GRAMMAR_DEPTH:
                raise bad_request(f"{param} is nested deeper than {MAX_GRAMMAR_DEPTH} levels", param=param, code="grammar_too_deep")
        elif character in ")]}":
            depth = max(0, depth - 1)


def json_object(text: str, param: str) -> dict[str, Any]:
    """A JSON object that a client sent as text. Raises ApiError 400."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"{param} is not valid JSON: {error}", param=param, code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"{param} must be a JSON object", param=param, code="invalid_value")
    return value

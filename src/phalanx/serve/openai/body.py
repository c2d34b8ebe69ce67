# SPDX-License-Identifier: Apache-2.0
"""Read and validate request bodies, with limits on size, nesting and time.

A body has a size limit (413). pydantic's JSON parser rejects nesting beyond 200 levels, lone surrogates, and numbers beyond the
range of a double. Grammars of clients have further limits here, because compilers recurse over them
(`structured_output.json_schema` limits schemas).
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from phalanx.serve.openai.api_errors import ApiError, bad_request, validation_api_error

MAX_BODY_BYTES = 8 * 2**20
"""A million tokens are about 4 MiB of English text; token ids in JSON take up to 8 bytes each."""
THREAD_BYTES = 64 * 2**10
"""A body of this size is parsed in about a millisecond; a larger one would delay the event loop."""
MAX_GRAMMAR_CHARACTERS = 2**16
MAX_GRAMMAR_DEPTH = 100

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The body of `request`, validated as `model`. Raises ApiError 400 or 413."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise bad_request("the body must be JSON, and Content-Type application/json", code="invalid_content_type")
    body = await _bounded(request)
    if len(body) <= THREAD_BYTES:
        return parse(body, model)
    return await asyncio.to_thread(parse, body, model)


def parse(body: bytes, model: type[Model]) -> Model:
    """Validate JSON. Raises ApiError 400 naming the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise validation_api_error(error, model) from None


async def _bounded(request: Request) -> bytes:
    too_large = ApiError(
        413,
        f"the body is larger than the limit of {MAX_BODY_BYTES} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 15 or int(length) > MAX_BODY_BYTES):
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise bad_request("the body is incomplete: the client disconnected") from None
    return b"".join(parts)


def check_grammar(text: str, param: str) -> None:
    """Raise ApiError 400 for a regular expression or grammar that is too long, nested too deeply, or contains a NUL character."""
    if "\0" in text:
        raise bad_request(f"{param} contains a NUL character", param=param, code="invalid_value")
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
    """Parse a JSON object that is given as text. Raises ApiError 400."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"{param} is not valid JSON: {error}", param=param, code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"{param} must be a JSON object", param=param, code="invalid_value")
    return value

# SPDX-License-Identifier: Apache-2.0
"""All error responses, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`; those of /v1/messages in Anthropic's.

`api_error_of` maps any exception to a status and that body: a mistake of the client is a 400 (401, 404, 405, 413), a full queue a
429, a server that is not ready or shutting down a 503, a failed engine a 500. 429 and 503 carry Retry-After.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import (
    AdapterNotFound,
    CapacityError,
    EngineClosed,
    EngineError,
    OptionError,
    Overloaded,
    PhalanxError,
    PromptTooLong,
    RequestError,
)
from phalanx.log import get_logger, request_id
from phalanx.serve.openai.schema.field_table import undeclared

logger = get_logger(__name__)

_MAX_ECHOED = 500
"""Limit of characters of a client's value in an error message."""


class ApiError(Exception):
    """The request is answered with `status` and this error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, media_type="application/json")


class MessagesError(ApiError):
    """The same in Anthropic's form."""

    def body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": self.message, "param": self.param, "code": self.code}
        return {"type": "error", "error": error, "request_id": request_id.get() or None}


_ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def require_enabled(request: Request, enabled: bool, option: str, why: str) -> None:
    """Raise ApiError 403 for a route that the server's option does not open. why: it is closed without it."""
    if not enabled:
        raise ApiError(403, f"{request.url.path} is not enabled; start the server with {option}: {why}", code="not_enabled")


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 about the field `param`."""
    return ApiError(400, message, param=param, code=code)


def api_error_of(error: BaseException, *, retry_after: int = 1) -> ApiError:
    """The error response to any exception. retry_after: seconds, for the statuses that ask the client to try again."""
    retry = {"Retry-After": str(retry_after)}
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, Overloaded):
        retry = {"Retry-After": str(error.retry_after or retry_after)}
        return ApiError(429, str(error), type="rate_limit_error", code="overloaded", headers=retry)
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
    if isinstance(error, AdapterNotFound):
        return ApiError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, (RequestError, OptionError, CapacityError)):
        return ApiError(400, str(error))
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error), type="server_error", code=_snake(type(error).__name__), headers=retry)
    if isinstance(error, EngineError):
        return ApiError(500, str(error), type="server_error", code=_snake(type(error).__name__))
    if isinstance(error, PhalanxError):
        return ApiError(500, str(error), type="server_error", code=_snake(type(error).__name__))
    logger.error("a request failed inside the server", exc_info=error)
    return ApiError(500, "the server failed on this request; its log has the details", type="server_error", code="internal_error")


def validation_api_error(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """The most important validation error of a body, naming the field, and for an unknown field also the nearest known one."""
    problems = error.errors(include_url=False)
    for problem in problems:  # the class judges fields that it does not declare, so that their names are not in the location
        if "field" in problem.get("ctx", {}):
            problem["loc"] = (*problem["loc"], problem["ctx"]["field"])
    first = max(problems, key=lambda problem: (problem["type"] == "cannot_honour", problem["type"] == "unknown_field"))
    where = _path(first["loc"])
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    if first["type"] == "unknown_field":
        name = str(first["loc"][-1])
        near = difflib.get_close_matches(name, _names(model), n=1, cutoff=0.7) if len(first["loc"]) == 1 else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        where = where if where.endswith(name) else name
        return bad_request(f"unknown field {clip(where)!r}{hint}", param=clip(where), code="unknown_parameter")
    if first["type"] == "missing" or (first["input"] is None and where):
        return bad_request(f"{where}: this field is required", param=where, code="missing_required_parameter")
    if first["type"] == "cannot_honour":
        return bad_request(f"{where} {first['msg']}", param=where, code="unsupported_parameter")
    same_field = (problem for problem in problems if _path(problem["loc"]).startswith(where) or problem is first)
    reasons = list(dict.fromkeys(problem["msg"] for problem in same_field))
    message = f"{clip(where) or 'the body'}: {clip('; or '.join(reasons[:4]))}"
    return bad_request(message, param=clip(where) or None, code="invalid_value")


def with_fields_of(path: str, error: ApiError) -> ApiError:
    """The error with the field's name at this endpoint, and in its form: a chat is answered as a prompt, a response or a message as
    a chat."""
    error = _renamed(path, error)
    if not path.startswith(MESSAGES):
        return error
    return MessagesError(
        error.status, error.message, type=error.type, param=error.param, code=error.code, headers=error.headers
    )  # fmt: skip


def _renamed(path: str, error: ApiError) -> ApiError:
    field = error.param or ""
    if error.code in ("unknown_parameter", "unsupported_parameter"):  # the client has sent a field of this name
        return error
    own = field
    if is_prompt := field.partition("[")[0] == "prompt":
        own = _prompt_field(path, field)
    elif path == RESPONSES:
        if field.partition(".")[0].partition("[")[0] == "messages":
            own = "input"
        elif field == "response_format":  # that of a schema that cannot be compiled, or of what excludes it
            own = "text.format.schema" if error.message.startswith(f"{field}: ") else "text.format"
        elif field.startswith("response_format."):
            own = "text.format." + field.removeprefix("response_format.").removeprefix("json_schema.")
    if own == field:
        return error
    message = error.message
    if not is_prompt or message.startswith(field):
        message = message.replace(field, own, 1 if is_prompt else -1)
    return ApiError(error.status, message, type=error.type, param=own, code=error.code, headers=error.headers)


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
RERANK, SCORE = "/v1/rerank", "/v1/score"
OTHER_PATHS = {"/rerank": RERANK, "/v2/rerank": RERANK, "/score": SCORE}
"""As vLLM, LiteLLM and Cohere's client name them."""
_PROMPT_FIELDS = {
    CHAT: "messages", RESPONSES: "input", MESSAGES: "messages", f"{MESSAGES}/count_tokens": "messages", "/v1/embeddings": "input",
}  # fmt: skip


def _prompt_field(path: str, field: str) -> str:
    """The field of an endpoint that is its prompt, or the one of an index."""
    path = OTHER_PATHS.get(path, path)
    if path in (RERANK, SCORE) and field != "prompt":
        index = int(field.removeprefix("prompt[").removesuffix("]"))
        if path == SCORE:
            return f"text_{index % 2 + 1}[{index // 2}]"
        return f"documents[{index - 1}]" if index else "query"
    return field.replace("prompt", _PROMPT_FIELDS.get(path, "prompt"), 1)


def clip(text: str) -> str:
    """A text of the client, shortened for an error message."""
    return text if len(text) <= _MAX_ECHOED else text[:_MAX_ECHOED] + "..."


def _of_http(error: HTTPException) -> ApiError:
    messages = {404: "this path does not exist", 405: "this path does not support this method"}
    message = messages.get(error.status_code, str(error.detail))
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return ApiError(error.status_code, message, type=kind, code=_CODES.get(error.status_code), headers=error.headers)


_CODES = {404: "not_found", 405: "method_not_allowed"}


def _names(model: type[BaseModel]) -> list[str]:
    declared = {field.alias or name: field for name, field in model.model_fields.items()}
    return [*declared, *undeclared(model, declared)]


def _path(where: Sequence[Any]) -> str:
    """`messages[0].content` for a location of pydantic. Its names for the members of unions are left out."""
    path = ""
    if len(where) > 1 and where[0] == "response_format":  # the union member has the name of the field
        where = [where[0], *where[2:]]
    if len(where) > 2 and list(where[:2]) == ["text", "format"]:
        where = ["text", "format", *where[3:]]
    for part in where:
        if isinstance(part, int):
            path += f"[{part}]"
        elif str(part).isidentifier() and str(part) not in _UNION_MEMBERS:
            path += f".{part}" if path else str(part)
    return path


_UNION_MEMBERS = {"str", "int"}  # others are no identifiers


def _snake(name: str) -> str:
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")

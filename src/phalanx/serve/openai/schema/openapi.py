# SPDX-License-Identifier: Apache-2.0
"""`/openapi.json`: FastAPI does not parse the bodies (see `openai.body`), so requests and responses are described here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.responses import ChatCompletionChunk, ErrorResponse, StatusResponse
from phalanx.serve.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest
from phalanx.version import __version__

Responses = dict[int | str, dict[str, Any]]

REQUESTS: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest)
_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request is not valid or not supported; `param` names the field.",
    401: "The key is missing or wrong.",
    404: "No such model.",
    413: "The body is too large.",
    429: "A queue is full; Retry-After says when to try again.",
    500: "The engine failed; the message names the rank.",
    503: "The server is starting, shutting down, or has failed.",
}


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The request body of a route, for its `openapi_extra`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def responses_of(
    model: type[BaseModel], *, streams: type[BaseModel] | None = None, body: bool = True, key: bool = True
) -> Responses:
    """The responses of a route, for its `responses`. streams: the model of its events, if it can stream. body: it reads a body.
    key: it requires the API key, if there is one."""
    responses: Responses = {200: {"model": model, "description": "The response."}}
    if streams is not None:
        responses[200]["content"] = {"text/event-stream": {"schema": _event(streams.__name__)}}
    errors = (400, 413, 429) * body + (401, 404, 500, 503) * key
    return responses | {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in sorted(errors)}


def _event(chunk: str) -> dict[str, Any]:
    """The schema of one server-sent event (OpenAPI 3.1 cannot describe a sequence of them)."""
    bodies = [{"$ref": _REF.format(model=name)} for name in (chunk, ErrorResponse.__name__)]
    parsed = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": bodies}}
    data = {"anyOf": [{"const": "[DONE]"}, parsed]}
    description = f"One event: a {chunk}, or the error that ended the stream; the last one is [DONE]."
    return {"type": "object", "required": ["data"], "properties": {"data": data}, "description": description}


def status_responses(*, can_fail: bool = True) -> Responses:
    """The responses of /live, /ready and /health."""
    responses: Responses = {200: {"model": StatusResponse, "description": "Yes."}}
    return responses | ({503: {"model": StatusResponse, "description": "No, with the reason."}} if can_fail else {})


def text_response(description: str) -> Responses:
    """A response in plain text."""
    return {200: {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}}


def install_openapi(app: FastAPI, *, model_name: str, with_key: bool) -> None:
    """Make the app serve this description. model_name: the served model. with_key: /v1 and the tokenizer require a bearer key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, model_name=model_name, with_key=with_key)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _build(app: FastAPI, *, model_name: str, with_key: bool) -> dict[str, Any]:
    document = get_openapi(title="Phalanx", version=__version__, description="The OpenAI API.", routes=app.routes)
    models: list[type[BaseModel]] = [*REQUESTS, ChatCompletionChunk]
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    parts = document.setdefault("components", {})
    parts.setdefault("schemas", {}).update(schemas["$defs"])
    for kind in REQUESTS:
        schema = schemas["$defs"][kind.__name__]
        schema["properties"]["model"] = {"enum": [model_name] if "model" in schema["required"] else [model_name, None]}
    if with_key:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in document["paths"].items():
        for route in methods.values():
            if with_key and needs_key(path):
                route["security"] = [{"key": []}]
            elif not with_key:
                route["responses"].pop("401", None)
            route["responses"].pop("422", None)  # of FastAPI's own validation, which is not used
    return document


OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/version", "/metrics", "/openapi.json"})


def needs_key(path: str) -> bool:
    """Whether a path requires the API key: all do, except those that probes and scrapers read."""
    return path not in OPEN_PATHS

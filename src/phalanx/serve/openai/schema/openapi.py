# SPDX-License-Identifier: Apache-2.0
"""`/openapi.json`: FastAPI does not parse the bodies (see `openai.body`), so requests and responses are described here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from phalanx.serve.anthropic.schema import CountTokensRequest, MessageEvent, MessagesRequest
from phalanx.serve.openai.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.embeddings import EmbeddingsRequest, RerankRequest, ScoreRequest
from phalanx.serve.openai.schema.model_changes import UpdateWeightsRequest
from phalanx.serve.openai.schema.responses import ChatCompletionChunk, ErrorResponse, StatusResponse
from phalanx.serve.openai.schema.responses_object import ResponseStreamEvent
from phalanx.serve.openai.schema.responses_request import ResponsesRequest
from phalanx.serve.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest
from phalanx.version import __version__

Responses = dict[int | str, dict[str, Any]]

REQUESTS: tuple[type[BaseModel], ...] = (
    ChatRequest, CompletionRequest, CountTokensRequest, DetokenizeRequest, EmbeddingsRequest, LoadAdapterRequest, MessagesRequest,
    RerankRequest, ResponsesRequest, ScoreRequest, TokenizeRequest, UnloadAdapterRequest, UpdateWeightsRequest,
)  # fmt: skip
_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request is not valid or not supported; `param` names the field.",
    401: "The key is missing or wrong.",
    403: "The server was started without --enable_sleep_mode.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "A queue is full; Retry-After says when to try again.",
    431: "The head of the request is too large.",
    500: "The engine failed; the message names the rank.",
    503: "The server is starting, asleep, shutting down, or has failed.",
}


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The request body of a route, for its `openapi_extra`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def responses_of(
    model: type[BaseModel],
    *,
    streams: type[BaseModel] | None = None,
    body: bool = True,
    key: bool = True,
    refuses: bool = False,
    done: bool = True,
    enabled: bool = False,
    error: type[BaseModel] = ErrorResponse,
) -> Responses:
    """The responses of a route, for its `responses`. streams: the model of its events, if it can stream. body: it reads a body.
    key: it requires the API key, if there is one. refuses: it has other parameters. done: its stream ends with [DONE]. enabled: an
    option enables it. error: the model of its errors."""
    responses: Responses = {200: {"model": model, "description": "The response."}}
    if streams is not None:
        responses[200]["content"] = {"text/event-stream": {"schema": _event(streams.__name__, done=done, error=error)}}
    errors = (431, *((400, 408, 413, 429) * body), *((400,) * refuses), *((403,) * enabled), *((401, 404, 500, 503) * key))
    return responses | {status: {"model": error, "description": _ERRORS[status]} for status in sorted(set(errors))}


def query_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """An optional parameter in the query of a route, for its `openapi_extra`."""
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _event(chunk: str, *, done: bool, error: type[BaseModel]) -> dict[str, Any]:
    """The schema of one server-sent event (OpenAPI 3.1 cannot describe a sequence of them)."""
    bodies = [{"$ref": _REF.format(model=name)} for name in (chunk, error.__name__)]
    parsed = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": bodies}}
    data = {"anyOf": [{"const": "[DONE]"}, parsed]} if done else parsed
    last = "; the last one is [DONE]" if done else ""
    description = f"One event: a {chunk}, or the error that ended the stream{last}."
    return {"type": "object", "required": ["data"], "properties": {"data": data}, "description": description}


def status_responses(*, can_fail: bool = True) -> Responses:
    """The responses of /live, /ready and /health."""
    responses: Responses = {200: {"model": StatusResponse, "description": "Yes."}}
    return responses | ({503: {"model": StatusResponse, "description": "No, with the reason."}} if can_fail else {})


def text_response(description: str) -> Responses:
    """A response in plain text."""
    return {200: {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}}


def install_openapi(app: FastAPI, *, model_name: str, with_key: bool, open_metrics: bool = False) -> None:
    """Make the app serve this description, which `app.openapi` makes once, in 0.3 s: before requests run.

    model_name: the served model. with_key: routes require a bearer key. open_metrics: /metrics does not."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, model_name=model_name, with_key=with_key, open_metrics=open_metrics)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _build(app: FastAPI, *, model_name: str, with_key: bool, open_metrics: bool) -> dict[str, Any]:
    document = get_openapi(title="Phalanx", version=__version__, description="The OpenAI API.", routes=app.routes)
    models: list[type[BaseModel]] = [*REQUESTS, ChatCompletionChunk, MessageEvent, ResponseStreamEvent]
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    parts = document.setdefault("components", {})
    parts.setdefault("schemas", {}).update(schemas["$defs"])
    for kind in REQUESTS:
        schema = schemas["$defs"][kind.__name__]
        if "model" not in schema["properties"]:
            continue
        schema["properties"]["model"] = {"enum": [model_name] if "model" in schema.get("required", []) else [model_name, None]}
    if with_key:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in document["paths"].items():
        for route in methods.values():
            if with_key and needs_key(path, open_metrics=open_metrics):
                route["security"] = [{"key": []}]
                route["responses"].setdefault("401", _refused())
            else:
                route["responses"].pop("401", None)
            route["responses"].pop("422", None)  # of FastAPI's own validation, which is not used
    return document


def _refused() -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=ErrorResponse.__name__)}
    return {"description": _ERRORS[401], "content": {"application/json": {"schema": schema}}}


OPEN_PATHS = frozenset({"/live", "/ready", "/health"})


def needs_key(path: str, *, open_metrics: bool) -> bool:
    """Whether a path requires an API key: all do, except those that probes read, and /metrics with `--open_metrics`."""
    return path not in OPEN_PATHS and not (open_metrics and path == "/metrics")

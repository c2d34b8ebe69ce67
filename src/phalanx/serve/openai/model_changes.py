# SPDX-License-Identifier: Apache-2.0
"""`POST /sleep`, `/wake_up` and `/weights/update`, `GET /is_sleeping`: the memory of the model is given back and taken again, and
its weights are replaced, without a new start. Only with `--enable_sleep_mode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.engine.messages import ModelChange, ModelState, RequestMode, Sleep, UpdateWeights, WakeUp
from phalanx.errors import PhalanxError
from phalanx.serve.openai.api_errors import ApiError, bad_request, clip, require_enabled
from phalanx.serve.openai.body import read_small_request
from phalanx.serve.openai.schema.model_changes import NoFields, UpdateWeightsRequest
from phalanx.serve.openai.schema.openapi import query_parameter, request_body, responses_of
from phalanx.serve.openai.schema.responses import ModelStateResponse
from phalanx.serve.openai.service import Service, service_of

router = APIRouter()

TAGS = ("weights", "kv_cache")
_MODES = get_args(RequestMode)
_STATE = responses_of(ModelStateResponse, enabled=True)
_LEVEL = query_parameter("level", {"type": "integer", "enum": [1, 2], "default": 1})
_MODE = query_parameter("mode", {"type": "string", "enum": list(_MODES), "default": "wait"})
_TAGS = query_parameter("tags", {"type": "array", "items": {"type": "string", "enum": list(TAGS)}})


@router.post("/sleep", responses=_STATE, openapi_extra={"parameters": [_LEVEL, _MODE]})
async def sleep(request: Request) -> Response:
    """Give the memory back: level 1 moves weights to the host's memory, level 2 discards them; both discard the KV cache. mode:
    running requests finish (wait), end with an error (abort), or go on after the wake-up (keep)."""
    query = _query(request, level=("1", "2"), mode=_MODES)
    message = Sleep(int(_one(query, "level", "1")), cast(RequestMode, _one(query, "mode", "wait")))
    service = _permitted(request)
    await _require_no_body(request)
    service.admission.sleep()
    return await _changed(service, message)


@router.post("/wake_up", responses=_STATE, openapi_extra={"parameters": [_TAGS]})
async def wake_up(request: Request) -> Response:
    """Take the memory again. tags: weights or kv_cache, or both, as without tags; requests are accepted once both are there."""
    tags = _query(request, tags=TAGS).get("tags", TAGS)
    service = _permitted(request)
    await _require_no_body(request)
    return await _changed(service, WakeUp("weights" in tags, "kv_cache" in tags))


@router.post(
    "/weights/update", responses=responses_of(ModelStateResponse, enabled=True), openapi_extra=request_body(UpdateWeightsRequest)
)
async def update_weights(request: Request) -> Response:
    """Read the weights of another checkpoint of the same model. Requests that run finish on the old ones, or end with an error;
    those that wait, and those that come, run on the new ones. All ranks change, or none."""
    service = _permitted(request)
    _query(request)
    body = await read_small_request(request, UpdateWeightsRequest)
    return await _changed(service, UpdateWeights(body.model_path, body.mode or "wait"))


@router.get("/is_sleeping", responses=responses_of(ModelStateResponse, body=False))
async def is_sleeping(request: Request) -> Response:
    """Whether the engine sleeps, at which level, and what of the model is in memory."""
    service = service_of(request)
    service.require_engine()
    return JSONResponse(_document(service.model_states))


def _permitted(request: Request) -> Service:
    why = "who may send requests can then stop the engine, and have it read any checkpoint of this host"
    service = service_of(request)
    service.require_engine()
    require_enabled(request, service.sleep_mode, "--enable_sleep_mode", why)
    return service


async def _require_no_body(request: Request) -> None:
    """Raise ApiError for fields in the body of a route whose parameters are in its query. An empty object has none."""
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return
    try:
        await read_small_request(request, NoFields)
    except ApiError as error:
        message = f"{error.message}; parameters of {request.url.path} are in its query: {request.url.path}?NAME=VALUE"
        raise ApiError(error.status, message, param=error.param, code=error.code, headers=error.headers) from None


async def _changed(service: Service, message: ModelChange) -> Response:
    engine = service.require_engine()
    try:
        service.model_states = states = await engine.client.change_model(message)
    finally:
        service.admission.wake(asleep=any(state.level for state in service.model_states))
    failed = {number: PhalanxError.from_wire(state.error) for number, state in enumerate(states) if state.error is not None}
    for number, error in failed.items():
        if len(states) > 1:
            error.failure = f"replica {number} (of {len(states)}; {len(failed)} did not change): {error.failure}"
        raise _refusal(error)
    return JSONResponse(_document(states))


def _refusal(error: PhalanxError) -> ApiError:
    """A folder or mode that cannot be used is a mistake of the client: the engine goes on as it was."""
    return bad_request(str(error.copy()), code="model_not_changed")


def _document(states: Sequence[ModelState]) -> dict[str, Any]:
    last = states[0]
    level = max(state.level for state in states)
    return {
        "is_sleeping": level > 0, "level": level, "weights": all(state.weights for state in states),
        "kv_cache": all(state.kv_cache for state in states), "weights_generation": last.generation,
        "freed_bytes": sum(freed for state in states for freed in state.bytes.values()),
        "seconds": max(state.seconds for state in states), "kept_requests": sum(state.kept for state in states),
    }  # fmt: skip


def _query(request: Request, **allowed: Sequence[str]) -> Mapping[str, list[str]]:
    """The parameters of the query. Raises ApiError 400 for an unknown name or value."""
    query: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        if name not in allowed:
            known = f"known: {', '.join(allowed)}" if allowed else "the query has none here: write fields into the body"
            message = f"unknown parameter {clip(name)!r}; {known}"
            raise bad_request(message, param=clip(name), code="unknown_parameter")
        if value not in allowed[name]:
            raise bad_request(f"{name}={clip(value)!r} must be one of {', '.join(allowed[name])}", param=name, code="invalid_value")
        query.setdefault(name, []).append(value)
    return query


def _one(query: Mapping[str, list[str]], name: str, default: str) -> str:
    values = query.get(name, [default])
    if len(values) > 1:
        raise bad_request(f"{name} is given {len(values)} times", param=name, code="invalid_value")
    return values[0]

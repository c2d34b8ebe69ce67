# SPDX-License-Identifier: Apache-2.0
"""Adapters as models of their own: those that `--lora_modules` names, and, where that is allowed, those that come and go with
`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from phalanx.errors import AdapterError, AdapterNotFound, ModelError
from phalanx.layout.adapter import require_files
from phalanx.serve.client import EngineClient
from phalanx.serve.openai.api_errors import ApiError, require_enabled
from phalanx.serve.openai.body import read_small_request
from phalanx.serve.openai.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from phalanx.serve.openai.schema.openapi import request_body, responses_of, text_response
from phalanx.serve.openai.schema.responses import ModelList
from phalanx.serve.openai.service import Service, service_of

router = APIRouter()

_RESPONSES = responses_of(ModelList, enabled=True) | text_response("What was done.")


@router.post("/v1/load_lora_adapter", responses=_RESPONSES, openapi_extra=request_body(LoadAdapterRequest))
async def load_lora_adapter(http_request: Request) -> Response:
    """Load the adapter in a folder of the server; it is a model with this name then."""
    service = _permitted(http_request)
    body = await read_small_request(http_request, LoadAdapterRequest)
    await load(service, service.require_engine().client, body.lora_name, body.lora_path, replace=bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=_RESPONSES, openapi_extra=request_body(UnloadAdapterRequest))
async def unload_lora_adapter(http_request: Request) -> Response:
    """Take no more requests for an adapter; those that run go on with it."""
    service = _permitted(http_request)
    body = await read_small_request(http_request, UnloadAdapterRequest)
    client = service.require_engine().client
    async with service.changing_adapters:
        try:
            service.adapters = await client.unload_adapter(body.lora_name)
        except AdapterNotFound as error:
            raise ApiError(404, str(error), param="lora_name", code="model_not_found") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def load(service: Service, client: EngineClient, name: str, folder: str, *, replace: bool = False) -> None:
    """Load an adapter into the engine behind `client`; it is one of the server's models then. Raises AdapterError."""
    _require_other_name(service, name)
    async with service.changing_adapters:
        service.adapters = await client.load_adapter(name, str(_path(folder)), replace=replace)


def require_loadable(service: Service, modules: Mapping[str, str]) -> None:
    """Raise AdapterError for what no engine could load, before one takes minutes to start. modules: name -> folder."""
    for name, folder in modules.items():
        _require_other_name(service, name)
        try:
            require_files(_path(folder))
        except ModelError as error:
            failure = f"adapter {name!r} is not loaded: {error.failure}"
            raise AdapterError(failure, held=error.held, why=error.why, next=error.next) from None


def _require_other_name(service: Service, name: str) -> None:
    if service.is_model(name):
        raise AdapterError(f"adapter {name!r} is not loaded: the model has this name", next="give it another one")


def _path(folder: str) -> Path:
    return Path(folder).expanduser().absolute()


def _permitted(http_request: Request) -> Service:
    service = service_of(http_request)
    why = "who may send requests can then have any folder of this host read"
    require_enabled(http_request, service.changes_adapters, "--allow_runtime_lora_updating", why)
    return service

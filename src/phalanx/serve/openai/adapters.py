# SPDX-License-Identifier: Apache-2.0
"""Adapters as models of their own: those that `--lora_modules` names, and, where that is allowed, those that come and go with
`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from phalanx.errors import AdapterError
from phalanx.serve.client import EngineClient
from phalanx.serve.openai.api_errors import bad_request
from phalanx.serve.openai.body import read_small_request
from phalanx.serve.openai.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from phalanx.serve.openai.schema.openapi import request_body, responses_of, text_response
from phalanx.serve.openai.schema.responses import ModelList
from phalanx.serve.openai.service import Service, service_of

router = APIRouter()

_RESPONSES = responses_of(ModelList) | text_response("What was done.")


@router.post("/v1/load_lora_adapter", responses=_RESPONSES, openapi_extra=request_body(LoadAdapterRequest))
async def load_lora_adapter(http_request: Request) -> Response:
    """Load the adapter in a folder of the server; it is a model with this name then."""
    body = await read_small_request(http_request, LoadAdapterRequest)
    service = _permitted(http_request)
    await load(service, service.require_engine().client, body.lora_name, body.lora_path, replace=bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=_RESPONSES, openapi_extra=request_body(UnloadAdapterRequest))
async def unload_lora_adapter(http_request: Request) -> Response:
    """Take no more requests for an adapter; those that run go on with it."""
    body = await read_small_request(http_request, UnloadAdapterRequest)
    service = _permitted(http_request)
    client = service.require_engine().client
    async with service.changing_adapters:
        service.adapters = await client.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def load(service: Service, client: EngineClient, name: str, folder: str, *, replace: bool = False) -> None:
    """Load an adapter into the engine behind `client`; it is one of the server's models then. Raises AdapterError."""
    if service.is_model(name):
        raise AdapterError(f"adapter {name!r} is not loaded: the model has this name", next="give it another one")
    async with service.changing_adapters:
        service.adapters = await client.load_adapter(name, str(Path(folder).expanduser().absolute()), replace=replace)


def _permitted(http_request: Request) -> Service:
    service = service_of(http_request)
    if not service.changes_adapters:
        message = "adapters cannot be changed while this server runs; start it with --allow_runtime_lora_updating"
        raise bad_request(message, code="unsupported")
    return service

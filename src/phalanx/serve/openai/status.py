# SPDX-License-Identifier: Apache-2.0
"""The routes for load balancers, dashboards and people: models, state, metrics, version. `/live`, `/ready` and `/health` need no
API key."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.engine.messages import AdapterFacts
from phalanx.metrics import CONTENT_TYPE
from phalanx.serve.admission import Phase
from phalanx.serve.openai.schema.openapi import responses_of, status_responses, text_response
from phalanx.serve.openai.schema.responses import ModelCard, ModelList, VersionResponse
from phalanx.serve.openai.service import Service, asleep, service_of
from phalanx.version import __version__

router = APIRouter()


@router.get("/v1/models", responses=responses_of(ModelList, body=False))
async def list_models(request: Request) -> Response:
    """The served model, and its adapters."""
    service = service_of(request)
    return JSONResponse({"object": "list", "data": [_card(service), *(_card(service, each) for each in service.adapters)]})


@router.get("/v1/models/{model:path}", responses=responses_of(ModelCard, body=False))
async def get_model(request: Request, model: str) -> Response:
    """One model by its name."""
    service = service_of(request)
    service.require_engine(model)
    return JSONResponse(_card(service, service.adapter_of(model)))


@router.get("/live", responses=status_responses(can_fail=False))
async def live() -> Response:
    """200 as long as the process responds: restart it if this fails."""
    return JSONResponse({"status": "live", "reason": None})


@router.get("/ready", responses=status_responses())
async def ready(request: Request) -> Response:
    """200 while requests are accepted and steps end: send none while this is 503."""
    return _status(service_of(request))


@router.get("/health", responses=status_responses())
async def health(request: Request) -> Response:
    """The same as /ready, under its older name."""
    return _status(service_of(request))


@router.get("/version", responses=responses_of(VersionResponse, body=False, key=False))
async def version() -> Response:
    """The version of Phalanx."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", responses=text_response("The metrics, in Prometheus' text format."))
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms for Prometheus."""
    service = service_of(request)
    await service.refresh()
    text = await asyncio.to_thread(service.metrics.exposition)
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


def _card(service: Service, adapter: AdapterFacts | None = None) -> dict[str, Any]:
    engine = service.require_engine()
    name, root, parent = service.model_name, service.model_name, None
    if adapter is not None:
        name, root, parent = adapter.name, adapter.folder, service.model_name
    return {
        "id": name, "object": "model", "created": engine.created, "owned_by": "phalanx", "root": root, "parent": parent,
        "max_model_len": engine.facts.max_seq_len, "default_sampling_params": engine.facts.sampling_defaults,
    }  # fmt: skip


def _status(service: Service) -> Response:
    phase, failure = service.admission.phase, service.admission.failure
    reason, status = str(failure) if failure is not None else None, phase.value
    if phase is Phase.SLEEPING:
        reason = asleep(service.model_states)
    if phase is Phase.READY and (stalled := service.stalled):
        reason, status = stalled, "stalled"
    if status == Phase.READY.value:
        return JSONResponse({"status": status, "reason": None})
    return JSONResponse({"status": status, "reason": reason}, 503, {"Retry-After": str(service.admission.retry_after())})

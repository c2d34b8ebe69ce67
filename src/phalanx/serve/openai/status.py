# SPDX-License-Identifier: Apache-2.0
"""The routes for load balancers, dashboards and people: models, state, metrics, version. `/live` and `/ready` need no API key."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.serve.admission import Phase
from phalanx.serve.openai.schema.openapi import responses_of, status_responses, text_response
from phalanx.serve.openai.schema.responses import ModelCard, ModelList, VersionResponse
from phalanx.serve.openai.service import Service, service_of
from phalanx.version import __version__

router = APIRouter()


@router.get("/v1/models", responses=responses_of(ModelList, body=False))
async def list_models(request: Request) -> Response:
    """The served model."""
    return JSONResponse({"object": "list", "data": [_card(service_of(request))]})


@router.get("/v1/models/{model:path}", responses=responses_of(ModelCard, body=False))
async def get_model(request: Request, model: str) -> Response:
    """One model by its name."""
    service = service_of(request)
    service.require_engine(model)
    return JSONResponse(_card(service))


@router.get("/live", responses=status_responses(can_fail=False))
async def live() -> Response:
    """200 as long as the process responds: restart it if this fails."""
    return JSONResponse({"status": "live", "reason": None})


@router.get("/ready", responses=status_responses())
async def ready(request: Request) -> Response:
    """200 while requests are accepted: send none while this is 503."""
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
    text, content_type = await asyncio.to_thread(service.metrics.exposition, request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": content_type})


def _card(service: Service) -> dict[str, Any]:
    engine = service.require_engine()
    return {
        "id": service.model_name, "object": "model", "created": engine.created, "owned_by": "phalanx",
        "root": service.model_name, "max_model_len": engine.facts.max_seq_len,
    }  # fmt: skip


def _status(service: Service) -> Response:
    phase, failure = service.admission.phase, service.admission.failure
    reason = str(failure) if failure is not None else None
    headers = {} if phase is Phase.READY else {"Retry-After": str(service.admission.retry_after())}
    return JSONResponse({"status": phase.value, "reason": reason}, 200 if phase is Phase.READY else 503, headers)

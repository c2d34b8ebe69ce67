# SPDX-License-Identifier: Apache-2.0
"""`GET /experts`: how many tokens reached each expert of each layer, and which rank has it. `POST /experts/rebalance`
moves them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.serve.expert_load import document
from phalanx.serve.openai.api_errors import bad_request
from phalanx.serve.openai.schema.openapi import responses_of
from phalanx.serve.openai.schema.responses import ExpertsResponse
from phalanx.serve.openai.service import service_of

router = APIRouter()

_REBALANCE = responses_of(ExpertsResponse, body=False, refuses=True)
_REBALANCE[202] = _REBALANCE.pop(200)


@router.get("/experts", responses=responses_of(ExpertsResponse, body=False))
async def get_experts(request: Request) -> Response:
    """The load of each expert, and its place: what `phalanx experts` draws. No engines for a model without experts."""
    stats = await service_of(request).require_engine().client.experts_by_replica()
    return JSONResponse(await asyncio.to_thread(document, stats))


@router.post("/experts/rebalance", responses=_REBALANCE, status_code=202)
async def rebalance_experts(request: Request) -> Response:
    """Move experts so that the ranks get even parts of the recent load. Answers at once, as /experts, whose `layers_left` falls to
    0; while a rebalance is under way, another one has no effect."""
    stats = await service_of(request).require_engine().client.rebalance_experts()
    if not any(each.movable for each in stats):
        raise bad_request(
            "there is nothing to move: the model has no experts, or each rank has a slice of every one (moe_expert_parallel_size=1)"
        )
    return JSONResponse(await asyncio.to_thread(document, stats), 202)

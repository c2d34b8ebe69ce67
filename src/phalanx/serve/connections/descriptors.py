# SPDX-License-Identifier: Apache-2.0
"""Refuse requests in time when the server runs out of descriptors.

Beyond the limit of open files, connections end without an answer and without a line in the log.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.log import get_logger
from phalanx.serve.openai.api_errors import ApiError

logger = get_logger(__name__)

MIN_RESERVE = 64
"""Descriptors that are not for connections: the engine, its processes, the compiler of structured output, files."""
LOG_SECONDS = 10.0


class ConnectionLimit:
    """Answers 503 to the requests of connections beyond the limit, and closes these. connections: their number now."""

    def __init__(self, app: ASGIApp, connections: Callable[[], int]) -> None:
        self._app, self._connections = app, connections
        self._limit = max_connections()
        self._logged = -LOG_SECONDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (count := self._connections()) <= self._limit:
            await self._app(scope, receive, send)
            return
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            logger.warning(
                "requests are refused: %d connections are open, and the limit of open files leaves %d; raise it (ulimit -n)",
                count, self._limit,
            )  # fmt: skip
        refusal = ApiError(
            503, f"the server has {self._limit} connections, its limit", type="server_error", code="too_many_connections",
            headers={"Retry-After": "1", "Connection": "close"},
        )  # fmt: skip
        await refusal.response()(scope, receive, send)


def max_connections() -> int:
    """Connections that the soft limit of open files leaves; a quarter is kept for those that are being refused."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(1, soft - max(MIN_RESERVE, soft // 4))

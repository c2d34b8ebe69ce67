# SPDX-License-Identifier: Apache-2.0
"""How many connections the limit of open files leaves room for, and the answer to those beyond."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from phalanx.log import get_logger
from phalanx.serve.openai.api_errors import ApiError

logger = get_logger(__name__)

OWN_DESCRIPTORS = 48
"""Not for connections: the engine, its processes, those that read large bodies, the compiler of structured output, files."""
MIN_RESERVE = 64
"""Descriptors beyond the connections that are served: OWN_DESCRIPTORS, and those of connections that are being refused."""
LOG_SECONDS = 10.0


class OncePerPeriod:
    """Logs a line every LOG_SECONDS at most."""

    def __init__(self) -> None:
        self._last = -LOG_SECONDS

    def warning(self, text: str, *values: object) -> None:
        if time.monotonic() - self._last >= LOG_SECONDS:
            self._last = time.monotonic()
            logger.warning(text, *values)


class Refusal:
    """An ASGI application that answers 503 and closes the connection; it reads no body. limit: of the connections that are served.
    connections: their number now."""

    def __init__(self, limit: int, connections: Callable[[], int]) -> None:
        self._limit, self._connections = limit, connections
        self._log = OncePerPeriod()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._log.warning(
            "requests are refused: %d connections are open, and the limit of open files leaves %d; raise it (ulimit -n)",
            self._connections(), self._limit,
        )  # fmt: skip
        refusal = ApiError(
            503, f"the server has {self._limit} connections, its limit", type="server_error", code="too_many_connections",
            headers={"Retry-After": "1", "Connection": "close"},
        )  # fmt: skip
        await refusal.response()(scope, receive, send)


def max_connections() -> int:
    """Connections that are served: what the soft limit of open files leaves beyond a reserve of a quarter, or of MIN_RESERVE."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(1, soft - max(MIN_RESERVE, soft // 4))


def max_accepted() -> int:
    """Connections that are served or refused; all others wait."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(max_connections() + 1, soft - OWN_DESCRIPTORS)

# SPDX-License-Identifier: Apache-2.0
"""The health check of containers, `python3 -m phalanx.health.ready`: its status is 0 where the server of this container is ready.

The port comes from the server's process: a flag, a variable or a file may have set it. No proxy is asked.
"""

from __future__ import annotations

import contextlib
import http.client
import sys

import psutil

from phalanx.health.host import title_of

SECONDS = 5.0
"""Until an address counts as silent."""
_OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""What to ask where a server listens at every address."""


def addresses() -> list[tuple[str, int]]:
    """Where servers of this process's user listen."""
    places = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if title_of(process).startswith("phalanx server"):
                connections = process.net_connections("tcp")
                places |= {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}
    return sorted((_OWN.get(address, address), port) for address, port in places)


def answers(address: str, port: int) -> bool:
    """Whether GET /ready has the status 200 there."""
    connection = http.client.HTTPConnection(address, port, timeout=SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    return False


if __name__ == "__main__":
    sys.exit(not any(answers(*place) for place in addresses()))

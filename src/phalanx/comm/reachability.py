# SPDX-License-Identifier: Apache-2.0
"""Whether every host of an engine reaches every other one, in both directions, before ranks connect.

gloo and NCCL listen at free ports. A firewall that lets through only one direction leaves them waiting for minutes, and what they
say then names neither host.
"""

from __future__ import annotations

import socket
import time

from phalanx.comm.agreement import Store
from phalanx.errors import EngineError

CONNECT_SECONDS = 4.0
"""How long a connection between two hosts may take. Only a host that drops packets takes longer than a round trip."""
_RETRY_SECONDS = 0.2


def require_mutual(store: Store, node: int, nodes: int, own_address: str) -> None:
    """Connect this node to every other one; collective over one rank of each node, through `store`.

    own_address: of this host, towards the others. Raises EngineError for the first node that cannot be reached from this one: the
    direction that fails is in it.
    """
    family = socket.AF_INET6 if ":" in own_address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((own_address, 0))
        listener.listen(socket.SOMAXCONN)  # a connection stands without `accept`, beside those of strangers
        store.set(f"reachability/{node}", f"{own_address}:{listener.getsockname()[1]}")
        for other in (number for number in range(nodes) if number != node):
            address = store.get(f"reachability/{other}").decode()
            error = _connect(address)
            if error is not None:
                raise EngineError(
                    f"node {node} ({own_address}) cannot connect to node {other} at {address}", why=error,
                    next="let the hosts connect to each other at all ports, in both directions: ranks listen at free ones",
                )  # fmt: skip
        store.set(f"reachability/{node}/done", "")
        for other in range(nodes):
            store.get(f"reachability/{other}/done")  # the listener is needed until then


def _connect(address: str) -> str | None:
    """Why no connection to `address` ("host:port") comes about; None where one does."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(deadline - time.monotonic(), 0.1)).close()
            return None
        except TimeoutError:
            return f"no answer within {CONNECT_SECONDS:g} s: a firewall drops the packets, or there is no way to that host"
        except OSError as error:
            if time.monotonic() >= deadline - _RETRY_SECONDS:
                return error.strerror or str(error)
        time.sleep(_RETRY_SECONDS)

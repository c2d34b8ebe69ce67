# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that a test starts a moment later."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(20_000, 32_000)
"""Below those that Linux gives to whoever asks for any: between the test's choice and the start of its server, the connections and
listeners of other tests get thousands of those."""


def free_ports(count: int = 1) -> int:
    """The first of `count` consecutive TCP ports of this host that nobody has."""
    while True:
        port = random.SystemRandom().choice(_PORTS)  # the seed of a test is not the tests' beside it
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(count):
                stack.enter_context(socket.socket()).bind(("", port + number))
            return port

# SPDX-License-Identifier: Apache-2.0
"""A task for the forks of a `ForkServer`; what it imports is little, since its process imports it."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection


def make_task(setup: bytes) -> Callable[[Connection], None]:
    """Each fork answers with the setup, its process id, and what it gets, which it keeps where it begins with "k"."""
    kept: list[list[bytes]] = []

    def answer(connection: Connection) -> None:
        text = connection.recv_bytes()
        if text.startswith(b"k"):
            kept.append([bytes([byte]) * 1000 for byte in text])
        connection.send_bytes(b"%b %d %b" % (setup, os.getpid(), text))

    return answer

# SPDX-License-Identifier: Apache-2.0
"""Names of hosts that resolve late: a cluster publishes the name of a host some time after the host has started."""

from __future__ import annotations

import socket
import time

from phalanx.errors import OptionError
from phalanx.log import get_logger

log = get_logger(__name__)

LOG_SECONDS = 10.0
_RETRY_SECONDS = 0.5


def wait_for_name(name: str, limit: float, *, option: str = "master_addr") -> str:
    """The first address of `name` (or the address itself), once it resolves.

    Logs at once, and every LOG_SECONDS, which name does not resolve and why. Raises OptionError after `limit` seconds, the value of
    the option `option`_timeout.
    """
    began = time.monotonic()
    logged = began - LOG_SECONDS
    while True:
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            now, why = time.monotonic(), getattr(error, "strerror", None) or str(error)
        if now - began >= limit:
            raise OptionError(
                f"{option}={name!r} cannot be resolved", held=f"it was tried for {now - began:.0f} s", why=why,
                next=f"give host 0's name or address; where its name is published late, a longer --{option}_timeout",
            )  # fmt: skip
        if now - logged >= LOG_SECONDS:
            logged = now
            log.error("%s=%r cannot be resolved: %s; trying again for %.0f s", option, name, why, limit - (now - began))
        time.sleep(min(_RETRY_SECONDS, max(limit - (now - began), 0.01)))

# SPDX-License-Identifier: Apache-2.0
"""Names of hosts that resolve late: a cluster publishes the name of a host some time after the host has started."""

from __future__ import annotations

import socket
import threading
import time

from phalanx.errors import OptionError
from phalanx.log import get_logger

log = get_logger(__name__)

LOG_SECONDS = 10.0
SILENT_SECONDS = 1.0
"""A name server that has not answered for so long counts as silent."""
_RETRY_SECONDS = 0.5


class NameLookup(threading.Thread):
    """One look-up of the name of a host, in a thread of its own, which `join` waits for: where a name server does not answer, the C
    library waits for it for 10 to 30 s, and nothing ends that wait."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"look-up of {name}", daemon=True)
        self._host = name
        self.address: str | None = None
        """The first address of the name, once the look-up has ended with one."""
        self.problem = "the name server does not answer"
        """Why there is no address."""
        self.start()

    def run(self) -> None:
        try:
            self.address = str(socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            self.problem = getattr(error, "strerror", None) or str(error)


def wait_for_name(name: str, limit: float, *, option: str = "master_addr") -> str:
    """The first address of `name` (or the address itself), once it resolves.

    Logs within SILENT_SECONDS, and then every LOG_SECONDS, which name does not resolve and why. Raises OptionError after `limit`
    seconds, the value of the option `option`_timeout, and at most SILENT_SECONDS more.
    """
    began = time.monotonic()
    next_line = began
    lookup = NameLookup(name)
    while True:
        lookup.join(SILENT_SECONDS)
        if lookup.address is not None:
            return lookup.address
        now = time.monotonic()
        if now - began >= limit:
            raise OptionError(
                f"{option}={name!r} cannot be resolved", held=f"it was tried for {now - began:.0f} s", why=lookup.problem,
                next=f"give host 0's name or address; where its name is published late, a longer --{option}_timeout",
            )  # fmt: skip
        if now >= next_line:
            next_line = now + LOG_SECONDS
            log.error("%s=%r cannot be resolved: %s; trying again for %.0f s", option, name, lookup.problem, limit - (now - began))
        if not lookup.is_alive():
            time.sleep(min(_RETRY_SECONDS, max(limit - (now - began), 0.01)))
            lookup = NameLookup(name)

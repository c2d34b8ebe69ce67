# SPDX-License-Identifier: Apache-2.0
"""The listening sockets of a server."""

from __future__ import annotations

import errno
import socket
from typing import Any

from phalanx.errors import OptionError
from phalanx.executor.late_names import NameLookup

LOOKUP_SECONDS = 5.0
"""For the look-up of a host's name. A name server that does not answer would hold the start for 10 to 30 s."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`. With port 0, all use the same free port. Raises OptionError.

    `::` means every address of both families, and of IPv4 alone on a host without IPv6.
    """
    lookup = NameLookup(host)
    lookup.join(LOOKUP_SECONDS)
    if lookup.address is None:
        raise OptionError(f"host={host!r} cannot be resolved", why=lookup.problem, next="give an address of this host")
    hosts = ("0.0.0.0", "::") if lookup.address == "::" else (host,)
    addresses = [one for name in hosts for one in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)]
    sockets: list[socket.socket] = []
    last: OSError | None = None
    for family, kind, protocol, _, address in sorted(set(addresses)):
        bound_port = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listener(family, kind, protocol, (address[0], bound_port, *address[2:])))
            last = None
        except OSError as error:
            last = error
            if error.errno not in _NO_SUCH_ADDRESS:
                break
    if last is not None and (not sockets or last.errno not in _NO_SUCH_ADDRESS):
        for one in sockets:
            one.close()
        in_use = last.errno == errno.EADDRINUSE
        raise OptionError(
            f"host={host!r} port={port} cannot be used",
            why="another process listens there" if in_use else str(last),
            next="choose another --port, or end that process" if in_use else "choose another --host or --port",
        )
    return sockets


def _listener(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(2048)  # already here: two sockets can be bound to one port, and only the second `listen` fails
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


# A host name may resolve to an IPv6 address on a host without IPv6.
_NO_SUCH_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}

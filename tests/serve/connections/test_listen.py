# SPDX-License-Identifier: Apache-2.0
"""A server listens at every address that its host stands for, of both families, and says which it cannot use."""

from __future__ import annotations

import contextlib
import errno
import socket

import pytest

from phalanx.errors import OptionError
from phalanx.serve.connections.listen import bind


def answering(host: str) -> set[str]:
    """The loopback addresses at which a server on `host` takes connections."""
    sockets = bind(host, 0)
    port = sockets[0].getsockname()[1]
    answers = set()
    for address in ("127.0.0.1", "127.0.0.2", "::1"):
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=5).close()
            answers.add(address)
    for one in sockets:
        one.close()
    return answers


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("::", {"127.0.0.1", "127.0.0.2", "::1"}), ("0::0", {"127.0.0.1", "127.0.0.2", "::1"}),
        ("::0", {"127.0.0.1", "127.0.0.2", "::1"}), ("0.0.0.0", {"127.0.0.1", "127.0.0.2"}), ("127.0.0.2", {"127.0.0.2"}),
        ("::1", {"::1"}),
    ],
)  # fmt: skip
def test_the_addresses_of_a_host(host, addresses):
    assert answering(host) == addresses


def test_every_address_of_a_host_without_ipv6(monkeypatch):
    class OfIPv4(socket.socket):
        def __init__(self, family: int = -1, *arguments: int, **keywords: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *arguments, **keywords)

    monkeypatch.setattr(socket, "socket", OfIPv4)
    assert answering("::") == {"127.0.0.1", "127.0.0.2"}


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_a_port_that_is_taken_in_one_family_is_an_error(family, address):
    with socket.socket(family) as other:
        if family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind((address, 0))
        other.listen()
        with pytest.raises(OptionError, match="another process listens there"):
            bind("::", other.getsockname()[1])

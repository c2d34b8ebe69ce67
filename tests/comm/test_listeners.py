# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket

import pytest

from phalanx.comm.listeners import listening, refuse_connections

pytestmark = pytest.mark.usefixtures("forked_python")


def test_a_closed_listener_takes_no_connection_and_those_it_has_go_on() -> None:
    before = listening()
    with socket.create_server(("127.0.0.1", 0)) as closed, socket.create_server(("127.0.0.1", 0)) as other:
        assert listening() - before == {closed.fileno(), other.fileno()}
        with socket.create_connection(closed.getsockname(), timeout=5) as client, closed.accept()[0] as served:
            refuse_connections({closed.fileno()})
            with pytest.raises(TimeoutError):
                socket.create_connection(closed.getsockname(), timeout=0.3)
            socket.create_connection(other.getsockname(), timeout=5).close()
            client.sendall(b"a tensor")
            assert served.recv(100) == b"a tensor"
            served.sendall(b"another")
            assert client.recv(100) == b"another"
    assert listening() == before


def test_other_descriptors_are_none() -> None:
    before = listening()
    with socket.socket(socket.AF_UNIX) as local, socket.socket() as unbound, open("/dev/null") as file:
        assert not {local.fileno(), unbound.fileno(), file.fileno()} & listening()
    assert listening() == before

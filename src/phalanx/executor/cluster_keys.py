# SPDX-License-Identifier: Apache-2.0
"""`ClusterKeys`: the CURVE keys of the engine, its nodes and its ranks, derived from the cluster token."""

from __future__ import annotations

import hashlib
import hmac

import zmq
from zmq.utils import z85

from phalanx.errors import OptionError

_SALT = b"phalanx cluster keys 1"
ENGINE = "engine"
"""The engine's name among those that keys are derived for; the other names are the identities of `executor.protocol`."""


class ClusterKeys:
    """Whoever has the token derives all keys: both ends of a connection prove that they have it, and what they exchange is
    encrypted with keys of that one connection (a frame that is captured and sent again is refused).

    Raises OptionError where ZeroMQ was built without CURVE.
    """

    def __init__(self, token: str) -> None:
        if not zmq.has("curve"):
            raise OptionError(
                "a cluster token needs ZeroMQ with CURVE", held=f"libzmq {zmq.zmq_version()} was built without it",
                next="install the wheel of pyzmq, or use --insecure_cluster",
            )  # fmt: skip
        self._root = hmac.digest(_SALT, token.encode(), "sha256")

    def secret_key(self, name: str) -> bytes:
        """In Z85, as zmq takes it. HKDF-SHA256 (RFC 5869) with one block of output; the name is the info."""
        return z85.encode(hmac.new(self._root, name.encode() + b"\x01", hashlib.sha256).digest())

    def public_key(self, name: str) -> bytes:
        """In Z85."""
        return zmq.curve_public(self.secret_key(name))

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """From now on, whatever `socket` binds takes only peers that know the engine's key."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key(ENGINE))

    def secure_client(self, socket: zmq.Socket[bytes], name: str) -> None:
        """Whatever `socket` connects to must have the engine's key, and knows it by `name`."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public_key(ENGINE))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key(name))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key(name))

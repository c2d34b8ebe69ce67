# SPDX-License-Identifier: Apache-2.0
"""Close the sockets on which gloo listens, once all ranks are connected.

gloo listens at a free port of the interface for as long as a group lives. It takes any connection, keeps it open, and matches it
to a rank by a small number that the other side sends. After all ranks are connected nobody has a reason to connect.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K with 0: keep no byte of any packet


def listening() -> set[int]:
    """The descriptors of this process's sockets that listen for TCP connections. Empty where the system is not Linux."""
    descriptors: set[int] = set()
    if sys.platform != "linux":
        return descriptors
    for name in os.listdir(Path("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    inet = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
                    if inet and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        descriptors.add(int(name))
    return descriptors


def refuse_connections(descriptors: Iterable[int]) -> None:
    """From now on the kernel drops every packet to these sockets, where it can. Connections that they have accepted go on."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as copy, contextlib.suppress(OSError):  # a sandbox without filters
            copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))

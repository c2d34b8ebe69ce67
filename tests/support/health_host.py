# SPDX-License-Identifier: Apache-2.0
"""Facts of a host that tests of checks set up or look for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest


def executable(folder: Path, name: str, script: str) -> dict[str, str]:
    """A PATH on which a program of this name stands first."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def outward() -> str:
    """An interface of this host that leads to others, and its address."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127.") and psutil.net_if_stats()[name].isup:
                return name
    pytest.skip("not run: this host has no network interface")


def rdma(tmp_path, **ports):
    for name, state in ports.items():
        folder = tmp_path / f"sys/class/infiniband/{name}/ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"4: {state}\n")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    return {"root": tmp_path, "nnodes": 2, "tensor_parallel_size": 2}

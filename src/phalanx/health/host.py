# SPDX-License-Identifier: Apache-2.0
"""What a host's kernel, limits, file systems and network answer. Everything is read at the moment of the call."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from phalanx.config.sources import is_service_link, variables_that
from phalanx.hardware import cgroup
from phalanx.hardware.visible import is_unknown

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_DEBUG",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_CUMEM_ENABLE",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_DISTRIBUTED_DEBUG",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRITON_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "XDG_CACHE_HOME",
    "HOME",
    "PATH",
    "HTTP_PROXY",
    "http_proxy",
    "NO_PROXY",
    "no_proxy",
    "RAY_ADDRESS",
    "LD_LIBRARY_PATH",
    "NVIDIA_VISIBLE_DEVICES",
)
"""The environment variables that change how a server starts or runs."""

COMMAND_SECONDS = 10.0


class Space(NamedTuple):
    """Bytes of a file system, as a user without privileges may use them."""

    total: int
    free: int


class ResourceLimit(NamedTuple):
    """A resource limit of this process; None for no limit."""

    soft: int | None
    hard: int | None


class Listener(NamedTuple):
    """Who listens on a port; pid None where the process belongs to another user or namespace."""

    pid: int | None
    command: str
    orphan: bool


def _matters(name: str, value: str) -> bool:
    """Empty ones, too: an empty CUDA_VISIBLE_DEVICES hides every GPU."""
    return name in VARIABLES or is_service_link(name, value) or is_unknown(name)


@dataclass(frozen=True)
class Host:
    """This host. `root`: where /proc, /sys and /dev are mounted; tests put their own files there."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: variables_that(_matters))

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """The text of a file, stripped; None where it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    def space(self, path: str | Path) -> Space:
        """Of the file system that holds `path`. Raises OSError."""
        stats = os.statvfs(self.path(str(path)))
        return Space(stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize)

    def limit(self, name: str) -> ResourceLimit:
        """Of "nofile", "memlock", "nproc", "stack", "as" or "data"."""
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        return ResourceLimit(*(None if value == resource.RLIM_INFINITY else value for value in (soft, hard)))

    @property
    def name(self) -> str:
        return socket.gethostname()

    @property
    def in_container(self) -> bool:
        if self.path("/.dockerenv").exists() or self.path("/run/.containerenv").exists():
            return True
        return any(word in (self.read("/proc/1/cgroup") or "") for word in ("docker", "kubepods", "containerd", "libpod"))

    @property
    def rdma_devices(self) -> list[str]:
        """InfiniBand and RoCE devices, by name."""
        folder = self.path("/sys/class/infiniband")
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def interfaces(self) -> dict[str, list[str]]:
        """Each network interface and its addresses, IPv4 first."""
        families = {socket.AF_INET: 0, socket.AF_INET6: 1}
        entries_by_name = psutil.net_if_addrs().items()
        return {
            name: [
                entry.address.partition("%")[0]
                for entry in sorted(entries, key=lambda e: families.get(e.family, 2))
                if entry.family in families
            ]
            for name, entries in entries_by_name
        }

    def interface_is_up(self, name: str) -> bool:
        stats = psutil.net_if_stats().get(name)
        return stats is not None and stats.isup

    def resolve(self, name: str) -> list[str]:
        """The addresses of a name, without repeats. Raises OSError for an unknown one."""
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in answers))

    def own_addresses(self) -> set[str]:
        return {address for addresses in self.interfaces().values() for address in addresses}

    def can_bind(self, address: str, port: int) -> OSError | None:
        """Whether a server could listen there: the error if it could not. The port is free again afterwards."""
        try:
            family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
        except OSError as error:
            return error
        return None

    def listener(self, port: int) -> Listener | None:
        """Who listens on a port of this host."""
        try:
            connections = psutil.net_connections("tcp")
        except (psutil.Error, OSError):
            return None
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                return Listener(connection.pid, *_described(connection.pid))
        return None

    def connect(self, address: str, port: int, seconds: float = 3.0) -> OSError | None:
        """Whether a port answers: the error if it does not. The connection is closed at once."""
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except OSError as error:
            return error
        return None

    def processes(self) -> list[psutil.Process]:
        """The processes of Phalanx on this host, by title."""
        ours = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                title = title_of(process)
                if title.startswith(("phalanx server", "phalanx engine", "phalanx rank", "phalanx node")):
                    ours.append(process)
        return ours

    def run(self, command: Sequence[str], seconds: float = COMMAND_SECONDS) -> str | None:
        """The output of a command; None where it is missing, fails, or takes longer."""
        if shutil.which(command[0], path=self.environment.get("PATH")) is None:
            return None
        try:
            done = subprocess.run(
                list(command), capture_output=True, text=True, timeout=seconds, check=False, env={**self.environment, "LC_ALL": "C"}
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    def limits(self) -> cgroup.GroupLimits:
        """Of this process's control groups and of their ancestors."""
        return cgroup.read_limits(self.root)


def _described(pid: int | None) -> tuple[str, bool]:
    if pid is None:
        return "a process of another user or container", False
    try:
        process = psutil.Process(pid)
        return title_of(process), is_orphan(process)
    except psutil.Error:
        return "a process that has ended", False


def title_of(process: psutil.Process) -> str:
    """The title or the command line of a process, without the blanks that pad a title. Raises psutil.Error."""
    return " ".join(process.cmdline()).strip() or process.name()


def is_orphan(process: psutil.Process) -> bool:
    """Whether an engine or a rank has lost its parent: a process of ours, of a user's Python program, or an actor of Ray. In a
    container ours may be the first process. A server may have a service manager as its parent."""
    if not title_of(process).startswith(("phalanx engine", "phalanx rank")):
        return False
    parent = process.parent()
    if parent is None or parent.pid <= 1:
        return parent is None or "phalanx" not in title_of(parent)
    words = " ".join(parent.cmdline()[:1]) + parent.name()
    return not any(name in words for name in ("phalanx", "python", "pytest", "ray::"))

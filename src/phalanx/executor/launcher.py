# SPDX-License-Identifier: Apache-2.0
"""Starting the processes of ranks: the `Launcher` seam, and `LocalLauncher` for this host.

The option `launcher` names the implementation. An executor (and a `Node`, on each further host of `nnodes`) calls
it with the options, hands it its ranks, and asks it which have ended. Steps and results do not pass through a launcher: ranks
connect to the engine's socket themselves.
"""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from phalanx import hardware, launch
from phalanx.config.dotted_path import launcher_class
from phalanx.config.options import EngineOptions
from phalanx.config.sources import differing_variables
from phalanx.errors import LayoutError, OptionError
from phalanx.hardware.probe import cores, free_cores
from phalanx.hardware.visible import VISIBLE
from phalanx.log import get_logger

log = get_logger(__name__)

WORKER = "phalanx.worker"
"""The module that a rank's process executes."""
KERNEL_FOLDERS = {"TRITON_CACHE_DIR": "triton", "FLASHINFER_WORKSPACE_BASE": "flashinfer"}
"""The variable that tells each compiler where it keeps kernels, and the subfolder of kernel_cache_dir that it is given."""


SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment of CPU ranks, unless the user sets the variable. OpenMP threads wait for each other after each operation. By default
they spin, on a core that another program may need to get its own part done: with two busy neighbours on two cores, operations take
many times as long."""


@dataclass(frozen=True)
class HostRanks:
    """The ranks of one host: `ranks` run on node `node`, and the i-th of them has device `first_device` + i."""

    node: int
    ranks: range
    first_device: int = 0


def host_ranks(options: EngineOptions, node: int, *, local_rank: int = 0) -> HostRanks:
    """The ranks of a node: ranks are spread evenly over the nodes, in order. Raises LayoutError where they do not divide."""
    world, nodes = options.world_size, options.nnodes
    sizes = f"pipeline {options.pipeline_parallel_size} x tensor {options.tensor_parallel_size}"
    if world % nodes:
        raise LayoutError(
            f"{sizes} = {world} ranks cannot be spread evenly over {nodes} nodes", why="each node holds as many ranks",
            next="choose sizes whose product nnodes divides",
        )  # fmt: skip
    if not 0 <= node < nodes:
        raise LayoutError(f"node_rank={node} is outside 0..{nodes - 1}", held=f"nnodes is {nodes}", next=f"use 0..{nodes - 1}")
    per_node = world // nodes
    return HostRanks(node, range(node * per_node, (node + 1) * per_node), local_rank * per_node)


class RankHandle(Protocol):
    """The process of one rank, as its launcher knows it."""

    @property
    def where(self) -> str:
        """For errors: "pid 17, node 0"."""

    def dump_stacks(self) -> None:
        """Make the process write the stacks of its threads to its log. Does not wait for that."""


@dataclass(frozen=True)
class EndedRank:
    """The process of a rank has ended; `code` as in Popen.returncode, `where` as in RankHandle."""

    rank: int
    code: int
    where: str


class Launcher(Protocol):
    """Starts, watches and stops the processes of ranks. It is made by calling what the option `launcher` names with the options."""

    on_this_host: bool
    """Whether every rank that it starts runs on this host. If so (and nnodes is 1) they reach the engine through a private folder;
    else over TCP, at master_addr and master_port."""

    def require_devices(self, ranks: HostRanks) -> None:
        """Raise LayoutError when there are too few devices for these ranks. Starts nothing."""

    def start(self, ranks: HostRanks, config: Mapping[str, Any]) -> Mapping[int, RankHandle]:
        """Start one process per rank, and return them by rank. Called once. When it raises, no process is left.

        Each process executes `WORKER` by `launch.start`, and gets `config` with these added: "rank", "node", "device_index",
        "local_ranks" (how many ranks share its host), and may have "free_cores" (cores that no other program uses). config holds
        "options" (of EngineOptions), "engine" (the zmq address to which ranks connect), "peer" (the address by which other hosts
        reach the host of rank 0: collectives use the interface that leads there), "returns_tokens" (see `Executor`) and
        "cluster_token" (what authenticates the connections to "engine"; None where nothing does). The token is a secret: pass it on
        where nobody else can read it, never in a command line. A launcher that places ranks on other hosts calls
        `LocalLauncher.start` on each of them, with its share of the ranks; if rank 0 is among these, it replaces "peer" by that
        host's address.
        """

    def ended(self) -> list[EndedRank]:
        """The ranks whose processes have ended since the last call, in order. Never blocks. Raises the error that ended a host."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when a process has ended. Valid from `start` to `stop`."""

    def stop(self, grace: float) -> None:
        """Wait up to `grace` seconds for processes to end by themselves, kill the others, and return when all are gone. May be
        called at any time, and again."""


@runtime_checkable
class ClusterLauncher(Launcher, Protocol):
    """A launcher that finds the hosts itself: `options.nnodes` of them, from one command.

    `start` gets all ranks, as those of node 0, and spreads them by `host_ranks`. Each host, that of rank 0 included, runs a
    `executor.node.Node` that joins the engine: so a lost host is noticed and named as it is without such a launcher.
    """

    @classmethod
    def gpus_per_host(cls, options: EngineOptions) -> int:
        """GPUs of the host that has the most: this one, where the engine runs, may have none."""

    def engine_address(self) -> str:
        """The address by which those hosts reach this one. The engine listens there, at master_port."""


def load_launcher(options: EngineOptions) -> Launcher:
    """The launcher that `options.launcher` names. Raises OptionError when it cannot be loaded."""
    launcher: Launcher = launcher_class(options)(options)
    return launcher


@dataclass(frozen=True)
class LocalRank:
    """A rank's process on this host."""

    child: launch.Child
    node: int

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def where(self) -> str:
        return f"pid {self.pid}, node {self.node}"

    def dump_stacks(self) -> None:
        self.child.signal(signal.SIGUSR1)


class LocalLauncher:
    """Starts ranks as child processes on this host: see `Launcher`. They end with this process, however it ends (`launch`)."""

    on_this_host = True
    module = WORKER

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._ranks: dict[int, LocalRank] = {}
        self._watch: launch.Watch | None = None

    def require_devices(self, ranks: HostRanks) -> None:
        if self._options.device != "cuda":
            return
        machine = self._machine
        needed, present = ranks.first_device + len(ranks.ranks), len(machine.gpus)
        if len(ranks.ranks) > 1 and any(gpu.uuid.startswith("MIG-") for gpu in machine.gpus):
            raise LayoutError(
                f"{len(ranks.ranks)} ranks cannot share instances of MIG",
                why="CUDA shows one instance to a process, without peers",
                next="use one rank for each instance (--replicas), or turn MIG off",
            )  # fmt: skip
        if needed > present:
            raise LayoutError(
                f"{needed} ranks do not fit on the GPUs of one host",
                held=f"node {ranks.node} has {present} GPU{'s' * (present != 1)}",
                why=machine.unusable or "each rank needs a GPU of its own",
                next=f"use at most {present} ranks per host, more nodes, or device='cpu'" if present else "use device='cpu'",
            )  # fmt: skip

    def start(self, ranks: HostRanks, config: Mapping[str, Any]) -> Mapping[int, LocalRank]:
        environment = {**kernel_folders(self._options.kernel_cache_dir), **self._visible_devices()}
        on_cpu = self._options.device == "cpu"
        free = free_cores() if on_cpu else cores()
        self._watch = launch.Watch()
        try:
            for index, rank in enumerate(ranks.ranks):
                rank_config = {
                    **config, "rank": rank, "node": ranks.node, "device_index": ranks.first_device + index,
                    "local_ranks": len(ranks.ranks), "free_cores": free,
                }  # fmt: skip
                child = launch.start(
                    self.module,
                    rank_config,
                    f"phalanx rank {rank}",
                    environment=environment,
                    defaults=SLEEPING_THREADS if on_cpu else None,
                )
                self._ranks[rank] = LocalRank(child, ranks.node)
                self._watch.add(child)
        except BaseException:
            self.stop(0)
            raise
        return self._ranks

    @cached_property
    def _machine(self) -> hardware.Machine:
        return hardware.usable_machine("cuda")

    def _visible_devices(self) -> dict[str, str]:
        """The GPUs of this host by their UUIDs, so that device i is the i-th of them: CUDA's own order and count may be others."""
        if self._options.device != "cuda":
            return {}
        return {VISIBLE: ",".join(dict.fromkeys(gpu.uuid for gpu in self._machine.gpus))}

    def ended(self) -> list[EndedRank]:
        return [] if self._watch is None else [self._ended_rank(exit) for exit in self._watch.ended()]

    def _ended_rank(self, exit: launch.Exit) -> EndedRank:
        rank, process = next((rank, process) for rank, process in self._ranks.items() if process.child is exit.child)
        return EndedRank(rank, exit.code, process.where)

    def fileno(self) -> int:
        return -1 if self._watch is None else self._watch.fileno()

    def stop(self, grace: float) -> None:
        children = [process.child for process in self._ranks.values()]
        if grace > 0:
            launch.wait(children, grace)
        launch.stop(children, grace=0)
        if self._watch is not None:
            self._watch.close()


def _reject_shared_folder(kernel_cache_dir: str, folder: Path) -> None:
    """Raise OptionError when users other than this one, root and the members of this process's group can write the folder:
    libraries are loaded from it, so that they could run code in the ranks."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        reason, cure = f"it belongs to user {status.st_uid}", "give a folder of this user"
    elif status.st_mode & stat.S_IWOTH:
        reason, cure = f"every user can write it (mode {stat.S_IMODE(status.st_mode):o})", f"run: chmod o-w {folder}"
    elif status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid():
        reason, cure = f"group {status.st_gid} can write it (mode {stat.S_IMODE(status.st_mode):o})", f"run: chmod g-w {folder}"
    else:
        return
    raise OptionError(
        f"kernel_cache_dir={kernel_cache_dir!r} is not safe", held=f"{folder}: {reason}",
        why="ranks load compiled libraries from there, and whoever can write it can run code in them", next=cure,
    )  # fmt: skip


def kernel_folders(kernel_cache_dir: str | None) -> dict[str, str]:
    """The variables for ranks with this `kernel_cache_dir`; the folders are made. Empty where it is None.

    A variable that is set tells any program where it keeps kernels; the option tells this engine. The option wins, and the log
    says so. Raises OptionError, before any rank starts, for a folder that cannot be made or written, or that others can write.
    """
    if kernel_cache_dir is None:
        return {}
    try:
        root = Path(kernel_cache_dir).expanduser().absolute()
    except RuntimeError as error:  # "~" of a user whom this host does not know
        raise OptionError(
            f"kernel_cache_dir={kernel_cache_dir!r} cannot be resolved", why=str(error), next="give a folder, or none"
        ) from None
    folders = {name: str(root / part) for name, part in KERNEL_FOLDERS.items()}
    for folder in folders.values():
        failed = "made"
        try:
            Path(folder).mkdir(mode=0o755, parents=True, exist_ok=True)
            failed = "written"
            tempfile.TemporaryFile(dir=folder).close()
            for path in (root, Path(folder)):
                _reject_shared_folder(kernel_cache_dir, path)
        except OSError as error:
            raise OptionError(
                f"kernel_cache_dir={kernel_cache_dir!r} cannot be used", held=f"{folder} cannot be {failed}",
                why=error.strerror or str(error), next="give a folder that this user may write, or none",
            ) from None  # fmt: skip
    for name, other in differing_variables(folders).items():
        log.warning("kernel_cache_dir wins: kernels are kept in %s, not in %s=%s", folders[name], name, other)
    return folders

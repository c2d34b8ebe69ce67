# SPDX-License-Identifier: Apache-2.0
"""The ranks of one host: which they are, whether it has a GPU for each, where they keep kernels, and starting them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx import hardware
from phalanx.comm import launch
from phalanx.config.options import EngineOptions
from phalanx.config.sources import otherwise
from phalanx.errors import LayoutError, OptionError
from phalanx.log import get_logger

log = get_logger(__name__)

WORKER = "phalanx.worker.worker"
KERNEL_FOLDERS = {"TRITON_CACHE_DIR": "triton", "FLASHINFER_WORKSPACE_BASE": "flashinfer"}
"""The variable by which each compiler learns where it keeps kernels, and the subfolder of kernel_cache_dir that it is given."""


@dataclass(frozen=True)
class Host:
    """Ranks `ranks` stand on node `node`; the i-th of them has device `first_device` + i."""

    node: int
    ranks: range
    first_device: int = 0


def host_of(options: EngineOptions, node: int, *, local_rank: int = 0) -> Host:
    """Ranks are spread evenly over the nodes, in order. Raises LayoutError where they do not divide."""
    world, nodes = options.world_size, options.nnodes
    sizes = f"pipeline {options.pipeline_parallel_size} x tensor {options.tensor_parallel_size}"
    if world % nodes:
        raise LayoutError(
            f"{sizes} = {world} ranks were asked for", held=f"there are {nodes} nodes", why="each node holds as many ranks",
            next="choose sizes whose product the nodes divide",
        )  # fmt: skip
    if not 0 <= node < nodes:
        raise LayoutError(f"node_rank={node} was asked for", held=f"nnodes is {nodes}", next=f"use 0..{nodes - 1}")
    each = world // nodes
    return Host(node, range(node * each, (node + 1) * each), local_rank * each)


def require_devices(host: Host, device: str) -> None:
    """Raise LayoutError when the host has too few GPUs for its ranks: how many there are, and what fits."""
    if device != "cuda":
        return
    machine = hardware.detect_machine()
    needed = host.first_device + len(host.ranks)
    if needed > len(machine.gpus):
        why = machine.failures.get("gpus", "each rank needs a GPU of its own")
        fits = len(machine.gpus)
        raise LayoutError(
            f"{needed} ranks on GPUs of one host were asked for", held=f"node {host.node} has {fits} GPU{'s' * (fits != 1)}",
            why=why, next=f"use at most {fits} ranks per host, more nodes, or device='cpu'" if fits else "use device='cpu'",
        )  # fmt: skip


def kernel_folders(asked: str | None) -> dict[str, str]:
    """The variables for ranks whose `kernel_cache_dir` is this; the folders are made. None of them where it is None.

    A variable that is set says where any program keeps kernels, the option where this engine does: the option wins, and the log
    says so. Raises OptionError, before any rank starts, for a folder that cannot be made or written.
    """
    if asked is None:
        return {}
    try:
        kept = Path(asked).expanduser().absolute()
    except RuntimeError as error:  # "~" of somebody whom this host does not know
        raise OptionError(f"kernel_cache_dir={asked!r} was asked for", why=str(error), next="give a folder, or none") from None
    found = {name: str(kept / part) for name, part in KERNEL_FOLDERS.items()}
    for folder in found.values():
        failed = "made"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            failed = "written"
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise OptionError(
                f"kernel_cache_dir={asked!r} was asked for", held=f"{folder} cannot be {failed}", why=error.strerror or str(error),
                next="give a folder that this user may write, or none",
            ) from None  # fmt: skip
    for name, other in otherwise(found).items():
        log.warning("kernel_cache_dir wins: kernels are kept in %s, not in %s=%s", found[name], name, other)
    return found


def start(host: Host, options: EngineOptions, *, engine: str, peer: str, store_port: int) -> dict[int, launch.Child]:
    """Start the host's rank processes; rank -> child.

    `engine`: the zmq address that they report to. `peer`: the address by which host 0 is reached. `store_port`: where rank 0
    listens for the others; 0 is any free port.
    """
    children: dict[int, launch.Child] = {}
    environment = kernel_folders(options.kernel_cache_dir)
    try:
        for index, rank in enumerate(host.ranks):
            config: dict[str, Any] = {
                "rank": rank, "node": host.node, "device_index": host.first_device + index, "local_ranks": len(host.ranks),
                "engine": engine, "peer": peer, "store_port": store_port, "options": options.model_dump(mode="json"),
            }  # fmt: skip
            children[rank] = launch.start(WORKER, config, f"phalanx rank {rank}", environment=environment)
    except BaseException:
        launch.stop(children.values(), grace=0)
        raise
    return children

# SPDX-License-Identifier: Apache-2.0
"""The ranks of one host: which they are, whether it has a GPU for each, and starting them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx import hardware
from phalanx.comm import launch
from phalanx.config.options import EngineOptions
from phalanx.errors import LayoutError

WORKER = "phalanx.engine.ranks.worker"


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
    machine = hardware.look()
    needed = host.first_device + len(host.ranks)
    if needed > len(machine.gpus):
        why = machine.failures.get("gpus", "each rank needs a GPU of its own")
        fits = len(machine.gpus)
        raise LayoutError(
            f"{needed} ranks on GPUs of one host were asked for", held=f"node {host.node} has {fits} GPU{'s' * (fits != 1)}",
            why=why, next=f"use at most {fits} ranks per host, more nodes, or device='cpu'" if fits else "use device='cpu'",
        )  # fmt: skip


def start(host: Host, options: EngineOptions, *, engine: str, peer: str, store_port: int) -> dict[int, launch.Child]:
    """Start the host's rank processes; rank -> child.

    `engine`: the zmq address that they report to. `peer`: the address by which host 0 is reached. `store_port`: where rank 0
    listens for the others; 0 is any free port.
    """
    children: dict[int, launch.Child] = {}
    try:
        for index, rank in enumerate(host.ranks):
            config: dict[str, Any] = {
                "rank": rank, "node": host.node, "device_index": host.first_device + index, "local_ranks": len(host.ranks),
                "engine": engine, "peer": peer, "store_port": store_port, "options": options.model_dump(mode="json"),
            }  # fmt: skip
            children[rank] = launch.start(WORKER, config, f"phalanx rank {rank}")
    except BaseException:
        launch.stop(children.values(), grace=0)
        raise
    return children

# SPDX-License-Identifier: Apache-2.0
"""Start CPU ranks over gloo that run a piece of source, and hand back what each of them results."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

_AROUND = """
import os, pathlib, sys
import torch
import torch.distributed as dist
from phalanx.comm.torch_group import TorchGroup
torch.set_num_threads(1)
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
group = TorchGroup(dist.group.WORLD, torch.device("cpu"))
results = {}
{body}
torch.save(results, folder / f"{rank}.pt")
group.barrier()
dist.destroy_process_group()
sys.stderr.flush()
os._exit(0)  # an interpreter that winds down under torch's threads now and then aborts
"""


def run(world: int, body: str, folder: Path, *, timeout: float = 120.0) -> list[dict[str, Any]]:
    """`body` sees rank, world, folder, group and fills the dict `results`. Raises with the ranks' output when one fails."""
    source = _AROUND.replace("{body}", body)
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-c", source, str(rank), str(world), str(folder)]
        with log.open("w") as file:
            ranks.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
    end = time.monotonic() + timeout
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks) and time.monotonic() < end:
        time.sleep(0.02)
    for rank in ranks:
        rank.kill()
        rank.wait()
    if any(rank.returncode for rank in ranks):
        raise AssertionError("\n".join(f"rank {number}:\n{log.read_text()}" for number, log in enumerate(logs)))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]

# SPDX-License-Identifier: Apache-2.0
"""How a process becomes a rank of a benchmark: its device, its group, and what it reports of its machine."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.comm.group import Group
from phalanx.comm.torch_group import form
from phalanx.hardware import provenance
from phalanx.layout.layout import Layout


def join_group(rank: int, world: int, device: str, local_rank: int, store: Any, timeout: float) -> tuple[Group, torch.device]:
    """The group of all ranks, and this rank's device: GPU `local_rank` for "cuda", one thread for "cpu". Collective."""
    if device == "cuda":
        own = torch.device("cuda", local_rank)
        torch.cuda.set_device(own)
    else:
        own = torch.device("cpu")
        torch.set_num_threads(1)
    return form(rank, world, Layout(tp=world), store, own, timeout=timeout).tp, own


def machine_facts(device: torch.device) -> dict[str, str]:
    """Machine and versions, as the sidecar of a CSV keeps them."""
    runtime = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        runtime["gpu"] = torch.cuda.get_device_properties(device).name
        runtime["gpus"] = str(torch.cuda.device_count())
        runtime["cuda"] = str(torch.version.cuda)
        runtime["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return provenance.machine_facts(runtime)

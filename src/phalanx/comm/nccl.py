# SPDX-License-Identifier: Apache-2.0
"""NCCL between GPUs, gloo between CPU ranks (GLOO, in NCCL's place): torch.distributed's own sum; a fusion runs as a kernel after
it.

out = all_reduce(x)
"""

from __future__ import annotations

from torch import Tensor

from phalanx.comm.group import Group
from phalanx.kernels.scaled_tensors import Unscaled


def all_reduce(x: Tensor | Unscaled, group: Group) -> Tensor:
    """The library's sum over ranks; x may be overwritten."""
    return group.all_reduce(x)

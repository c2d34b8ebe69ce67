# SPDX-License-Identifier: Apache-2.0
"""NCCL between GPUs, gloo between CPU ranks (GLOO, in NCCL's place): torch.distributed's own sum, then the fusion as one kernel.

out = all_reduce(x);  out = residual_rms_norm(out, ...)
"""

from __future__ import annotations

from torch import Tensor

from phalanx.comm.group import Group, ResidualRmsNorm, finish
from phalanx.kernels.reference import Unscaled


def all_reduce(x: Tensor | Unscaled, group: Group) -> Tensor:
    """The library's sum over ranks; x may be overwritten."""
    return group.all_reduce(x)


def all_reduce_norm(x: Tensor | Unscaled, fusion: ResidualRmsNorm, group: Group) -> tuple[Tensor, ...]:
    """The library's sum, and the fusion behind it."""
    return finish(group.all_reduce(x), fusion)

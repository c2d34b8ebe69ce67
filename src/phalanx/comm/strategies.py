# SPDX-License-Identifier: Apache-2.0
"""The registry of all-reduce strategies: which of them the ranks of a group can run, as functions, and why the others cannot.

The runtime (`comm.tuned_group`) and the tuner (`tune.ranks.candidates`) both take their strategies from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from phalanx.comm import nccl
from phalanx.comm.group import Group, ResidualRmsNorm, finish
from phalanx.comm.sequence_parallel import ShardedResidual
from phalanx.comm.shared_memory import share_text
from phalanx.comm.symmetric import ReduceScatterBuffer, SymmetricWorkspace, form_reduce_scatter_buffer, form_workspace
from phalanx.comm.torch_group import TorchGroup
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.log import get_logger
from phalanx.tables.strategy import SUPPORTED, Strategy

T = TypeVar("T")
Part = TypeVar("Part", Tensor, Unscaled, Tensor | Unscaled)
_log = get_logger(__name__)


class ReduceScatterNormAllGather(Protocol):
    """All-reduces with their fusion that leave the new residual sharded. They accept a residual that is a tensor, or sharded as
    theirs will be."""

    def chunk_rows(self, hidden: int, dtype: torch.dtype) -> int:
        """Rows by which `all_reduce_norm` of a tensor [T, hidden] shards the residual."""

    def all_reduce_norm(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """The sum over ranks of x [T, H] and its fusion; the new residual is a ShardedResidual."""


class GemmReduceScatter(Protocol):
    """The same, of a GEMM output that the GEMM itself wrote to the ranks that sum it. All rows are one chunk."""

    def targets(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> Sequence[tuple[slice, Tensor]] | None:
        """Where to write a GEMM output [tokens, hidden]; None where it is to be handed over as a tensor instead."""

    def all_reduce_norm(self, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """Of a GEMM output that was written to its targets."""


@dataclass(frozen=True)
class AllReduce:
    """One strategy. sum: over ranks of x, which may be overwritten. sum_norm: the sum and its fusion in one kernel; None where the
    fusion always runs as a kernel of its own. rs_norm_ag, gemm_rs: of the strategies that leave the residual sharded (their sum
    alone is that of TWOSHOT)."""

    sum: Callable[[Tensor | Unscaled], Tensor]
    sum_norm: Callable[[Tensor | Unscaled, ResidualRmsNorm], tuple[Tensor, ...]] | None = None
    rs_norm_ag: ReduceScatterNormAllGather | None = None
    gemm_rs: GemmReduceScatter | None = None

    def run(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm, *, fused: bool) -> tuple[Tensor, ...]:
        """The sum over ranks of x [T, H] and its fusion, in the collective's kernel if `fused` and where it can be.

        fusion.residual: a tensor, or sharded as `rs_norm_ag` shards it.
        """
        x = aligned(x)
        if self.rs_norm_ag is not None:
            return self.rs_norm_ag.all_reduce_norm(x, aligned_residual(fusion))
        if fused and self.sum_norm is not None and one_dtype(x, fusion):
            return self.sum_norm(x, aligned_residual(fusion))
        return finish(self.sum(x), fusion)


def one_dtype(x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> bool:
    """Whether one kernel can run sum and fusion: a matrix, and tensors of one dtype."""
    values = x.values if isinstance(x, Unscaled) else x
    return values.dim() == 2 and fusion.weight.dtype == values.dtype == fusion.residual.dtype


def aligned(x: Part) -> Part:
    """x where kernels may read it in vectors of 16 bytes: contiguous, and starting on one."""
    if isinstance(x, Unscaled):
        return Unscaled(*map(aligned, x))
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def aligned_residual(fusion: ResidualRmsNorm) -> ResidualRmsNorm:
    residual = fusion.residual
    return fusion if isinstance(residual, ShardedResidual) else replace(fusion, residual=aligned(residual))


@dataclass
class Strategies:
    """What a group can run. refused: why it cannot run the others, as far as `tables.admit` does not know. workspace: on GPUs, that
    of ONESHOT and TWOSHOT."""

    fingerprint: Fingerprint
    runs: dict[Strategy, AllReduce] = field(default_factory=dict)
    refused: dict[Strategy, str] = field(default_factory=dict)
    workspace: SymmetricWorkspace | None = None


def available(
    base: Group,
    device: torch.device,
    fingerprint: Fingerprint,
    message_bytes: int,
    *,
    timeout: float = 300.0,
    gemm_rs: bool = False,
    sweeps: bool = False,
) -> Strategies:
    """What the ranks of `base` can run on this machine; collective, and the same on every rank.

    message_bytes: of one rank's longest message that a workspace holds without chunks. timeout: seconds that a CPU rank may keep
    the others waiting. gemm_rs: on GPUs, allocate the buffer of GEMM_RS, too. sweeps: see `GemmRs`.
    """
    strategies = Strategies(fingerprint, {Strategy.NCCL: AllReduce(partial(nccl.all_reduce, group=base))})
    if not fingerprint.peers_reach:
        return strategies  # tables.admit knows, and says why
    on_cpu = device.type == "cpu"
    ours = _on_cpu(base, message_bytes, timeout) if on_cpu else _on_gpu(base, device, message_bytes, gemm_rs=gemm_rs)
    if isinstance(ours, str):
        strategies.refused = dict.fromkeys((strategy for strategy in SUPPORTED if strategy is not Strategy.NCCL), ours)
    elif isinstance(ours, tuple):
        strategies.workspace = ours[0]
        strategies.runs |= symmetric_strategies(*ours, sweeps=sweeps)
    else:
        strategies.runs |= ours
    return strategies


def _on_cpu(base: Group, message_bytes: int, timeout: float) -> dict[Strategy, AllReduce] | str:
    from phalanx.comm import shared_memory
    from phalanx.comm.sequence_parallel.on_cpu import CpuGemmRs, CpuRsNormAg

    memory = shared_memory.form(base, message_bytes, timeout=timeout)
    if isinstance(memory, str):
        return memory
    return {
        Strategy.ONESHOT: AllReduce(memory.oneshot, memory.oneshot_norm),
        Strategy.TWOSHOT: AllReduce(memory.twoshot, memory.twoshot_norm),
        Strategy.RS_NORM_AG: AllReduce(memory.twoshot, rs_norm_ag=CpuRsNormAg(memory)),
        Strategy.GEMM_RS: AllReduce(memory.twoshot, gemm_rs=CpuGemmRs(memory)),
    }


def _on_gpu(
    base: Group, device: torch.device, message_bytes: int, *, gemm_rs: bool
) -> tuple[SymmetricWorkspace, ReduceScatterBuffer | None] | str:
    """The memory of this group's strategies, or why there is none."""
    if any(share_text(base, "" if has_triton() else "no", device)):
        return "Triton is not installed"
    assert isinstance(base, TorchGroup)
    workspace = formed(base, partial(form_workspace, base.process_group, device, message_bytes, base.kernel_marks))
    if isinstance(workspace, str):
        return workspace
    buffer = formed(base, partial(form_reduce_scatter_buffer, base.process_group, device, message_bytes)) if gemm_rs else None
    if isinstance(buffer, str):
        if base.rank == 0:
            _log.warning("GEMM_RS is not used: %s", buffer)
        buffer = None
    return workspace, buffer


def symmetric_strategies(
    workspace: SymmetricWorkspace, buffer: ReduceScatterBuffer | None = None, *, sweeps: bool = False
) -> dict[Strategy, AllReduce]:  # fmt: skip
    """The strategies over symmetric memory; GEMM_RS where it has a buffer."""
    from phalanx.comm import oneshot, twoshot
    from phalanx.comm.sequence_parallel.gemm_rs import GemmRs
    from phalanx.comm.sequence_parallel.rs_norm_ag import RsNormAg

    total = partial(twoshot.all_reduce, workspace=workspace)
    strategies = {
        Strategy.ONESHOT: AllReduce(
            partial(oneshot.all_reduce, workspace=workspace), partial(oneshot.all_reduce_norm, workspace=workspace)
        ),
        Strategy.TWOSHOT: AllReduce(total, partial(twoshot.all_reduce_norm, workspace=workspace)),
        Strategy.RS_NORM_AG: AllReduce(total, rs_norm_ag=RsNormAg(workspace)),
    }  # fmt: skip
    if buffer is not None:
        strategies[Strategy.GEMM_RS] = AllReduce(total, gemm_rs=GemmRs(workspace, buffer, sweeps=sweeps))
    return strategies


def formed(base: TorchGroup, form: Callable[[], T]) -> T | str:
    """What `form` returns, or why it failed on one of the ranks."""
    memory, why = None, ""
    try:
        memory = form()
    except RuntimeError as error:
        why = f"symmetric memory: {str(error).splitlines()[0][:150]}"
    texts = share_text(base, why, base.device)
    if all(texts) and len(set(texts)) == 1:
        return texts[0]
    refusals = [(rank, text) for rank, text in enumerate(texts) if text]
    return f"rank {refusals[0][0]}: {refusals[0][1]}" if refusals else cast(T, memory)

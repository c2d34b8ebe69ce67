# SPDX-License-Identifier: Apache-2.0
"""The strategies of `comm` as candidates of a benchmark: the same functions that the runtime calls."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from phalanx.comm import shared_memory
from phalanx.comm.choose import Chooser, Rules
from phalanx.comm.group import Group, ResidualRmsNorm, finish
from phalanx.comm.symmetric import Workspace
from phalanx.hardware.fingerprint import Fingerprint, link_class
from phalanx.hardware.links import nvlink_everywhere
from phalanx.tables.message import Fusion, dtype_named
from phalanx.tables.shipped import table_for
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune.ranks.measure import Candidate

Sum = Callable[[Tensor], Tensor]
SumNorm = Callable[[Tensor, ResidualRmsNorm], tuple[Tensor, ...]]


class Built:
    """Candidates by strategy. fingerprint: of the machine that the group stands on; workspace: of its GPUs, where they have one."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self.workspace: Workspace | None = None
        self._sums: dict[Strategy, Sum] = {}
        self._norms: dict[Strategy, SumNorm] = {}
        self._refused: dict[Strategy, str] = {}

    def add(self, strategy: Strategy, total: Sum, norm: SumNorm | None) -> None:
        """norm: sum and fusion in one kernel; None where the fusion always follows as a kernel of its own."""
        self._sums[strategy] = total
        if norm is not None:
            self._norms[strategy] = norm

    def refuse(self, strategy: Strategy, reason: str) -> None:
        self._refused[strategy] = reason

    def get(self, choice: Choice) -> Candidate:
        if choice.strategy is Strategy.AUTO:
            return self._auto
        if choice.strategy not in self._sums:
            raise KeyError(self._refused.get(choice.strategy, f"{choice.strategy.name} is not built here"))
        total, norm = self._sums[choice.strategy], self._norms.get(choice.strategy)

        def run(x: Tensor, fusion: ResidualRmsNorm | None) -> tuple[Tensor, ...]:
            if fusion is None:
                return (total(x),)
            if norm is None or choice.unfused:
                return finish(total(x), fusion)
            return norm(x, fusion)

        return run

    def _auto(self, x: Tensor, fusion: ResidualRmsNorm | None) -> tuple[Tensor, ...]:
        """What the machine's table (or seed) says for this size."""
        kind = Fusion.NONE
        if fusion is not None:
            kind = Fusion.of(fusion.quant, token_scale=fusion.scale is None, keep_norm=fusion.keep_norm)
        chosen = self._chooser(x.shape[0], x.shape[1], dtype_named(str(x.dtype)), kind)
        return self.get(Choice(chosen.strategy, unfused=not chosen.fused))(x, fusion)

    @cached_property
    def _chooser(self) -> Chooser:
        return Chooser(Rules(self.fingerprint, self._refused, table_for(self.fingerprint).lookup))


def open_group(group: Group, device: torch.device, max_bytes: int) -> Built:
    """What the ranks of `group` can run; collective. max_bytes: the longest message that a workspace must hold without chunks."""
    hosts = len(set(shared_memory.share_text(group, socket.gethostname(), device)))
    built = Built(fingerprint_here(group.size, device, hosts))
    built.add(Strategy.NCCL, group.all_reduce, None)
    if not built.fingerprint.peers_reach:
        return built  # tables.admit knows, and says why
    if device.type == "cpu":
        _add_shared(built, group, max_bytes)
    else:
        from phalanx.comm.symmetric import form_workspace
        from phalanx.comm.torch_group import TorchGroup

        assert isinstance(group, TorchGroup)
        built.workspace = form_workspace(group.process_group, device, max_bytes)
        add_symmetric(built, built.workspace)
    return built


def _add_shared(built: Built, group: Group, max_bytes: int) -> None:
    memory = shared_memory.form(group, max_bytes)
    if isinstance(memory, str):
        for strategy in (Strategy.ONESHOT, Strategy.TWOSHOT):
            built.refuse(strategy, memory)
        return
    built.add(Strategy.ONESHOT, memory.oneshot, memory.oneshot_norm)
    built.add(Strategy.TWOSHOT, memory.twoshot, memory.twoshot_norm)


def add_symmetric(built: Built, workspace: Workspace) -> None:
    """ONESHOT and TWOSHOT on GPUs."""
    from phalanx.comm import oneshot, twoshot

    built.add(Strategy.ONESHOT, lambda x: oneshot.all_reduce(x, workspace), lambda x, f: oneshot.all_reduce_norm(x, f, workspace))
    built.add(Strategy.TWOSHOT, lambda x: twoshot.all_reduce(x, workspace), lambda x, f: twoshot.all_reduce_norm(x, f, workspace))


def fingerprint_here(world: int, device: torch.device, hosts: int = 1) -> Fingerprint:
    """Of the first `world` devices of this host, as one process sees it: what a group of them would find."""
    if device.type == "cpu":
        return Fingerprint(0, link_class(device="cpu", hosts=hosts), world)
    major, minor = torch.cuda.get_device_capability(device)
    if hosts > 1:
        return Fingerprint(10 * major + minor, link_class(device="cuda", hosts=hosts), world)
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    reach = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    linked = reach and nvlink_everywhere([str(torch.cuda.get_device_properties(index).uuid) for index in range(world)])
    return Fingerprint(10 * major + minor, link_class(device="cuda", peer_access=reach, nvlink=linked), world)

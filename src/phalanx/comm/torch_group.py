# SPDX-License-Identifier: Apache-2.0
"""Groups over torch.distributed: NCCL between GPUs, gloo between CPU processes. `form` makes the groups of a layout's axes."""

from __future__ import annotations

import math
import os
import re
import socket
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, overload

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed has the same names, untyped

from phalanx.comm.group import Group, ResidualRmsNorm, Solo, Splits, by_rank, finish, sum_in_rank_order, with_scales
from phalanx.comm.listeners import listening, refuse_connections
from phalanx.errors import EngineError, LayoutError
from phalanx.hardware.probe import address_towards
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.layout.layout import Layout

GATHER_BYTES = 256 << 10
"""Over gloo: up to so many bytes every rank gathers all tensors and sums them; above, each rank sums a part and all gather the
sums."""
SENDS_IN_FLIGHT = 4
"""Over gloo: how many messages a sender may be ahead of its receiver before `send` waits."""
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket|gloo|nccl|timed out|peer|store|process group", re.IGNORECASE
)


@dataclass(frozen=True)
class Groups:
    """A rank's groups. `tp`: the ranks that split its layers; `pp`: the pipeline stages in order; `world`: all ranks; `dp`: the
    ranks with the same slices for other requests, which hold other experts; `ends`: the first and the last stage of `pp`, where
    tokens return from the last to the first (a group of its own: over NCCL, sends of one group wait for each other); `dcp`: the
    ranks of `tp` that divide the tokens of latents."""

    tp: Group
    pp: Group
    world: Group
    dp: Group = field(default_factory=Solo)
    ends: Group = field(default_factory=Solo)
    dcp: Group = field(default_factory=Solo)


KernelMarks = Callable[[], tuple[int, ...]]
"""Gives what the kernel that is launched next gets, to tell its call by itself: (address of a counter, number of the call), or
nothing."""


class Marks(Protocol):
    """What the calls of a rank's GPU are told to, where the GPU says where it is: `comm.device_marks`."""

    def of_kernel(self) -> tuple[int, ...]:
        """As KernelMarks."""

    def mark(self) -> None:
        """Mark the call that is made, if no kernel has, by a kernel before it."""


class TorchGroup:
    """A `Group` over one torch process group. Results are the same bits on every rank.

    On CPU, tensors of 16 bit are summed in fp32 and rounded once. Over gloo the sum is in rank order for every shape, so that a
    row's sum does not depend on the batch around it: for two ranks any order is rank order, for more it is made here (in fewer
    rounds than gloo's ring takes). On GPU it is NCCL's own sum.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, marks: Marks | None = None) -> None:
        self.process_group = process_group
        self.device = device
        self.marks = marks
        self.kernel_marks: KernelMarks = tuple if marks is None else marks.of_kernel
        self.calls: Counter[str] = Counter()  # all-reduces so far, by "STRATEGY/FUSION"
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: None = None) -> Tensor: ...
    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]: ...
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm | None = None) -> Tensor | tuple[Tensor, ...]:
        self.calls["NCCL/NONE" if fusion is None else "NCCL/RESIDUAL_RMS_NORM"] += 1
        total = self._sum(with_scales(x).contiguous())
        return total if fusion is None else finish(total, fusion)

    def _sum(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        if self.device.type != "cpu":
            # Synchronous calls run on the caller's stream; the group's own method uses NCCL's stream and synchronizes the two
            # twice.
            self._mark()
            dist.all_reduce(x, group=self.process_group)
            return x
        total = x.float() if x.is_floating_point() and x.dtype != torch.float64 else x
        if self.size == 2:
            self.process_group.allreduce([total]).wait()
        elif total.nbytes <= GATHER_BYTES:
            total = sum_in_rank_order(self._gather(total))
        else:
            total = self._sum_in_parts(total)
        return total.to(x.dtype)

    def _mark(self) -> None:
        if self.marks is not None:
            self.marks.mark()

    def _sum_in_parts(self, x: Tensor) -> Tensor:
        """Rank r sums the r-th part of the x of all ranks in rank order, then all gather the sums."""
        count = -(-x.numel() // self.size)
        padded = torch.nn.functional.pad(x.reshape(-1), (0, count * self.size - x.numel()))
        parts = torch.empty_like(padded)
        self.process_group.alltoall_base(parts, padded, [], []).wait()
        sums = self._gather(sum_in_rank_order(parts.view(self.size, count)))
        return sums.view(-1)[: x.numel()].view(x.shape)

    def _gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]"""
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if self.device.type != "cpu":
            self._mark()
            dist.all_gather_into_tensor(parts.view(-1), x.view(-1), group=self.process_group)
        else:
            self.process_group._allgather_base(parts.view(-1), x.view(-1)).wait()
        return parts

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        parts = self._gather(x.contiguous())
        dim %= x.dim()
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)

    def all_to_all(self, x: Tensor, splits: Splits | None = None) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x) if splits is None else x.new_empty((sum(splits.received), *x.shape[1:]))
        if self.device.type != "cpu":
            sent, received = (None, None) if splits is None else (list(splits.sent), list(splits.received))
            self._mark()
            dist.all_to_all_single(out, x, received, sent, group=self.process_group)
            return out
        row = math.prod(x.shape[1:]) * x.element_size()  # as bytes: gloo does not know every dtype
        sent, received = ([], []) if splits is None else ([row * n for n in splits.sent], [row * n for n in splits.received])
        if row and (x.numel() or splits is not None):
            self.process_group.alltoall_base(out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), received, sent).wait()
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """By an all-to-all: NCCL's own rounds at each rank, in an order that depends on the size."""
        return sum_in_rank_order(by_rank(self.all_to_all(x), self.size))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self._mark()
        self.process_group.broadcast(x, source).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        """gloo sends only once the receiver asks. x is copied, so that this rank can continue with its next step meanwhile."""
        if self.device.type != "cpu":
            self._mark()
            self.process_group.send([x.contiguous()], to, 0).wait()
            return
        while self._sending and (self._sending[0][0].is_completed() or len(self._sending) >= SENDS_IN_FLIGHT):
            self._sending.popleft()[0].wait()
        copy = x.clone(memory_format=torch.contiguous_format)
        self._sending.append((self.process_group.send([copy], to, 0), copy))

    def receive(self, x: Tensor, source: int) -> Tensor:
        self._mark()
        self.process_group.recv([x], source, 0).wait()
        return x

    def barrier(self) -> None:
        if self.device.type == "cpu":
            self.process_group.barrier().wait()
        else:
            self._mark()
            dist.barrier(self.process_group, device_ids=[self.device.index or 0])

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def gemm_reduce_scatter_targets(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> None:
        return None


def listen(host: str, port: int, world: int, *, timeout: float) -> tuple[TCPStore, str]:
    """Rank 0: open the store of the ranks, on `host` only, at `port` (0: any free one). Returns it with its address.

    Raises EngineError when the port is in use.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"port {port} on {host} cannot be opened", why=str(error), next="choose another master_port"
            ) from None
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = TCPStore(
            host, port, world, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    finally:
        listener.close()
    return store, f"{host}:{port}"


def connect(address: str, world: int, *, timeout: float) -> TCPStore:
    """Any other rank: the store at `address` ("host:port")."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), world, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def form(
    rank: int,
    world: int,
    layout: Layout,
    store: Store | str,
    device: torch.device,
    *,
    peer: str = "127.0.0.1",
    timeout: float = 300,
    returns_tokens: bool = False, marks: Marks | None = None,
) -> Groups:  # fmt: skip
    """Form this rank's groups; collective over all ranks, and once per process. A group of one is `Solo`.

    `store`: an open store, or "host:port", where rank 0 listens. `peer`: the address of host 0; gloo uses the interface from
    which it is reached (NCCL finds its own). `timeout`: the limit of one collective in seconds. `returns_tokens`: form
    `Groups.ends`, too. `marks`: of all groups but that one, which has a stream of its own.
    """
    if world != layout.world:
        raise LayoutError(f"{world} ranks do not fit the layout", held=f"{layout} has {layout.world} ranks")
    if world == 1:
        return Groups(Solo(), Solo(), Solo())
    if isinstance(store, str):
        host, _, port = store.rpartition(":")
        store = listen(host, int(port), world, timeout=timeout)[0] if rank == 0 else connect(store, world, timeout=timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "gloo":
        _bind_gloo(peer)
    else:  # else a thread of torch asks the store once a second whether to write a report, which nobody reads
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    before = listening()
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=limit,
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    all_ranks = dist.group.WORLD
    assert all_ranks is not None

    def axis(members: list[tuple[int, ...]]) -> Group:
        """All ranks form all groups of an axis, in the same order; each returns its own."""
        own: Group = Solo()
        for ranks in members:
            if len(ranks) == 1:
                continue
            process_group = all_ranks if len(ranks) == world else dist.new_group(list(ranks), backend=backend, timeout=limit)
            if rank in ranks:
                own = TorchGroup(process_group, device, marks)
        return own

    tp = axis(sorted({tuple(layout.tp_group(r)) for r in range(world)}))
    pp = axis(sorted({tuple(layout.pp_group(r)) for r in range(world)}))
    dp = axis(sorted({tuple(layout.dp_group(r)) for r in range(world)}))
    ends = _form_ends(rank, layout, backend, device, limit) if returns_tokens else Solo()
    dcp = tp if layout.dcp == layout.tp else axis(sorted({tuple(layout.dcp_group(r)) for r in range(world)}))
    groups = Groups(tp, pp, TorchGroup(all_ranks, device, marks), dp, ends, dcp)
    for group in (groups.world, groups.tp, groups.pp, groups.dp, groups.ends, groups.dcp):
        group.barrier()  # connects now, so that a failure is one of the start
    if backend == "gloo":  # NCCL connects more channels later
        refuse_connections(listening() - before)
    return groups


def _form_ends(rank: int, layout: Layout, backend: str, device: torch.device, limit: timedelta) -> Group:
    """The group of this rank's first and last stage, `Solo` on stages between; collective over all ranks. Its NCCL stream has a
    high priority: else its kernels would wait until those of a step leave them a multiprocessor."""
    own: Group = Solo()
    for ranks in sorted({(stages[0], stages[-1]) for stages in map(layout.pp_group, range(layout.world))}):
        options = None
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = limit  # as new_group sets it: it warns of another one
        process_group = dist.new_group(list(ranks), backend=backend, timeout=limit, pg_options=options)
        if rank in ranks:
            own = TorchGroup(process_group, device)
    # NCCL connects two ranks at their first send: the host waits for the other one's then.
    token = torch.zeros(1, dtype=torch.int64, device=device)
    if own.size > 1 and own.rank == 1:
        own.send(token, 0)
    elif own.size > 1:
        own.receive(token, 1)
    return own


def _bind_gloo(peer: str) -> None:
    """Make gloo use the interface from which `peer` is reached, unless the user set one.

    torch.distributed chooses gloo's interface by GLOO_SOCKET_IFNAME or by the host's name only, and the host's name often resolves
    to an address that other hosts cannot reach.
    """
    address = address_towards(peer)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            return


def lost_peer(error: BaseException) -> bool:
    """Whether an error only reports that another rank is gone: it is a consequence, not a cause."""
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return type(error) is RuntimeError and _LOST_PEER.search(str(error)) is not None

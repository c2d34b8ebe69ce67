# SPDX-License-Identifier: Apache-2.0
"""Memory that every rank of a group maps: the workspace of the strategies on GPUs, the buffer of GEMM_RS, into which a GEMM writes
other ranks' rows, and the region of the one-sided exchange.

The only file that imports torch's private symmetric memory. Multicast is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.shared_memory import share_text
from phalanx.comm.torch_group import KernelMarks, TorchGroup

REDUCE_SCATTER_LIMIT_BYTES = 256 << 20
"""The longest message for which there is a reduce-scatter buffer. A group with longer ones has no buffer: all its sizes then run
the same kernels, and the warm-up of a start meets all of them."""
_LONGEST_ROW = 64 << 10
_LEAST_ONESHOT_BYTES = 1 << 20
_VECTOR_BYTES = 16
_ALIGNMENT = 1 << 12
LIMIT_BYTES = (192 << 20) + 2 * _ALIGNMENT
"""The largest size of a workspace; longer messages run in chunks. Two ranks have no chunk of a few rows behind the others where
messages are a multiple of 64 MiB, as those of 8,192 tokens are."""


def half_bytes(world: int, message_bytes: int) -> int:
    """Bytes of one half of the workspace for messages of up to `message_bytes`: the parts and sums of a two-shot, within the limit,
    and never less than a small one-shot takes."""
    part = -(-message_bytes // world)
    need = max((world - 1) * part + message_bytes + _ALIGNMENT, (world - 1) * _LEAST_ONESHOT_BYTES)
    return min(-(-need // _ALIGNMENT) * _ALIGNMENT, LIMIT_BYTES // 2)


def workspace_bytes(world: int, message_bytes: int) -> int:
    """GPU memory that the workspace of a group of `world` ranks takes per rank, for messages of up to `message_bytes`. The buffer
    of `reduce_scatter_bytes` comes on top. Pure."""
    return 0 if world == 1 else 2 * half_bytes(world, message_bytes)


@dataclass(frozen=True)
class SymmetricWorkspace:
    """addresses: of each rank's workspace as this rank maps it; half: vectors of 16 bytes in one of its two halves; epoch: int32
    [2] on the device, the call's number and the tickets drawn; board: int64 [BOARD_PLACES, 2] on the device, where programs of one
    kernel exchange sums; num_sms: multiprocessors of the GPU; sm: its compute capability x 10; memory: keeps the mapping alive;
    marks: gives what the kernel that is launched next gets in `epoch` behind that tensor: see `signals`."""

    rank: int
    world: int
    addresses: tuple[int, ...]
    half: int
    epoch: Tensor
    board: Tensor
    num_sms: int
    sm: int
    memory: tuple[object, ...] = ()
    marks: KernelMarks = tuple

    @cached_property
    def oneshot_vectors(self) -> int:
        """The longest one-shot that fits."""
        return self.half // (self.world - 1)

    @cached_property
    def twoshot_vectors(self) -> int:
        """The longest two-shot that fits, with each rank's part rounded up."""
        return (self.half - self.world * PART_ALIGNMENT) * self.world // (2 * self.world - 1)


BOARD_PLACES = 1 << 12
"""Programs that one kernel may have, where they exchange sums."""
PART_ALIGNMENT = 8
"""A rank's part of a two-shot starts at a multiple of so many vectors: 128 bytes."""


def part_vectors(vectors: int, world: int) -> int:
    """Vectors that each rank of a two-shot sums."""
    return -(-vectors // (world * PART_ALIGNMENT)) * PART_ALIGNMENT


@dataclass(frozen=True)
class ReduceScatterBuffer:
    """Where the GEMMs of all ranks write this rank's rows. capacity: bytes of it; max_message_bytes: of the longest message that
    the group may have; local: the buffer as int32, with the flags behind it; flags: the address of each rank's flags as this rank
    maps them, 16 bytes a rank; peer_tensor: (rank, rows, columns, dtype, bytes before it) -> a tensor in that rank's buffer;
    memory: keeps the mapping alive."""

    rank: int
    world: int
    capacity: int
    max_message_bytes: int
    local: Tensor
    flags: tuple[int, ...]
    peer_tensor: Callable[[int, int, int, torch.dtype, int], Tensor]
    memory: tuple[object, ...] = ()


def reduce_scatter_bytes(world: int, message_bytes: int) -> int:
    """GPU memory that `form_reduce_scatter_buffer` takes per rank, for messages of up to `message_bytes`; 0 where they are
    longer than the limit. Pure."""
    capacity = reduce_scatter_capacity(world, message_bytes)
    return capacity + _ALIGNMENT if capacity else 0


def reduce_scatter_capacity(world: int, message_bytes: int) -> int:
    """Bytes of it for GEMM outputs; the flags lie behind them. Pure."""
    if world == 1 or message_bytes > REDUCE_SCATTER_LIMIT_BYTES:
        return 0
    # A rank's rows are rounded up: by less than a row for each rank.
    return -(-(message_bytes + world * _LONGEST_ROW) // _ALIGNMENT) * _ALIGNMENT


def form_reduce_scatter_buffer(
    process_group: dist.ProcessGroup, device: torch.device, message_bytes: int
) -> ReduceScatterBuffer | None:  # fmt: skip
    """Allocate and map `reduce_scatter_bytes`, or return None where those are 0; collective, as `form_workspace`."""
    rank, world = process_group.rank(), process_group.size()
    capacity = reduce_scatter_capacity(world, message_bytes)
    if not capacity:
        return None
    local, handle = _shared(process_group, device, reduce_scatter_bytes(world, message_bytes), 0)

    def peer_tensor(peer: int, rows: int, columns: int, dtype: torch.dtype, before: int) -> Tensor:
        tensor: Tensor = handle.get_buffer(peer, (rows, columns), dtype, before // dtype.itemsize)
        return tensor

    flags = tuple(int(address) + capacity for address in handle.buffer_ptrs)
    return ReduceScatterBuffer(rank, world, capacity, message_bytes, local, flags, peer_tensor, (local, handle))


def form_workspace(
    process_group: dist.ProcessGroup, device: torch.device, message_bytes: int, marks: KernelMarks = tuple
) -> SymmetricWorkspace:  # fmt: skip
    """Allocate and map the group's workspace; collective. Every pair of the group's GPUs must reach each other's memory. Raises
    RuntimeError on every rank where one of them has no room for it."""
    rank, world = process_group.rank(), process_group.size()
    half = half_bytes(world, message_bytes)
    buffer, handle = _shared(process_group, device, 2 * half, -1)  # the sentinel of kernels.signals
    epoch = torch.zeros(2, dtype=torch.int32, device=device)
    board = torch.zeros(BOARD_PLACES, 2, dtype=torch.int64, device=device)
    properties = torch.cuda.get_device_properties(device)
    return SymmetricWorkspace(
        rank, world, tuple(int(address) for address in handle.buffer_ptrs), half // _VECTOR_BYTES, epoch,
        board, properties.multi_processor_count, 10 * properties.major + properties.minor, (buffer, handle),
        marks,
    )  # fmt: skip


@dataclass(frozen=True)
class SymmetricRegion:
    """Memory of every rank of a group that all of them map, filled with the sentinel of kernels.signals. The fields are those of
    `SymmetricWorkspace`."""

    rank: int
    world: int
    addresses: tuple[int, ...]
    epoch: Tensor
    num_sms: int
    sm: int
    memory: tuple[object, ...] = ()
    marks: KernelMarks = tuple


def form_region(
    process_group: dist.ProcessGroup, device: torch.device, size: int, marks: KernelMarks = tuple
) -> SymmetricRegion:  # fmt: skip
    """Allocate and map `size` bytes of each rank, rounded up to whole pages; collective, as `form_workspace`."""
    buffer, handle = _shared(process_group, device, -(-size // _ALIGNMENT) * _ALIGNMENT, -1)
    properties = torch.cuda.get_device_properties(device)
    return SymmetricRegion(
        process_group.rank(), process_group.size(), tuple(int(address) for address in handle.buffer_ptrs),
        torch.zeros(2, dtype=torch.int32, device=device), properties.multi_processor_count,
        10 * properties.major + properties.minor, (buffer, handle), marks,
    )  # fmt: skip


def _shared(process_group: dist.ProcessGroup, device: torch.device, size: int, word: int) -> tuple[Tensor, Any]:
    """(int32 tensor of `size` bytes that each rank maps, filled with `word`; torch's handle of it)."""
    import torch.distributed._symmetric_memory as symmetric_memory

    why, buffer = "", None
    try:
        buffer = symmetric_memory.empty(size // 4, dtype=torch.int32, device=device)
    except RuntimeError as error:
        why = str(error).splitlines()[0][:150]
    # Checked before any rank waits for the others to map it: a rank without the memory would never come.
    for rank, text in enumerate(share_text(TorchGroup(process_group, device), why, device)):
        if text:
            raise RuntimeError(f"rank {rank} has no room for {size >> 20} MiB of it: {text}")
    assert buffer is not None
    handle = symmetric_memory.rendezvous(buffer, process_group.group_name)
    buffer.fill_(word)
    torch.cuda.synchronize(device)
    handle.barrier(channel=0)  # no rank may write into memory that is not filled yet
    torch.cuda.synchronize(device)
    return buffer, handle

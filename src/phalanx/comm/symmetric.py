# SPDX-License-Identifier: Apache-2.0
"""Memory that every rank of a group maps: the workspace of ONESHOT and TWOSHOT on GPUs, and where products land that are written
to who owns their rows.

The only file that imports torch's private symmetric memory. Multicast is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.choose import LANDED_FROM_BYTES
from phalanx.comm.shared_memory import share_text
from phalanx.comm.torch_group import TorchGroup

LIMIT_BYTES = 192 << 20
"""A workspace's size at most; longer messages go in chunks."""
LANDING_LIMIT_BYTES = 256 << 20
"""Of messages for which there is memory where products land: a group with longer ones has none, so that what the longest needs is
what shorter ones need, too, and a start meets all of it."""
_LONGEST_ROW = 64 << 10
_LEAST_ONESHOT_BYTES = 1 << 20
_VECTOR_BYTES = 16
_ALIGNMENT = 1 << 12


def half_bytes(world: int, message_bytes: int) -> int:
    """One half of the workspace for messages of up to `message_bytes`: a two-shot's parts and sums, within the limit; and never
    less than a small one-shot takes."""
    share = -(-message_bytes // world)
    need = max((world - 1) * share + message_bytes + _ALIGNMENT, (world - 1) * _LEAST_ONESHOT_BYTES)
    return min(-(-need // _ALIGNMENT) * _ALIGNMENT, LIMIT_BYTES // 2)


def workspace_bytes(world: int, message_bytes: int) -> int:
    """GPU memory that a group of `world` ranks takes per rank, for messages of up to `message_bytes`: `landing_bytes` comes on top.
    Pure."""
    return 0 if world == 1 else 2 * half_bytes(world, message_bytes)


@dataclass(frozen=True)
class Workspace:
    """addresses: of each rank's workspace as this rank maps it; half: vectors of 16 bytes in one of its two halves; turn: int32
    [2] on the device, the call's number and the tickets drawn; board: int64 [BOARD_PLACES, 2] on the device, where programs of one
    kernel tell each other sums; sms: multiprocessors of the GPU; ptx: its compute capability x 10; memory: keeps the mapping
    alive."""

    rank: int
    world: int
    addresses: tuple[int, ...]
    half: int
    turn: Tensor
    board: Tensor
    sms: int
    ptx: int
    memory: tuple[object, ...] = ()

    @property
    def oneshot_vectors(self) -> int:
        """The longest one-shot that fits."""
        return self.half // (self.world - 1)

    @property
    def twoshot_vectors(self) -> int:
        """The longest two-shot that fits, with shares rounded up."""
        return (self.half - self.world * SHARE_ALIGNMENT) * self.world // (2 * self.world - 1)


BOARD_PLACES = 1 << 12
"""Programs that one kernel may have, where they tell each other sums."""
SHARE_ALIGNMENT = 8
"""A two-shot's shares start at multiples of so many vectors: 128 bytes."""


def share_of(vectors: int, world: int) -> int:
    """Vectors that each rank of a two-shot adds up."""
    return -(-vectors // (world * SHARE_ALIGNMENT)) * SHARE_ALIGNMENT


@dataclass(frozen=True)
class Landing:
    """Where the ranks' products of a rank's rows land. room: bytes of it; longest: bytes of the longest message that the group may
    have; here: as int32, with the flags behind; flags: the address of each rank's flags as this rank maps them, 16 bytes a rank;
    there: (rank, rows, columns, dtype, bytes before it) -> a tensor in that rank's memory; memory: keeps the mapping alive."""

    rank: int
    world: int
    room: int
    longest: int
    here: Tensor
    flags: tuple[int, ...]
    there: Callable[[int, int, int, torch.dtype, int], Tensor]
    memory: tuple[object, ...] = ()


def landing_bytes(world: int, message_bytes: int) -> int:
    """GPU memory that `form_landing` takes per rank, for messages of up to `message_bytes`; none where they are so short that it
    would not be used, or longer than the limit. Pure."""
    room = landing_room(world, message_bytes)
    return room + _ALIGNMENT if room else 0


def landing_room(world: int, message_bytes: int) -> int:
    """Bytes of it for products; flags lie behind them. Pure."""
    if world == 1 or not LANDED_FROM_BYTES <= message_bytes <= LANDING_LIMIT_BYTES:
        return 0
    # A rank's rows are rounded up: by less than a row for each rank.
    return -(-(message_bytes + world * _LONGEST_ROW) // _ALIGNMENT) * _ALIGNMENT


def form_landing(process_group: dist.ProcessGroup, device: torch.device, message_bytes: int) -> Landing | None:
    """Allocate and map what `landing_bytes` says, or None where that is nothing; collective, as `form_workspace`."""
    rank, world = process_group.rank(), process_group.size()
    room = landing_room(world, message_bytes)
    if not room:
        return None
    buffer, handle = _shared(process_group, device, landing_bytes(world, message_bytes), 0)

    def there(peer: int, rows: int, columns: int, dtype: torch.dtype, before: int) -> Tensor:
        found: Tensor = handle.get_buffer(peer, (rows, columns), dtype, before // dtype.itemsize)
        return found

    flags = tuple(int(address) + room for address in handle.buffer_ptrs)
    return Landing(rank, world, room, message_bytes, buffer, flags, there, (buffer, handle))


def form_workspace(process_group: dist.ProcessGroup, device: torch.device, message_bytes: int) -> Workspace:
    """Allocate and map the group's workspace; collective. Every pair of the group's GPUs must reach each other's memory. Raises
    RuntimeError on every rank where one of them has no room for it."""
    rank, world = process_group.rank(), process_group.size()
    half = half_bytes(world, message_bytes)
    buffer, handle = _shared(process_group, device, 2 * half, -1)  # the sentinel of kernels.signals
    turn = torch.zeros(2, dtype=torch.int32, device=device)
    board = torch.zeros(BOARD_PLACES, 2, dtype=torch.int64, device=device)
    properties = torch.cuda.get_device_properties(device)
    return Workspace(
        rank, world, tuple(int(address) for address in handle.buffer_ptrs), half // _VECTOR_BYTES, turn,
        board, properties.multi_processor_count, 10 * properties.major + properties.minor, (buffer, handle),
    )  # fmt: skip


def _shared(process_group: dist.ProcessGroup, device: torch.device, size: int, word: int) -> tuple[Tensor, Any]:
    """(int32 tensor of `size` bytes that each rank maps, each of them full of `word`; torch's handle of it)."""
    import torch.distributed._symmetric_memory as symmetric_memory

    why, buffer = "", None
    try:
        buffer = symmetric_memory.empty(size // 4, dtype=torch.int32, device=device)
    except RuntimeError as error:
        why = str(error).splitlines()[0][:150]
    # Before any of them waits for the others to map it: one that has none would never come.
    for rank, text in enumerate(share_text(TorchGroup(process_group, device), why, device)):
        if text:
            raise RuntimeError(f"rank {rank} has no room for {size >> 20} MiB of it: {text}")
    assert buffer is not None
    handle = symmetric_memory.rendezvous(buffer, process_group.group_name)
    buffer.fill_(word)
    torch.cuda.synchronize(device)
    handle.barrier(channel=0)  # nobody writes into memory that is not filled yet
    torch.cuda.synchronize(device)
    return buffer, handle

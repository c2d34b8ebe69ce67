# SPDX-License-Identifier: Apache-2.0
"""`HostBlockStore`: a rank's part of the KV blocks in host memory, and their way there and back. The engine decides which blocks go
where (`engine.host_blocks`); here they are copied, in the order of the steps. The states of prefixes have a store of their own, in
which a block is the state of a slot in all layers.

    out   blocks -> staging (compute stream) -> slots (stream of copies out)
    back  slots -> staging (stream of copies back) -> blocks (compute stream)

Blocks of the device are read and written in the order of the steps by this alone: a block is in the staging buffer before anything
that comes later overwrites it, and a row that reads it comes behind the copy back. The buffers have an event for being filled and
one for being emptied. A copy waits for the one in the other direction that has its slots, if that is still under way.

Copies back begin while the steps before still compute, and copies out end while the next ones do: a step of no more copies than
there are buffers waits for none of them, where the bus is done within one step.

The host memory of a rank is on its GPU's NUMA node as far as that has free pages (`hardware.numa`).

A block of all layers is one piece of host memory, so that each takes one copy over the bus, and a run of slots takes one, too. On
CPU the same code runs, in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import finalize

import torch
from torch import Tensor

from phalanx.engine.messages import BlockCopy, StepBatch
from phalanx.errors import CapacityError, EngineError
from phalanx.hardware.numa import node_of, prefer_node
from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.ops.block_rows import BlockRows
from phalanx.layout.memory import staging_bytes, state_staging_bytes
from phalanx.log import get_logger
from phalanx.models.cache import LayerCache

logger = get_logger(__name__)

Register = Callable[[int, int], int]
"""Pins memory, of this address and size; returns 0, or the number of an error."""


def staging(block_bytes: int, device: torch.device) -> Tensor:
    """The staging buffers [4, bytes]: allocated before memory is measured, so that the KV cache leaves room for them."""
    return torch.empty((4, staging_bytes(block_bytes) // 4), dtype=torch.uint8, device=device)


def state_staging(state_bytes: int, device: torch.device) -> Tensor:
    """As `staging`, of states: one in each buffer."""
    return torch.empty((4, state_staging_bytes(state_bytes) // 4), dtype=torch.uint8, device=device)


def host_memory(size: int, register: Register | None, node: int | None = None) -> Tensor:
    """So many bytes of this host. register: pins them, None for memory that no device reads. node: of NUMA, from which they come
    while it has free ones; None for any. Raises CapacityError."""
    what = f"{size:,} bytes of host memory for KV blocks cannot be had"
    less = "give a smaller kv_host_memory"
    try:
        memory = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise CapacityError(what, why=str(error).splitlines()[0], next=less) from None
    if node is not None and (refused := prefer_node(memory.data_ptr(), size, node)):
        logger.warning("KV blocks in host memory may be far from the GPU, on NUMA node %d: %s", node, refused)
    if register is not None and (code := register(memory.data_ptr(), size)):
        raise CapacityError(what, why=f"CUDA cannot pin it (error {code})", next=f"{less}, or raise the limit of locked memory")
    return memory


def cuda_register(address: int, size: int) -> int:
    """Pin memory for the copies of GPUs."""
    return int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]


def _node_of(device: torch.device) -> int | None:
    """The NUMA node of a GPU; None where neither torch nor the kernel tell."""
    properties = torch.cuda.get_device_properties(device)
    domain, bus, number = (getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    return node_of(f"{domain:04x}:{bus:02x}:{number:02x}.0")


def cuda_unregister(address: int) -> None:
    """Give memory back that `cuda_register` has pinned, once no copy is under way: what is allocated next may have its address."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _record(event: torch.cuda.Event | None) -> None:
    """The event is the end of what has been queued on the current stream."""
    if event is not None:
        event.record()


def _wait(event: torch.cuda.Event | None) -> None:
    """What is queued on the current stream from now on comes behind the event."""
    if event is not None:
        event.wait()


class _Direction:
    """The staging buffers of one direction, each with the events of its being filled and emptied, and the stream of its copies. On
    CPU there is one order of all work, and nothing to wait for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._on_gpu = tensors[0].is_cuda
        self._stream = torch.cuda.Stream(tensors[0].device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._buffers = [(tensor, self._event(), self._event()) for tensor in tensors]
        self._next = 0
        self._ends: dict[int, torch.cuda.Event] = {}  # slot -> its last copy

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]

    def take(self) -> tuple[Tensor, torch.cuda.Event | None, torch.cuda.Event | None]:
        """The next buffer: [blocks, words], filled, emptied."""
        buffer, self._next = self._buffers[self._next], (self._next + 1) % len(self._buffers)
        return buffer

    @contextmanager
    def copying(self, copies: Sequence[BlockCopy], other: _Direction) -> Iterator[None]:
        """What is queued inside are these copies: behind those of the other direction that have their slots."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            for event in {id(event): event for copy in copies if (event := other._ends.pop(copy.slot, None))}.values():
                event.wait()
            yield
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record()
            self._ends |= {copy.slot: end for copy in copies}


class HostBlockStore:
    """slots: as of `engine.host_blocks.HostBlocks`. caches: of the rank's layers, those that propose drafts included. buffers:
    `staging`. states: it has the states of requests and prefixes, and caches and buffers are those of states. Used from the rank's
    main thread, between steps; it makes no call that waits for the device."""

    def __init__(
        self, caches: Sequence[LayerCache], slots: int, buffers: Tensor, *, states: bool = False,
        register: Register | None = None,
    ) -> None:  # fmt: skip
        """register: what pins memory on GPUs. Raises CapacityError where the memory cannot be had."""
        tensors = [cache[name] for cache in caches for name in cache.tensors if (name in cache.states) == states]
        rows = [tensor.flatten(1).view(torch.uint8) for tensor in {each.data_ptr(): each for each in tensors}.values()]
        word = torch.int64 if all(row.shape[1] % 8 == 0 for row in rows) else torch.uint8
        on_gpu = buffers.device.type == "cuda"
        self._rows = BlockRows([row.view(word) for row in rows], by_kernel=on_gpu and has_triton())
        words = self._rows.words
        size = slots * words * word.itemsize
        node = _node_of(buffers.device) if on_gpu else None
        memory = host_memory(size, register or (cuda_register if on_gpu else None), node)
        if on_gpu:
            finalize(self, cuda_unregister, memory.data_ptr()).atexit = False  # the driver does it as a process ends
        self.slots = memory.view(word).view(slots, words)
        """[slots, words]: a block of all layers in each."""
        self._generations = [0] * slots
        self._device = buffers.device
        staged = buffers.view(word).view(4, -1, words)
        self._out, self._back = _Direction(list(staged[:2])), _Direction(list(staged[2:]))
        self._most = staged.shape[1]
        first = torch.zeros(1, dtype=torch.int64, device=self._device)  # a block there and back: kernels are compiled here
        self._rows.gather(first, staged[0, :1])
        self._rows.scatter(first, staged[0, :1])

    def copy(self, step: StepBatch) -> None:
        """Queue the copies of a step's blocks, before anything else of it. Raises EngineError for one that no engine would make."""
        self.save(step.saved)
        self.load(step.loaded)

    @torch.inference_mode()
    def save(self, copies: list[BlockCopy]) -> None:
        """Queue copies to slots."""
        for part in self._parts(copies):
            self._save(part)

    @torch.inference_mode()
    def load(self, copies: list[BlockCopy]) -> None:
        """Queue copies back. Raises EngineError for one that no engine would make."""
        for part in self._parts(copies):
            self._load(part)

    def _parts(self, copies: list[BlockCopy]) -> Iterator[list[BlockCopy]]:
        for first in range(0, len(copies), self._most):
            yield copies[first : first + self._most]

    def _save(self, copies: list[BlockCopy]) -> None:
        buffer, filled, emptied = self._out.take()
        blocks = self._index(copies)
        _wait(emptied)
        self._rows.gather(blocks, buffer[: len(copies)])
        _record(filled)
        with self._out.copying(copies, self._back):
            _wait(filled)
            for first, slot, count in _runs(copies):
                self.slots[slot : slot + count].copy_(buffer[first : first + count], non_blocking=True)
            _record(emptied)
        for copy in copies:
            self._generations[copy.slot] = copy.generation

    def _load(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            if self._generations[copy.slot] != copy.generation:
                raise EngineError(
                    f"block {copy.block} was to get write {copy.generation} of slot {copy.slot} of host memory",
                    held=f"the slot has write {self._generations[copy.slot]}", next="report this with the log",
                )  # fmt: skip
        buffer, filled, emptied = self._back.take()
        blocks = self._index(copies)
        with self._back.copying(copies, self._out):
            _wait(emptied)
            for first, slot, count in _runs(copies):
                buffer[first : first + count].copy_(self.slots[slot : slot + count], non_blocking=True)
            _record(filled)
        _wait(filled)
        self._rows.scatter(blocks, buffer[: len(copies)])
        _record(emptied)

    def _index(self, copies: list[BlockCopy]) -> Tensor:
        """The blocks, on the device. From pinned memory: else the host would wait for the steps that are queued."""
        blocks = torch.tensor([copy.block for copy in copies], dtype=torch.int64)
        return blocks if self._device.type == "cpu" else blocks.pin_memory().to(self._device, non_blocking=True)


def copy_states(caches: Sequence[LayerCache], step: StepBatch, host: HostBlockStore | None) -> None:
    """Queue a step's copies of states: to host memory, among the slots of the caches, and back to slots."""
    if host is not None:
        host.save(step.saved_states)
    for source, target in step.state_copies:
        for cache in caches:
            cache.copy_state(source, target)
    if host is not None:
        host.load(step.loaded_states)


def _runs(copies: Sequence[BlockCopy]) -> Iterator[tuple[int, int, int]]:
    """Runs of copies whose slots follow one another: the first copy, its slot, and how many."""
    first = 0
    for number in range(1, len(copies) + 1):
        if number == len(copies) or copies[number].slot != copies[number - 1].slot + 1:
            yield first, copies[first].slot, number - first
            first = number

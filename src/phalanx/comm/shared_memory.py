# SPDX-License-Identifier: Apache-2.0
"""ONESHOT and TWOSHOT between CPU ranks of one host: tensors in memory that all of them map.

    oneshot:  every rank posts its tensor, waits for the tensors of all ranks, and sums them
    twoshot:  every rank sums its part of the rows (with a fusion: and finishes them), posts it, and copies the parts of the others

Sums are in fp32, in rank order, rounded once. Each rank has a counter of its steps. Call n uses half n % 2 of the memory. Two
halves are enough: a rank that posts in call n + 1 has read all that it needs of call n - 1, and no rank starts call n + 1 before
all have posted in call n.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import secrets
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from phalanx.comm.group import Group, ResidualRmsNorm, finish, with_scales
from phalanx.errors import RankStalled
from phalanx.hardware.probe import cores
from phalanx.kernels.scaled_tensors import Unscaled

FOLDER = Path("/dev/shm")
CHUNK_BYTES = 2 << 20
"""The longest post of a rank; longer messages run in chunks."""
_LINE = 64  # bytes of a cache line: one counter on each
_OUTPUTS = 3  # chunks that the outputs of a fusion may take: norm, its quantization, scales, residual
_ROUNDS_BEFORE_YIELD, _NAP = 50, 50e-6
_ROUNDS_BEFORE_NAP, _ROUNDS_ON_FEW_CORES = 2000, 100
"""About a millisecond, and about what a nap takes: where ranks share cores, a rank that looks on keeps others from their part."""


def chunk_bytes(message_bytes: int) -> int:
    return -(-max(min(message_bytes, CHUNK_BYTES), 1 << 16) // 4096) * 4096


def memory_bytes(world: int, message_bytes: int) -> int:
    """Bytes of shared memory that a group takes on its host, for messages of up to `message_bytes`."""
    return world * _LINE + 2 * (world + _OUTPUTS) * chunk_bytes(message_bytes)


def refusal(world: int, message_bytes: int, folder: Path = FOLDER) -> str | None:
    """Why this host has no shared memory for it, in words; None where it has."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"shared memory needs a processor that keeps stores in order (x86-64); this one is {platform.machine()}"
    need = memory_bytes(world, message_bytes)
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"
    free = status.f_bavail * status.f_frsize
    if free >= need:
        return None
    return f"{folder} has {free >> 20} MiB free, and {-(-need >> 20)} MiB are needed (a container: --shm-size)"


class SharedMemory:
    """The memory of one group, mapped by each of its ranks. Make it with `form`."""

    def __init__(self, memory: mmap.mmap, rank: int, world: int, chunk: int, timeout: float, what: str = "an all-reduce") -> None:
        self.rank, self.world, self._chunk, self._timeout, self._what = rank, world, chunk, timeout, what
        # A core for each rank, and one for the engine.
        self._rounds_before_nap = _ROUNDS_BEFORE_NAP if cores() > world else _ROUNDS_ON_FEW_CORES
        self._counters = memoryview(memory).cast("q")
        self._step = 0
        self._calls = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of writable buffers
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
        body = buffer[world * _LINE :].view(2, (world + _OUTPUTS) * chunk)
        self._slots = [[half[r * chunk : (r + 1) * chunk] for r in range(world)] for half in body]
        self._outputs = [half[world * chunk :] for half in body]
        self._views: dict[tuple[int, torch.dtype], list[list[Tensor]]] = {}

    def oneshot(self, x: Tensor | Unscaled) -> Tensor:
        """The sum over ranks of x, in a new tensor."""
        x = with_scales(x)
        flat = x.reshape(-1)
        parts = [self._oneshot_chunk(flat[first:last]) for first, last in self._chunks(flat.numel(), x.element_size())]
        return parts[0].view(x.shape) if len(parts) == 1 else torch.cat(parts).view(x.shape)

    def oneshot_norm(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """The sum over ranks of x [T, H], and the fusion of all rows on every rank."""
        return finish(self.oneshot(x), fusion)

    def twoshot(self, x: Tensor | Unscaled) -> Tensor:
        """The sum over ranks of x, in a new tensor."""
        x = with_scales(x)
        flat, out = x.reshape(-1), torch.empty(x.numel(), dtype=x.dtype)
        for first, last in self._chunks(flat.numel(), x.element_size()):
            half = self.post(flat[first:last])
            count = last - first
            own = self._part_of(count)
            total = self._outputs[half][: count * x.element_size()].view(x.dtype)
            total[own] = self._sum(half, count, x.dtype, own)
            self._arrive()
            self._wait()
            out[first:last] = total
        return out.view(x.shape)

    def twoshot_norm(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """The sum over ranks of x [T, H], and the fusion: each rank finishes whole rows."""
        x = with_scales(x)
        hidden = x.shape[1]
        rows_at_once = self.rows_at_once(hidden, x.dtype)
        if not rows_at_once:
            return finish(self.twoshot(x), fusion)
        parts: list[tuple[Tensor, ...]] = []
        for first in range(0, x.shape[0], rows_at_once):
            rows = x[first : first + rows_at_once]
            parts.append(self._norm_chunk(rows, replace(fusion, residual=fusion.residual[first : first + rows_at_once])))
        return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _norm_chunk(self, x: Tensor, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        half = self.post(x.reshape(-1))
        own, total = self.own_sum(half, x.shape[0], x.shape[1], x.dtype)
        return self.gather_rows(half, len(x), own, finish(total, replace(fusion, residual=fusion.residual[own])))

    def own_sum(self, half: int, rows: int, hidden: int, dtype: torch.dtype) -> tuple[slice, Tensor]:
        """(this rank's rows of the [rows, hidden] that the ranks have posted in `half`, the sum of those rows)."""
        own = self._part_of(rows)
        total = self._sum(half, rows * hidden, dtype, slice(own.start * hidden, own.stop * hidden))
        return own, total.view(-1, hidden)

    def gather_rows(self, half: int, rows: int, own: slice, parts: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Tensors of `rows` rows, of each of which a rank has its `own` rows."""
        outputs, at = [], 0
        for part in parts:
            width = part.shape[1] * part.element_size()
            output = self._outputs[half][at : at + rows * width].view(rows, width).view(part.dtype)
            output[own] = part
            outputs.append(output)
            at += -(-rows * width // _LINE) * _LINE
        self._arrive()
        self._wait()
        return tuple(output.clone() for output in outputs)

    def rows_at_once(self, hidden: int, dtype: torch.dtype) -> int:
        """Rows of a tensor [T, hidden] that a post holds."""
        return self._chunk // (hidden * dtype.itemsize)

    def next_post(self, count: int, dtype: torch.dtype) -> Tensor:
        """Where this rank's next post lies, as `count` values: what is written there needs no copy, only `post_written`."""
        return self._parts(count, dtype)[self._calls % 2][self.rank]

    def _oneshot_chunk(self, flat: Tensor) -> Tensor:
        half = self.post(flat)
        return self._sum(half, flat.numel(), flat.dtype, slice(0, flat.numel()))

    def _chunks(self, count: int, itemsize: int) -> Iterator[tuple[int, int]]:
        most = self._chunk // itemsize
        for first in range(0, count, most):
            yield first, min(first + most, count)

    def _part_of(self, count: int) -> slice:
        size = -(-count // self.world)
        return slice(min(self.rank * size, count), min((self.rank + 1) * size, count))

    def post(self, flat: Tensor) -> int:
        """Copy this rank's tensor where all can read it, and wait for those of all ranks. Returns the half that has them."""
        self.next_post(flat.numel(), flat.dtype).copy_(flat)
        return self.post_written()

    def post_written(self) -> int:
        """`post` of what was written to `next_post`."""
        half = self._calls % 2
        self._calls += 1
        self._arrive()
        self._wait()
        return half

    def posted(self, half: int, count: int, dtype: torch.dtype) -> list[Tensor]:
        """What each rank has posted in `half`, as `count` values; readable until this rank's next post."""
        return self._parts(count, dtype)[half]

    def _parts(self, count: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """The slot of every rank in both halves, as `count` values."""
        views = self._views.get((count, dtype))
        if views is None:
            if len(self._views) > 256:
                self._views.clear()
            views = [[slot[: count * dtype.itemsize].view(dtype) for slot in half] for half in self._slots]
            self._views[count, dtype] = views
        return views

    def _sum(self, half: int, count: int, dtype: torch.dtype, where: slice) -> Tensor:
        parts = self._parts(count, dtype)[half]
        if where.stop - where.start != count:
            parts = [part[where] for part in parts]
        if dtype == torch.float32 or self.world == 2:  # torch adds two 16-bit numbers in fp32, and rounds once
            total = parts[0] + parts[1]
            for part in parts[2:]:
                total += part
            return total
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(dtype)

    def _arrive(self) -> None:
        self._step += 1
        self._counters[self.rank * _LINE // 8] = self._step

    def _wait(self) -> None:
        """Wait until every rank has done as many steps as this one. Raises RankStalled, which names the first rank that has not."""
        counters, step, rounds, began = self._counters, self._step, 0, 0.0
        for place in range(0, self.world * _LINE // 8, _LINE // 8):
            while counters[place] < step:
                rounds += 1
                if rounds < _ROUNDS_BEFORE_YIELD:
                    continue
                if rounds < self._rounds_before_nap:
                    os.sched_yield()
                    continue
                began = began or time.monotonic()
                if time.monotonic() - began > self._timeout:
                    raise RankStalled(
                        f"rank {place * 8 // _LINE} did not join {self._what} within {self._timeout:.0f} s",
                        why=f"rank {self.rank} of this group of {self.world} has waited for it",
                        next="see what that rank last logged",
                    )
                time.sleep(_NAP)


def form(
    group: Group, message_bytes: int, *, timeout: float = 300.0, folder: Path = FOLDER, what: str = "an all-reduce"
) -> SharedMemory | str:  # fmt: skip
    """Map the group's memory, or return why that fails; collective, and the same on every rank.

    group: the ranks, all on this host. message_bytes: of one rank's longest message. timeout: seconds that one rank may keep the
    others waiting. what: they wait in, for the error.
    """
    chunk, size = chunk_bytes(message_bytes), memory_bytes(group.size, message_bytes)
    why = refusal(group.size, message_bytes, folder)
    name = f"phalanx-{secrets.token_hex(8)}"
    path = folder / name
    memory = None
    handle: int | None = None
    if group.rank == 0 and why is None:
        _sweep(folder)
        handle, why = _create(path, size)
    names = share_text(group, f"{'' if why is None else why}\n{name}")
    path = folder / names[0].split("\n")[1]
    refusals = [text.split("\n")[0] for text in names]
    try:
        if not any(refusals):
            try:
                with path.open("r+b") as file:
                    memory = mmap.mmap(file.fileno(), size)
            except OSError as error:
                why = f"{path} cannot be mapped: {error.strerror}"
            refusals = share_text(group, why or "")
    finally:
        if handle is not None:
            path.unlink(missing_ok=True)
            os.close(handle)
    refused = [(rank, text) for rank, text in enumerate(refusals) if text]
    if refused:
        return f"rank {refused[0][0]}: {refused[0][1]}"
    assert memory is not None
    return SharedMemory(memory, group.rank, group.size, chunk, timeout, what)


def _create(path: Path, size: int) -> tuple[int | None, str | None]:
    """(an open file of zeros whose pages are allocated, None), or (None, why not). The file is locked for as long as it has a name:
    where its creator died, the lock is free, and the next engine on this host removes the file."""
    handle = None
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)
        return None, f"{size >> 20} MiB in {path.parent} cannot be allocated: {error.strerror}"
    return handle, None


def _sweep(folder: Path) -> None:
    """Remove the files of ranks that were killed while their memory had a name."""
    for left in folder.glob("phalanx-*"):
        with contextlib.suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink(missing_ok=True)


def share_text(group: Group, text: str, device: torch.device | None = None) -> list[str]:
    """The text of every rank (its last 256 bytes), by rank. device: of the tensors that the group sends, None for CPU."""
    padded = torch.zeros(256, dtype=torch.int64)
    coded = text.encode()[-256:]
    padded[: len(coded)] = torch.tensor(list(coded), dtype=torch.int64)
    rows = group.all_gather(padded.view(1, -1).to(device or "cpu"), dim=0).cpu()
    return [bytes(value for value in row.tolist() if value).decode(errors="replace") for row in rows]

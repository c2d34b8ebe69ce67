# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Kernels are written in Triton's language: its types are not Python's.
"""What a rank's GPU tells the host about its place in a step. A captured graph says nothing while it runs, and a call of a
collective returns when it is queued: so kernels count their calls in the GPU's own memory, and where a step is late, a thread
copies the count on a stream of its own, past the kernels that stand still.

    words [4] int64, on the device    the count; the step; the count before it, of even steps; the same, of odd ones

The count of n calls is n + 2^32 * (the sum of their numbers), modulo 2^64: one addition of a call, for whose end nothing waits, and
the host sees whether the calls that it has recorded are those that the device has come to.

A collective of our own counts itself, while it waits for its peers' data (`signals.mark`). Before a collective of NCCL, and before
each step, a kernel of one warp does it. That a call has ended is not counted: the beginning of the next one tells it.

All marks of a rank are on one stream, or on streams that events join.
"""

from __future__ import annotations

import threading
import time

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from phalanx.comm.signals import dependents, mark
from phalanx.layout.rank_progress import UNCOUNTED, DevicePlace, RankProgress
from phalanx.log import get_logger

log = get_logger(__name__)

STEP, BEFORE = 1, 2
"""Places of words."""
LOOK_SECONDS = 0.5
"""A step that a rank has not finished for so long is looked at as often. Other steps cost no copy."""


@triton.jit(do_not_specialize=["call"])
def mark_before(words, call, SM: tl.constexpr):
    """`signals.mark` for a collective that cannot do it itself."""
    dependents(SM)
    if SM >= 90:
        gdc_wait()
    mark(words, call)


@triton.jit(do_not_specialize=["step"])
def begin_step(words, step):
    """The count before the step, then the step. words: a pointer to them. The count of the step before stays, so that whoever reads
    that step has the count that belongs to it."""
    tl.store(words + 2 + step % 2, tl.load(words))
    tl.atomic_xchg(words + 1, step, sem="release")


class DeviceMarks:
    """Of one rank. It is the `ReportingDevice` of its `RankProgress`, and its groups' `Marks`. Both kernels are compiled here."""

    def __init__(self, progress: RankProgress, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._progress = progress
        self._words = torch.zeros(4, dtype=torch.int64, device=device)
        self._copy = torch.zeros(4, dtype=torch.int64, pin_memory=on_gpu)
        self._last: tuple[DevicePlace, tuple[int, int]] | None = None  # with the host's place at that time
        self._sm = 0
        if on_gpu:
            properties = torch.cuda.get_device_properties(device)
            self._sm = 10 * properties.major + properties.minor
        self._mark(UNCOUNTED)
        self.begin(0)
        if on_gpu:
            torch.cuda.synchronize(device)
            threading.Thread(target=self._watch, args=(device,), name="device place", daemon=True).start()

    def begin(self, step: int) -> None:
        """As ReportingDevice."""
        begin_step[(1,)](self._words, step, num_warps=1)

    def read(self) -> DevicePlace | None:
        """As ReportingDevice."""
        last = self._last
        return last[0] if last is not None and last[1] == self._host_place() else None

    def look(self) -> None:
        """Copy the words: `read` gives the place in them until the host begins or finishes a step."""
        host = self._host_place()
        self._copy.copy_(self._words, non_blocking=True)
        if self._copy.is_pinned():
            copied = torch.cuda.Event()
            copied.record()
            while not copied.query():
                time.sleep(0.001)
        count, step, *before = self._copy.tolist()
        calls = count - before[step % 2]
        self._last = DevicePlace(step, calls & 0xFFFFFFFF, calls >> 32 & 0xFFFFFFFF), host

    def _host_place(self) -> tuple[int, int]:
        return self._progress.step, self._progress.finished

    def _watch(self, device: torch.device) -> None:
        """Look at steps that are late. Errors of CUDA are for the thread that runs the steps: here the place is unknown."""
        last = (0, 0)
        try:
            # Streams of another priority share no queue with the step's.
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
                while True:
                    time.sleep(LOOK_SECONDS)
                    before, last = last, self._host_place()
                    if before == last and last[1] < last[0]:
                        self.look()
        except Exception as error:
            log.warning("the GPU's place in late steps is not read any more: %s", str(error).partition("\n")[0])
            self._last = None

    def of_kernel(self) -> tuple[int, ...]:
        """As Marks."""
        return self._words.data_ptr(), self._progress.take_call()

    def mark(self) -> None:
        """As Marks."""
        call = self._progress.take_call()
        if call != UNCOUNTED:
            self._mark(call)

    def _mark(self, call: int) -> None:
        mark_before[(1,)](self._words.data_ptr(), call, SM=self._sm, num_warps=1, launch_pdl=self._sm >= 90)

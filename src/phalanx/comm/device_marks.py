# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Kernels are written in Triton's language: its types are not Python's.
"""What a rank's GPU tells the host about its place in a step. A captured graph says nothing while it runs, and a call of a
collective returns when it is queued: so kernels write words into pinned memory of the host, which reads them without a call of
CUDA.

    counter [2] int64, on the device    calls so far; the address of words
    words [3] int64, on the host        count << 32 | number of the call that began last; the count before the step; the step

A collective of our own writes its words itself, while it waits for its peers' data (`signals.mark`): no launch, and nothing that a
step waits for. Before a collective of NCCL, and before each step, a kernel of one warp does it. That a call has ended is not
written: a store to the host at the end of a kernel would keep the next one waiting. The beginning of the next call tells it.

All marks of a rank are on one stream, or on streams that events join.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from phalanx.comm.signals import dependents, mark
from phalanx.layout.rank_progress import UNCOUNTED, DevicePlace, RankProgress

LAST, BEFORE, STEP = 0, 1, 2
"""Places of words."""
READS = 100
"""Of the words, until no step begins between them: steps take longer than a read."""
TORN = 0xFFFFFFFF
"""In the place of a count: more than any step has."""


@triton.jit(do_not_specialize=["call"])
def mark_before(counter, call, SM: tl.constexpr):
    """`signals.mark` for a collective that cannot do it itself."""
    dependents(SM)
    if SM >= 90:
        gdc_wait()
    mark(counter, call)


@triton.jit(do_not_specialize=["step"])
def begin_step(counter, step):
    """words[1] = the count, words[2] = step. counter: a pointer to it."""
    words = tl.load(counter + 1).to(tl.pointer_type(tl.int64))
    tl.store(words + 1, tl.load(counter))
    tl.store(words + 2, step)


class DeviceMarks:
    """Of one rank. It is the `ReportingDevice` of its `RankProgress`, and its groups' `Marks`. Both kernels are compiled here."""

    def __init__(self, progress: RankProgress, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._progress = progress
        self._pinned = torch.zeros(3, dtype=torch.int64, pin_memory=on_gpu)
        self._words = self._pinned.numpy()
        self._counter = torch.tensor([0, self._pinned.data_ptr()], dtype=torch.int64, device=device)
        self._sm = 0
        if on_gpu:
            properties = torch.cuda.get_device_properties(device)
            self._sm = 10 * properties.major + properties.minor
        self._mark(UNCOUNTED)
        self.begin(0)

    def begin(self, step: int) -> None:
        """As ReportingDevice."""
        begin_step[(1,)](self._counter, step, num_warps=1)

    def read(self) -> DevicePlace:
        """As ReportingDevice."""
        for _ in range(READS):
            step, before = int(self._words[STEP]), int(self._words[BEFORE])
            last = int(self._words[LAST])
            if (step, before) == (int(self._words[STEP]), int(self._words[BEFORE])):
                entered = (last >> 32) - before & 0xFFFFFFFF  # the word has 32 bits of the count
                return DevicePlace(step, entered, last & 0xFFFFFFFF)
        return DevicePlace(step, TORN, UNCOUNTED)

    def of_kernel(self) -> tuple[int, ...]:
        """As Marks."""
        return self._counter.data_ptr(), self._progress.take_call()

    def mark(self) -> None:
        """As Marks."""
        call = self._progress.take_call()
        if call != UNCOUNTED:
            self._mark(call)

    def _mark(self, call: int) -> None:
        mark_before[(1,)](self._counter.data_ptr(), call, SM=self._sm, num_warps=1, launch_pdl=self._sm >= 90)

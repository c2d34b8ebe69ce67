# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a measurement: verify, then time, with one verdict for the group.

On GPUs: `calls` calls in one CUDA graph on fixed tensors, timed by events over `replays` replays. On a CPU: loops of calls and a
monotonic clock, with the same statistic. A candidate's time is the median of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.comm.group import Group, ResidualRmsNorm
from phalanx.comm.sequence_parallel import ShardedResidual
from phalanx.kernels.dtypes import TORCH_DTYPES
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Choice
from phalanx.tune.ranks import layer, verify
from phalanx.tune.ranks.layer import RowParallelLayer
from phalanx.tune.sweep import GEMM_ALL_REDUCE, Task


class Candidate(Protocol):
    """A way to run one message: every rank of the group calls it in the same order. x may be overwritten. The new residual may come
    out sharded, and go in as it came."""

    def __call__(self, x: Tensor, fusion: ResidualRmsNorm | None) -> tuple[Tensor, ...]: ...


class Candidates(Protocol):
    """What a rank can run: the interface between the measurement and the strategies."""

    def get(self, choice: Choice, layer: RowParallelLayer | None = None) -> Candidate:
        """The choice's candidate: of an all-reduce of x, or of a layer with its GEMM. Raises KeyError where it cannot run here,
        with the reason."""


@dataclass(frozen=True)
class Method:
    """calls: at most, in one sample. replays: samples. long_us: a call that takes longer is far above the cost of a launch; a
    sample then has `long_calls`. cpu_sample_us: on a CPU, how long a sample should take."""

    calls: int = 50
    replays: int = 9
    long_us: float = 400.0
    long_calls: int = 10
    cpu_sample_us: float = 3000.0


class Rank:
    """This rank of the group. `group` carries verdicts and times; it is not a candidate."""

    def __init__(self, group: Group, device: torch.device, candidates: Candidates, method: Method) -> None:
        self.group, self.device, self.candidates, self.method = group, device, candidates, method
        self._key: tuple[str, Fusion, int, int, str] | None = None
        self._cell: verify.Cell | None = None
        self._graphs: _Graphs | None = None

    def measure_all(
        self, tasks: Iterable[Task], begin: Callable[[Task], None], record: Callable[[Task, list[float] | str], None]
    ) -> None:  # fmt: skip
        """One after the other; every rank has the same tasks."""
        for task in tasks:
            begin(task)
            record(task, self.measure(task))

    def measure(self, task: Task) -> list[float] | str:
        """Samples of the slowest rank in microseconds; or why this choice is skipped, with the same text on every rank.

        Collective. An error of the device is raised: the group cannot continue after it.
        """
        cell = self._tensors(task)
        try:
            candidate: Candidate | None = self.candidates.get(task.choice, cell.layer)
            reason = ""
        except KeyError as error:
            candidate, reason = None, str(error.args[0])
        if not self._all(candidate is not None) or candidate is None:
            return reason or "another rank cannot run it"
        if cell.layer is not None:
            cell.layer.verified()
        x, fusion = cell.x.clone(), cell.fusion
        with verify.nan_filled():
            outputs = candidate(x, fusion)
        wrong = verify.mismatch(task.fusion, outputs, cell.expected, self.group.rank, self.group.size)
        if fusion is not None and isinstance(outputs[-1], ShardedResidual):
            fusion = replace(fusion, residual=outputs[-1])  # as behind any layer but the first
        del outputs
        if not self._all(wrong is None):
            return f"wrong: {wrong}" if wrong else "wrong on another rank"
        x.copy_(cell.x)
        if cell.layer is not None:
            cell.layer.timed()
        samples = self._time(lambda: candidate(x, fusion))
        return self._slowest(samples)

    def _tensors(self, task: Task) -> verify.Cell:
        """The cell's tensors, created once for all its choices."""
        if self._cell is None or self._key != task.cell:
            self._cell = None  # free the last cell's memory first
            self._key = task.cell
            size = task.fusion, task.tokens, task.hidden, TORCH_DTYPES[task.dtype], self.device
            if task.op == GEMM_ALL_REDUCE:
                self._cell = layer.cell(*size, self.group)
            else:
                self._cell = verify.cell(*size, rank=self.group.rank, world=self.group.size)
        return self._cell

    def _all(self, fact: bool) -> bool:
        """Whether the fact is true on all ranks."""
        votes = torch.tensor([1.0 if fact else 0.0], device=self.device)
        return int(self.group.all_reduce(votes).item()) == self.group.size

    def _gather(self, values: list[float]) -> Tensor:
        """[ranks, values], on the host."""
        own = torch.tensor([values], dtype=torch.float32, device=self.device)
        return self.group.all_gather(own, dim=0).cpu()

    def _slowest(self, samples: list[float]) -> list[float]:
        by_rank = self._gather(samples)
        slowest = int(by_rank.median(dim=1).values.argmax())
        return [round(float(us), 3) for us in by_rank[slowest]]

    def _time(self, call: Callable[[], object]) -> list[float]:
        return self._time_graph(call) if self.device.type == "cuda" else self._time_loop(call)

    def _time_loop(self, call: Callable[[], object]) -> list[float]:
        def sample(calls: int) -> float:
            self.group.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - begin) * 1e6 / calls

        sample(1)
        # The ranks must run the same number of calls: the slowest rank's estimate decides.
        estimate = float(self._gather([sample(1)]).max())
        calls = max(1, min(self.method.calls, round(self.method.cpu_sample_us / max(estimate, 1.0))))
        return [sample(calls) for _ in range(self.method.replays)]

    def _time_graph(self, call: Callable[[], object]) -> list[float]:
        """Long calls take two graphs: a first, short one measures how long they are."""
        estimate = float(self._gather([statistics.median(self._replay(call, 2, 3))]).max()) if self._is_large() else 0.0
        calls = self.method.long_calls if estimate > self.method.long_us else self.method.calls
        return self._replay(call, calls, self.method.replays)

    def _is_large(self) -> bool:
        return self._cell is not None and self._cell.x.nbytes >= 32 << 20

    def _replay(self, call: Callable[[], object], calls: int, replays: int) -> list[float]:
        if self._graphs is None:
            self._graphs = _Graphs(self.device)
        graph = self._graphs.capture(call, calls)
        ready = torch.zeros(1, device=self.device)
        events = [(_event(), _event()) for _ in range(replays)]
        graph.replay()
        torch.cuda.synchronize(self.device)
        for begin, end in events:
            self.group.all_reduce(ready)  # ranks begin a replay together
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) * 1000.0 / calls for begin, end in events]


class _Graphs:
    """Captures graphs one after the other into one memory pool.

    Without torch.cuda.graph(), which empties the allocator's cache each time: thousands of candidates would pay for that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()
        # A pool lives as long as a graph uses it; this graph keeps it alive.
        self._anchor = self.capture(lambda: torch.zeros(1, device=device), 1)

    def capture(self, call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
        """`calls` calls as a graph, after one call that compiles kernels and opens the connections of NCCL."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            call()
            torch.cuda.synchronize(self._device)
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            for _ in range(calls):
                call()
            graph.capture_end()
        return graph


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

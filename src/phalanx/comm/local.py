# SPDX-License-Identifier: Apache-2.0
"""In-process ranks: a `Group` whose ranks are threads. A fake that is part of the package, for tests of code that takes a group.

    world = LocalWorld(4)
    sums = world.run(lambda group: group.all_reduce(torch.ones(1, 8) * group.rank))

Sums accumulate in fp32 in rank order and round once, so that every rank holds the same bits and a run repeats.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, overload

import torch
from torch import Tensor

from phalanx.comm.group import Group, ResidualRmsNorm, Splits, by_rank, finish, sum_in_rank_order, with_scales
from phalanx.kernels.scaled_tensors import Unscaled

T = TypeVar("T")


class Abandoned(RuntimeError):
    """Another rank failed while this one waited for it; the error of that rank is the cause."""


class Standstill(RuntimeError):
    """The ranks wait for each other, or for one that has ended: a real group would hang."""


class LocalWorld:
    """`size` ranks, one thread each. Where a rank raises, the ranks that wait for it raise too; a standstill is an error."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a world has at least 1 rank, not {size}")
        self.size = size
        self._changed = threading.Condition()
        self._failed = False
        self._arrived = 0
        self._ended = 0
        self._generation = 0
        self._waiting: list[Callable[[], bool]] = []
        self._offered: list[tuple[str, Tensor]] = [("", torch.empty(0))] * size
        self._post: dict[tuple[int, int], deque[Tensor]] = {}

    def run(self, act: Callable[[Group], T]) -> list[T]:
        """Call `act` with each rank's group, at the same time; the results in rank order. Raises the first rank's error that is not
        a consequence of another, after all ranks have ended. Inference mode is that of the caller."""
        self._failed, self._arrived, self._ended = False, 0, 0
        self._post.clear()
        inference = torch.is_inference_mode_enabled()

        def rank(index: int) -> T:
            try:
                with torch.inference_mode(inference):
                    return act(LocalGroup(self, index))
            except BaseException:
                self._failed = True
                raise
            finally:
                with self._changed:
                    self._ended += 1
                    self._changed.notify_all()

        with ThreadPoolExecutor(self.size, thread_name_prefix="rank") as pool:
            futures = [pool.submit(rank, index) for index in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, Abandoned):
                raise error
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ready; self._changed is locked. Raises Abandoned when a rank has failed, Standstill when no rank is left that
        could change it."""
        self._waiting.append(ready)
        try:
            while not ready():
                if self._failed:
                    raise Abandoned("another rank failed")
                if len(self._waiting) + self._ended == self.size and not any(is_ready() for is_ready in self._waiting):
                    self._failed = True
                    self._changed.notify_all()
                    raise Standstill(f"{len(self._waiting)} ranks wait for each other, {self._ended} have ended")
                self._changed.wait()
        finally:
            self._waiting.remove(ready)

    def meet(self) -> None:
        """Return when all ranks have called this."""
        with self._changed:
            generation = self._generation
            self._arrived += 1
            if self._arrived == self.size:
                self._arrived, self._generation = 0, generation + 1
                self._changed.notify_all()
            self.wait(lambda: self._generation != generation)

    def exchange(self, rank: int, what: str, x: Tensor) -> list[Tensor]:
        """The x of all ranks, in rank order. All must `meet` before any rank writes into its x. Raises ValueError when the ranks
        call different collectives: in a real group they would hang, or corrupt memory."""
        self._offered[rank] = what, x
        self.meet()
        kinds = [f"{name} of {list(tensor.shape)} {tensor.dtype}" for name, tensor in self._offered]
        if len(set(kinds)) > 1:
            raise ValueError(f"the ranks called different collectives: {', '.join(kinds)}")
        return [tensor for _, tensor in self._offered]

    def put(self, source: int, to: int, x: Tensor) -> None:
        with self._changed:
            self._post.setdefault((source, to), deque()).append(x)
            self._changed.notify_all()

    def take(self, source: int, to: int) -> Tensor:
        with self._changed:
            box = self._post.setdefault((source, to), deque())
            self.wait(lambda: bool(box))
            return box.popleft()


class LocalGroup:
    """One rank of a LocalWorld, which `run` passes to its callable. A `Group`."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size

    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: None = None) -> Tensor: ...
    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]: ...
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm | None = None) -> Tensor | tuple[Tensor, ...]:
        """As Group."""
        x = with_scales(x)
        offered = self._world.exchange(self.rank, "all_reduce", x)
        total = offered[0].float()
        for other in offered[1:]:
            total = total + other.float()
        self._world.meet()
        total = total.to(x.dtype)
        return total if fusion is None else finish(total, fusion)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """As Group."""
        offered = self._world.exchange(self.rank, f"all_gather along {dim}", x)
        joined = torch.cat(offered, dim)
        self._world.meet()
        return joined

    def all_to_all(self, x: Tensor, splits: Splits | None = None) -> Tensor:
        """As Group."""
        if splits is not None:
            for to, part in enumerate(torch.split(x, list(splits.sent))):
                self._world.put(self.rank, to, part.clone())
            parts = [self._world.take(source, self.rank) for source in range(self.size)]
            if [len(part) for part in parts] != list(splits.received):
                raise ValueError(f"the ranks sent {[len(part) for part in parts]} rows, and {list(splits.received)} were expected")
            return torch.cat(parts)
        offered = self._world.exchange(self.rank, "all_to_all", x)
        received = torch.cat([by_rank(other, self.size)[self.rank] for other in offered])
        self._world.meet()
        return received

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """As Group."""
        return sum_in_rank_order(by_rank(self.all_to_all(x), self.size))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """As Group."""
        offered = self._world.exchange(self.rank, f"broadcast from {source}", x)
        if self.rank != source:
            x.copy_(offered[source])
        self._world.meet()
        return x

    def send(self, x: Tensor, to: int) -> None:
        """As Group."""
        self._require_rank(to)
        self._world.put(self.rank, to, x.clone())

    def receive(self, x: Tensor, source: int) -> Tensor:
        """As Group."""
        self._require_rank(source)
        sent = self._world.take(source, self.rank)
        if sent.shape != x.shape or sent.dtype != x.dtype:
            raise ValueError(f"rank {source} sent {list(sent.shape)} {sent.dtype}, and x is {list(x.shape)} {x.dtype}")
        return x.copy_(sent)

    def barrier(self) -> None:
        """As Group."""
        self._world.meet()

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As Group."""
        return torch.empty(*shape, dtype=dtype, device=device)

    def gemm_reduce_scatter_targets(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> None:
        """As Group."""

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size or rank == self.rank:
            raise IndexError(f"rank {rank} is not another rank of a group of {self.size}")

# SPDX-License-Identifier: Apache-2.0
"""Steps in flight: which ranks have run them, and whether all ranks ran the same. Pure: the time
is an argument, of a `WatchClock`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.engine.messages import RowOutput, StepResult
from phalanx.errors import StepDiverged
from phalanx.executor.protocol import StepDone
from phalanx.layout.layout import Layout


@dataclass(slots=True)
class _InFlightStep:
    digest: bytes
    waiting: set[int]  # ranks that have not run it
    sampling: set[int]  # those of them that belong to the last stage
    since: float
    moves: bool  # experts, on ranks of any stage
    limit: float
    calls: dict[int, bytes] = field(default_factory=dict)  # of ranks that have run it, of collectives
    tokens: dict[int, tuple[int, int]] = field(default_factory=dict)  # dp index -> (rank, CRC of its tokens)
    rows: dict[int, list[RowOutput]] = field(default_factory=dict)  # dp index -> results
    delivered: bool = False
    moved: float | None = None  # on the slowest rank so far


@dataclass(frozen=True)
class OldestStep:
    """A step that does not end. seconds: that it has taken. limit: that it may take. ranks: that have not run it."""

    number: int
    seconds: float
    limit: float
    ranks: list[int]


class InFlightSteps:
    """A step is complete once every rank of the last stage has run it and they agree; the earlier stages have run it by then, but
    may not have reported it. One that moves experts is complete when all have: the result has the time of the slowest."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._ranks = set(range(layout.world))
        self._last_stage = {rank for rank in self._ranks if layout.place(rank).pp_index == layout.pp - 1}
        self._dp_index = {rank: layout.place(rank).dp_index for rank in self._ranks}
        self._peers = {rank: [peer for peer in layout.tp_group(rank) if peer != rank] for rank in self._ranks}
        self._steps: dict[int, _InFlightStep] = {}
        self.usual_calls: dict[int, bytes] = {}
        """Of each rank, in the last step that all have run."""

    def submitted(
        self, number: int, digest: bytes, now: float, *, moves: bool = False, limit: float = math.inf
    ) -> None:  # fmt: skip
        """A step was sent to every rank. moves: it moves experts. limit: seconds that it may take."""
        self._steps[number] = _InFlightStep(digest, self._ranks.copy(), self._last_stage.copy(), now, moves, limit)

    def record(self, done: StepDone, now: float) -> None:
        """A rank has run a step. Raises StepDiverged for a step that is not in flight on it, or another outcome than its peers'."""
        step = self._steps.get(done.number)
        if step is None or done.rank not in step.waiting:
            raise StepDiverged(
                f"rank {done.rank} reports step {done.number}, which is not in flight on it",
                held=f"steps in flight: {sorted(self._steps) or 'none'}",
            )  # fmt: skip
        if done.digest != step.digest:
            raise StepDiverged(
                f"rank {done.rank} ran step {done.number} with digest {done.digest.hex()}",
                held=f"the engine sent {step.digest.hex()}",
            )
        step.calls[done.rank] = done.calls
        step.waiting.discard(done.rank)
        step.sampling.discard(done.rank)
        dp_index = self._dp_index[done.rank]
        if done.tokens_crc is not None:
            first, crc = step.tokens.setdefault(dp_index, (done.rank, done.tokens_crc))
            if crc != done.tokens_crc:
                raise StepDiverged(
                    f"rank {done.rank} sampled other tokens than rank {first} in step {done.number}",
                    why="ranks of one tensor-parallel group compute the same logits",
                    next="a GPU or its link is at fault, or a collective is: try allreduce_strategy='NCCL'",
                )
        if done.moved is not None:
            step.moved = max(step.moved or 0.0, done.moved)
        if done.rows is not None:
            step.rows[dp_index] = done.rows
        if not step.waiting:
            later = self._steps.get(done.number + 1)
            if later is not None:
                later.since = now  # the time of a queued step runs from the end of the one before it

    def completed(self) -> list[StepResult]:
        """The results that are complete and were not returned before, in order."""
        results = []
        for number, step in list(self._steps.items()):
            if step.sampling or (step.moves and step.waiting):
                break
            if not step.delivered:
                step.delivered = True
                results.append(StepResult(number, [step.rows[dp_index] for dp_index in range(self._layout.dp)], step.moved))
            if not step.waiting:
                self.usual_calls = step.calls
                del self._steps[number]
        return results

    def differing(self, number: int, rank: int) -> bool:
        """Whether a rank that has run a step called other collectives in it than a peer of its tensor-parallel group."""
        peers = self._peers[rank]
        calls = self._steps[number].calls if peers and number in self._steps else {}
        return rank in calls and any(calls.get(peer, calls[rank]) != calls[rank] for peer in peers)

    def calls(self, number: int, rank: int) -> bytes | None:
        """Those that a rank called in a step in flight; None where it has not run it."""
        return self._steps[number].calls.get(rank) if number in self._steps else None

    def oldest(self, now: float) -> OldestStep | None:
        """The oldest step that some rank has not run; None where there is none."""
        for number, step in self._steps.items():
            if step.waiting:
                return OldestStep(number, now - step.since, step.limit, sorted(step.waiting))
        return None

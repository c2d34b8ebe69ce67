# SPDX-License-Identifier: Apache-2.0
"""Which steps are in flight, who has run them, and whether all ran the same. Pure: time comes in as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.engine.messages import RowResult, StepResult
from phalanx.errors import StepDiverged
from phalanx.executor.protocol import StepDone
from phalanx.plan.layout import Layout


@dataclass
class _Entry:
    digest: bytes
    waiting: set[int]  # ranks that have not run it
    sampling: set[int]  # those of the last stage among them
    since: float
    tokens: dict[int, tuple[int, int]] = field(default_factory=dict)  # dp index -> (rank, CRC of its tokens)
    rows: dict[int, list[RowResult]] = field(default_factory=dict)  # dp index -> results
    handed_out: bool = False


class InFlightSteps:
    """A step is handed out once every rank of the last stage has run it and they agree; the stages before have run it by then."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._last_stage = {rank for rank in range(layout.world) if layout.place(rank).pp_index == layout.pp - 1}
        self._entries: dict[int, _Entry] = {}

    def sent(self, number: int, digest: bytes, now: float) -> None:
        self._entries[number] = _Entry(digest, set(range(self._layout.world)), set(self._last_stage), now)

    def done(self, done: StepDone, now: float) -> None:
        """A rank reports a step. Raises StepDiverged for a step that it should not have, or another outcome than its peers'."""
        entry = self._entries.get(done.number)
        if entry is None or done.rank not in entry.waiting:
            raise StepDiverged(
                f"rank {done.rank} reports step {done.number}", held=f"steps in flight: {sorted(self._entries) or 'none'}"
            )
        if done.digest != entry.digest:
            raise StepDiverged(
                f"rank {done.rank} ran step {done.number} with digest {done.digest.hex()}",
                held=f"the engine sent {entry.digest.hex()}",
            )
        entry.waiting.discard(done.rank)
        entry.sampling.discard(done.rank)
        dp_index = self._layout.place(done.rank).dp_index
        if done.tokens is not None:
            first, crc = entry.tokens.setdefault(dp_index, (done.rank, done.tokens))
            if crc != done.tokens:
                raise StepDiverged(
                    f"rank {done.rank} sampled other tokens than rank {first} in step {done.number}",
                    why="ranks of one tensor-parallel group compute the same logits",
                    next="a GPU or its link is at fault, or a collective is: try allreduce_strategy='NCCL'",
                )
        if done.rows is not None:
            entry.rows[dp_index] = done.rows
        if not entry.waiting:
            later = self._entries.get(done.number + 1)
            if later is not None:
                later.since = now  # a queued step's time runs from when its turn came

    def settled(self) -> list[StepResult]:
        """The results that are complete and not yet handed out, in order."""
        found = []
        for number, entry in list(self._entries.items()):
            if entry.sampling:
                break
            if not entry.handed_out:
                entry.handed_out = True
                found.append(StepResult(number, [entry.rows[dp_index] for dp_index in range(self._layout.dp)]))
            if not entry.waiting:
                del self._entries[number]
        return found

    def overdue(self, now: float, limit: float) -> tuple[int, list[int]] | None:
        """The oldest step that some rank has not run for more than `limit` seconds, and those ranks."""
        for number, entry in self._entries.items():
            if entry.waiting:
                return (number, sorted(entry.waiting)) if now - entry.since > limit else None
        return None

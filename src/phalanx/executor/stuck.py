# SPDX-License-Identifier: Apache-2.0
"""Which rank holds up a step that does not end, in which collective and layer. Pure: it reads what ranks report of their places.

1. A rank that called other collectives than its peers has skipped one: their calls, one after the other, tell which.
2. A rank that sends no heartbeats stands still as a process.
3. Of the others, each rank that is in a collective waits for those that have not come to it. Those that are waited for, and wait
   for nobody, hold the step up.
4. Where all have come, the link between them does.

A GPU says to which collective it came last, and not whether it is in it still: it waits only where others have not come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.layout.layout import Layout
from phalanx.layout.rank_progress import GROUP_WORDS, Call, in_layer

SILENT_SECONDS = 5.0
"""Without a heartbeat, which come each second, the process of a rank stands still while a step is late."""


@dataclass(frozen=True)
class RankState:
    """What the engine knows of a rank while a step does not end. where: names its process. begun, finished: steps. layer, inside,
    queued: as `RankProgress`. calls: in the step that does not end, also where this rank has finished it; None: unknown. silent:
    seconds since its last heartbeat. usual: its calls in the last step that all have run. on_device: its place is its GPU's, as
    `layout.rank_progress.Place`."""

    rank: int
    where: str = ""
    begun: int = 0
    finished: int = 0
    layer: int = 0
    inside: bool = False
    queued: bool = False
    calls: Sequence[Call] | None = None
    silent: float = 0.0
    usual: Sequence[Call] = ()
    on_device: bool = False

    def is_queueing(self, step: int) -> bool:
        """Whether its host is still at the step."""
        return self.begun == step and self.finished < step and not self.queued and self.silent < SILENT_SECONDS

    def doing(self, step: int) -> str:
        """For errors."""
        if self.finished >= step:
            return f"has finished step {step}"
        if self.begun < step:
            return f"has not begun step {step}: it finished step {self.finished}"
        if self.on_device and self.begun == step:
            if not self.calls:
                return "has come to no collective of the step"
            return f"came last to {self.calls[-1].words}, and is in it or computes behind it"
        if self.queued or self.begun > step:
            return f"has queued all of step {step}, and its device has not finished it"
        if self.inside and self.calls:
            return f"is in {self.calls[-1].words}"
        return f"computes {in_layer(self.layer)}"


@dataclass(frozen=True)
class Culprit:
    """What holds a step up. failure, evidence: for the error; the former names the ranks. proven: their calls differ, so that
    waiting would not help."""

    failure: str
    evidence: str
    proven: bool = False


def find(step: int, views: Mapping[int, RankState], layout: Layout) -> Culprit:
    """What holds up a step that some rank has not finished."""
    return skipped(step, views, layout) or _silent(step, views) or _Waits(step, views, layout).culprit()


def skipped(step: int, views: Mapping[int, RankState], layout: Layout) -> Culprit | None:
    """A rank whose calls of collectives in the step are not those of its peers; None where they are, as far as they go."""
    for members, group in _peers(layout):
        calls = {rank: _collectives(views[rank], step, group) for rank in members if rank in views}
        known = {rank: each for rank, each in calls.items() if each is not None}
        ended = {rank for rank in known if views[rank].finished >= step}
        usual = next((_of_group(views[rank].usual, group) for rank in known if views[rank].usual), [])
        odd = _first_odd(known, ended, usual)
        if odd is not None:
            rank, peer, at = odd
            call = known[peer][at]
            own = known[rank][at].words if at < len(known[rank]) else f"the end of step {step}"
            return Culprit(
                f"rank {rank} ({views[rank].where}) skipped {call.words} in step {step}",
                f"it is call {at + 1} of rank {peer} in this step; rank {rank} went on to {own}", proven=True,
            )  # fmt: skip
    return None


def _peers(layout: Layout) -> list[tuple[list[int], str | None]]:
    """Ranks that make the same calls, of all groups or of one."""
    ranks = range(layout.world)
    same: list[tuple[list[int], str | None]] = [(list(each), None) for each in sorted({tuple(layout.tp_group(r)) for r in ranks})]
    return same + [(list(each), "dp") for each in sorted({tuple(layout.dp_group(r)) for r in ranks}) if len(each) > 1]


def _collectives(view: RankState, step: int, group: str | None) -> list[Call] | None:
    if view.calls is None:
        return None if view.begun >= step else []
    return _of_group(view.calls, group)


def _of_group(calls: Sequence[Call], group: str | None) -> list[Call]:
    return [call for call in calls if not call.between_two and group in (None, call.group)]


def _first_odd(
    calls: Mapping[int, Sequence[Call]], ended: set[int], before: Sequence[Call]
) -> tuple[int, int, int] | None:  # fmt: skip
    """(rank, peer, index): the rank left out the peer's call of this index. ended: ranks that make no more calls. before: what each
    called in the step before."""
    for at in range(max(map(len, calls.values()), default=0)):
        here = {rank: each[at] if at < len(each) else None for rank, each in calls.items() if at < len(each) or rank in ended}
        if len(set(here.values())) < 2:
            continue
        usual, times = Counter(here.values()).most_common(1)[0]
        if 2 * times > len(here):
            rank = next(each for each, call in here.items() if call != usual)
            peer = next(each for each, call in here.items() if call == usual)
            return (rank, peer, at) if usual is not None else (peer, rank, at)
        first, second = sorted(here)[0], next(rank for rank in sorted(here) if here[rank] != here[sorted(here)[0]])
        return (first, second, at) if _left_out(calls[first], calls[second], at, before) else (second, first, at)
    return None


def _left_out(one: Sequence[Call], other: Sequence[Call], at: int, before: Sequence[Call]) -> bool:
    """Whether `one` lacks the call `at` of `other`, rather than the other way round."""
    if at >= len(one) or at >= len(other):
        return at >= len(one)
    if at < len(before) and list(before[:at]) == list(one[:at]) and before[at] in (one[at], other[at]):
        return before[at] == other[at]
    fits_one = all(a == b for a, b in zip(one[at:], other[at + 1 :], strict=False))
    fits_other = all(a == b for a, b in zip(other[at:], one[at + 1 :], strict=False))
    return fits_one if fits_one != fits_other else _order(one[at]) > _order(other[at])


def _order(call: Call) -> tuple[int, bool]:
    """Later calls of a step have more. In a layer, data-parallel indices gather tokens, then scatter what experts gave."""
    return call.layer, call.group == "dp" and call.operation == "reduce_scatter"


def _silent(step: int, views: Mapping[int, RankState]) -> Culprit | None:
    silent = [view for view in views.values() if view.silent > SILENT_SECONDS]
    if not silent:
        return None
    names = _names([view.rank for view in silent])
    waits = [f"rank {view.rank} {view.doing(step)}" for view in views.values() if view not in silent]
    last = "; ".join(
        f"rank {view.rank} ({view.where}): last heartbeat {view.silent:.0f} s ago; it {_past(view, step)}" for view in silent
    )
    return Culprit(f"{names} {'stands' if len(silent) == 1 else 'stand'} still", "; ".join([last, *waits]))


def _past(view: RankState, step: int) -> str:
    if view.begun < step:
        return f"had begun step {view.begun} and finished step {view.finished}"
    at = f"in {view.calls[-1].words}" if view.inside and view.calls else in_layer(view.layer)
    return f"was in step {view.begun}, {at}"


@dataclass
class _Waits:
    """Who waits for whom in a step. `missing`: of each rank that is in a collective, those that have not come to it."""

    step: int
    views: Mapping[int, RankState]
    layout: Layout
    missing: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, view in self.views.items():
            if view.begun == self.step and view.finished < self.step and view.inside and view.calls:
                self.missing[rank] = [peer for peer in self._needed(rank, view.calls[-1]) if not self._has_come(peer, view)]

    def culprit(self) -> Culprit:
        """Points 3 and 4 of the module's docstring; else the ranks that have not finished the step."""
        late = [rank for rank, view in self.views.items() if view.begun == self.step and view.finished < self.step]
        awaited = sorted({peer for peers in self.missing.values() for peer in peers})
        if awaited:
            holding = [rank for rank in awaited if not self.missing.get(rank)]
            linked = [rank for rank in holding if rank in self.missing and self._may_be_linked(rank, holding)]
            if holding:
                return self._link(linked[0]) if linked else self._not_come(holding)
        elif (first := next((rank for rank in sorted(self.missing) if self._may_be_linked(rank, late)), None)) is not None:
            return self._link(first)
        unfinished = [view for view in self.views.values() if view.finished < self.step]
        if not unfinished:
            where = "; ".join(f"rank {view.rank} ({view.where}) has finished step {view.finished}" for view in self.views.values())
            return Culprit(f"all ranks have finished step {self.step}, and no result of it has come to the engine", where)
        what = "; ".join(f"rank {view.rank} ({view.where}) {view.doing(self.step)}" for view in unfinished)
        ranks = [view.rank for view in unfinished]
        return Culprit(f"{_names(ranks)} {'does' if len(ranks) == 1 else 'do'} not finish step {self.step}", what)

    def _may_be_linked(self, rank: int, ranks: Sequence[int]) -> bool:
        """Whether a rank that has come to a call with all of its peers may be in it. As a device does not say when a call ends, it
        may where its peers are among `ranks`, too."""
        view = self.views[rank]
        assert view.calls
        return not view.on_device or set(self._needed(rank, view.calls[-1])) <= set(ranks)

    def _needed(self, rank: int, call: Call) -> list[int]:
        """The other ranks that a call needs."""
        layout = self.layout
        if call.group == "world":
            members = list(range(layout.world))
        elif call.group in ("pp", "ends"):
            members = layout.pp_group(rank)
            if call.group == "ends":
                members = [members[0], members[-1]]
        elif call.group == "dcp":
            members = layout.dcp_group(rank)
        else:
            members = layout.dp_group(rank) if call.group == "dp" else layout.tp_group(rank)
        if call.between_two:
            at = members.index(rank)
            back = call.group == "ends"  # tokens return from the last stage to the first
            step = (1 if call.operation == "send" else -1) * (-1 if back else 1)
            return [members[at + step]] if 0 <= at + step < len(members) else []
        return [peer for peer in members if peer != rank]

    def _has_come(self, peer: int, view: RankState) -> bool:
        other = self.views[peer]
        if other.finished >= self.step or other.begun > self.step:
            return True
        assert view.calls
        call = view.calls[-1]
        operation = {"send": "receive", "receive": "send"}.get(call.operation, call.operation)

        def count(calls: Sequence[Call] | None, operation: str) -> int:
            return sum(each.group == call.group and (each.operation == operation or not call.between_two) for each in calls or ())

        return other.begun == self.step and count(other.calls, operation) >= count(view.calls, call.operation)

    def _not_come(self, ranks: list[int]) -> Culprit:
        """These ranks keep others waiting."""
        waiter = next(rank for rank, peers in self.missing.items() if ranks[0] in peers)
        calls = self.views[waiter].calls
        assert calls
        number = sum(each.group == calls[-1].group for each in calls)
        where = "; ".join(f"rank {rank} ({self.views[rank].where}) {self.views[rank].doing(self.step)}" for rank in ranks)
        waiting = _names(sorted(rank for rank, peers in self.missing.items() if peers))
        verb = "has" if len(ranks) == 1 else "have"
        what = calls[-1].words
        if calls[-1].between_two:
            other = "send" if calls[-1].operation == "receive" else "receive"
            what = f"{other} of the {GROUP_WORDS[calls[-1].group]}, for which rank {waiter} is in {what}"
        return Culprit(
            f"{_names(ranks)} {verb} not come to {what}, number {number} of step {self.step}",
            f"{where}; {waiting} {'waits' if waiting.startswith('rank ') else 'wait'}",
        )  # fmt: skip

    def _link(self, rank: int) -> Culprit:
        calls = self.views[rank].calls
        assert calls
        ranks = sorted([rank, *self._needed(rank, calls[-1])])
        number = sum(each.group == calls[-1].group for each in calls)
        or_else = ", or each of them computes behind it" if self.views[rank].on_device else ""
        return Culprit(
            f"{calls[-1].words}, number {number} of step {self.step}, does not end",
            f"{_names(ranks)} have all come to it: the link between them stands still{or_else}",
        )  # fmt: skip


def _names(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

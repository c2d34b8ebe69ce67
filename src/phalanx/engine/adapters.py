# SPDX-License-Identifier: Apache-2.0
"""The adapters of an engine: which names requests may give (`Adapters`), and which of them are in the slots of the device
(`AdapterSlots`, `Claims`).

A request keeps the adapter that its name stood for when it came, whatever is loaded under that name later. An adapter takes a slot
when a request of it is admitted; the slot of one that no running request has may be taken, the longest unused first. Which are in
use is derived from the running requests each time: there is no count that could be wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phalanx.engine.messages import AdapterFacts, PlaceAdapter
from phalanx.errors import AdapterNotFound
from phalanx.layout.adapter import AdapterFile


@dataclass(eq=False)
class Adapter:
    """An adapter that every rank has in host memory. key: of this load, never of another. slot: on the device; -1: in none.
    used: a number that grows with each admission of its requests."""

    name: str
    key: int
    file: AdapterFile
    slot: int = -1
    used: int = 0


class AdapterSlots:
    """The slots of the device, which all data-parallel indices share. running: gives the adapters of the running requests; each
    scheduler adds its own."""

    def __init__(self, slots: int) -> None:
        self.occupants: list[Adapter | None] = [None] * slots
        self.running: list[Callable[[], Iterable[Adapter | None]]] = []
        self._admissions = itertools.count(1)
        self._works: list[PlaceAdapter] = []

    def busy(self) -> set[Adapter]:
        """Those that running requests have."""
        return {adapter for running in self.running for adapter in running() if adapter is not None}

    def in_order_of_use(self) -> list[Adapter]:
        """Those in slots, the longest unused first."""
        return sorted((adapter for adapter in self.occupants if adapter is not None), key=lambda adapter: adapter.used)

    def take(self, adapter: Adapter, busy: Iterable[Adapter]) -> None:
        """A request of the adapter is admitted: it gets a slot unless it has one. busy: whose slots stay."""
        if adapter.slot < 0:
            slot = self.occupants.index(None) if None in self.occupants else -1
            if slot < 0:
                victim = next(each for each in self.in_order_of_use() if each not in busy)
                slot, victim.slot = victim.slot, -1
            self.occupants[slot], adapter.slot = adapter, slot
            self._works.append(PlaceAdapter(slot, adapter.key))
        adapter.used = next(self._admissions)

    def leave(self, adapter: Adapter) -> None:
        """The adapter is to be forgotten: its slot is free. No request has it."""
        if adapter.slot >= 0:
            self.occupants[adapter.slot], adapter.slot = None, -1
            self._works = [work for work in self._works if work.key != adapter.key]

    def works(self) -> list[PlaceAdapter]:
        """What ranks are to do before the step that is being made."""
        works, self._works = self._works, []
        return works


class Claims:
    """Which waiting requests may be admitted to one step, as far as adapters go, asked in the order in which they came.

    A request whose adapter finds no slot does not hold up those behind it. So that it is not passed for ever, the adapter whose
    last admission is the longest ago admits no more requests that came later: its slot is free when those that run have ended.
    """

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots, self._busy = slots, slots.busy() if slots.occupants else set()
        self._leaving: set[Adapter] = set()
        self._blocked: set[Adapter] = set()

    def allow(self, adapter: Adapter | None) -> bool:
        """Whether a request of this adapter may be admitted now."""
        if adapter is None:
            return True
        if adapter in self._blocked or adapter in self._leaving:
            return False
        if adapter.slot >= 0 or None in self._slots.occupants:
            return True
        candidates = [each for each in self._slots.in_order_of_use() if each not in self._leaving]
        if any(each not in self._busy for each in candidates):
            return True
        self._blocked.add(adapter)
        self._leaving.update(candidates[:1])
        return False

    def admit(self, adapter: Adapter | None) -> None:
        """A request that was allowed is admitted."""
        if adapter is not None:
            self._slots.take(adapter, self._busy)
            self._busy.add(adapter)


class Adapters:
    """The adapters of an engine, by name. slots: on the device; without any, no adapter can be loaded."""

    def __init__(self, slots: int = 0) -> None:
        self.slots = AdapterSlots(slots)
        self._by_name: dict[str, Adapter] = {}
        self._keys = itertools.count(1)
        self._gone: list[Adapter] = []  # of no name any more, which requests may still have

    def next_key(self) -> int:
        return next(self._keys)

    def named(self, name: str | None) -> Adapter | None:
        """The adapter that a request names; None for none. Raises AdapterNotFound."""
        if name is None:
            return None
        if name not in self._by_name:
            raise AdapterNotFound(
                f"adapter {name[:200]!r} is not loaded", held=f"loaded: {', '.join(sorted(self._by_name)) or 'none'}",
                next="load it first, or give the name of one of these",
            )  # fmt: skip
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def put(self, adapter: Adapter) -> None:
        """From now on requests may name it. One that had this name goes."""
        if adapter.name in self._by_name:
            self.remove(adapter.name)
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """From now on no request may name it. Raises AdapterNotFound."""
        adapter = self.named(name)
        assert adapter is not None
        del self._by_name[name]
        self._gone.append(adapter)

    @property
    def leaving(self) -> bool:
        """Whether `forgotten` has any to look at."""
        return bool(self._gone)

    def forgotten(self, open_adapters: Callable[[], Iterable[Adapter | None]]) -> list[int]:
        """The keys of those without a name that no open request has any more: ranks may drop them."""
        if not self._gone:
            return []
        kept = set(open_adapters())
        gone = [adapter for adapter in self._gone if adapter not in kept]
        self._gone = [adapter for adapter in self._gone if adapter in kept]
        for adapter in gone:
            self.slots.leave(adapter)
        return [adapter.key for adapter in gone]

    def facts(self) -> list[AdapterFacts]:
        return [AdapterFacts(each.name, each.file.folder, each.file.rank) for each in self._by_name.values()]

# SPDX-License-Identifier: Apache-2.0
"""`AdapterLoads`: adapters come and go while requests run.

A load is read and checked whole by the engine, on a thread; then every rank reads its part into host memory, beside its steps; only
then requests may name it. Whatever fails on the way is the answer to the load, and nothing has changed: no adapter ends an
engine. One name is loaded once at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.engine.adapters import Adapter, Adapters
from phalanx.engine.messages import AdaptersChanged, LoadAdapter, UnloadAdapter
from phalanx.errors import AdapterError, PhalanxError
from phalanx.layout.adapter import AdapterFile
from phalanx.log import get_logger

if TYPE_CHECKING:
    from phalanx.engine.executor import Executor

logger = get_logger(__name__)

ReadFile = Callable[[Path], AdapterFile]
"""Reads and checks the adapter in a folder."""


def no_adapter(folder: Path) -> AdapterFile:
    """Of an engine without a model."""
    raise AdapterError(f"{folder} cannot be loaded", held="this engine has no model")


@dataclass
class _Load:
    message: LoadAdapter
    file: AdapterFile | None = None
    error: PhalanxError | None = None


class AdapterLoads:
    """Of one engine. read: see `ReadFile`; wake: called on a thread when `poll` has something to do."""

    def __init__(self, adapters: Adapters, executor: Executor, read: ReadFile, wake: Callable[[], None]) -> None:
        self._adapters, self._executor, self._read, self._wake = adapters, executor, read, wake
        self._loading: dict[str, _Load] = {}
        self._checked: deque[_Load] = deque()
        self._on_ranks: dict[int, _Load] = {}
        self._ranks_refused: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether `poll` may have something to do."""
        return bool(self._loading) or self._adapters.leaving

    def load(self, message: LoadAdapter) -> AdaptersChanged | None:
        """Begin a load. The answer, where it cannot begin."""
        try:
            self._require_free(message)
        except PhalanxError as error:
            return self._answer(message.call, error)
        load = self._loading[message.name] = _Load(message)
        threading.Thread(target=self._check, args=(load,), name="read an adapter", daemon=True).start()
        return None

    def unload(self, message: UnloadAdapter) -> AdaptersChanged:
        """No new request may name the adapter."""
        try:
            self._adapters.remove(message.name)
        except PhalanxError as error:
            return self._answer(message.call, error)
        logger.info("adapter %r is unloaded", message.name)
        return self._answer(message.call)

    def poll(self, open_adapters: Callable[[], list[Adapter | None]]) -> list[AdaptersChanged]:
        """Go on with what has come; the answers to loads that have ended. open_adapters: of all requests that have not ended."""
        answers = []
        while self._checked:
            load = self._checked.popleft()
            if load.file is None:
                answers.append(self._ended(load))
                continue
            key = self._adapters.next_key()
            self._on_ranks[key] = load
            self._executor.read_adapter(key, load.file)
        for key, error in self._executor.adapters_read():
            load = self._on_ranks.pop(key)
            if error is not None:
                load.error = error
                self._executor.drop_adapter(key)  # some ranks may have it
            else:
                assert load.file is not None
                self._adapters.put(Adapter(load.message.name, key, load.file))
                logger.info("adapter %r is loaded: rank %d, %s", load.message.name, load.file.rank, load.file.folder)
            answers.append(self._ended(load))
        for key in self._adapters.forgotten(open_adapters):
            self._executor.drop_adapter(key)
        return answers

    def _require_free(self, message: LoadAdapter) -> None:
        name = message.name
        if not self._adapters.slots.occupants:
            raise AdapterError("no adapter can be loaded", held="max_loras is 0", next="start with max_loras=1 or more")
        if not name or len(name) > 200 or not name.isprintable() or "," in name:
            why = "it must have 1 to 200 printable characters and no comma, which parts the names of adapters"
            raise AdapterError(f"{name[:200]!r} is no name of an adapter", why=why)
        if name in self._loading:
            raise AdapterError(f"adapter {name!r} is being loaded", next="wait until it is, or give another name")
        if name in self._adapters and not message.replace:
            raise AdapterError(
                f"adapter {name!r} is already loaded", next="give another name, unload it first, or set load_inplace"
            )

    def _check(self, load: _Load) -> None:
        """On a thread of its own."""
        try:
            load.file = self._read(Path(load.message.folder))
        except PhalanxError as error:
            load.error = error
        except Exception as error:
            logger.exception("an adapter cannot be read")
            load.error = AdapterError(f"{load.message.folder} cannot be read", why=repr(error))
        self._checked.append(load)
        self._wake()

    def _ended(self, load: _Load) -> AdaptersChanged:
        del self._loading[load.message.name]
        if load.error is None:
            return self._answer(load.message.call)
        error = load.error
        failure = f"adapter {load.message.name!r} is not loaded: {error.failure}"
        return self._answer(load.message.call, AdapterError(failure, held=error.held, why=error.why, next=error.next))

    def _answer(self, call: int, error: PhalanxError | None = None) -> AdaptersChanged:
        return AdaptersChanged(call, None if error is None else error.to_wire(), self._adapters.facts())

# SPDX-License-Identifier: Apache-2.0
"""Logging: one logger tree, one format, and the timing of start-up phases.

Every process of an engine logs to stderr, which it inherits from its parent. Each line, also of a message with several, has the
time and names the process by its title.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_FORMAT = "%(asctime)s %(levelname).1s {title}: "
_TIME = "%Y-%m-%d %H:%M:%S"
_OTHERS = ("uvicorn", "asyncio", "py.warnings")
"""Loggers of libraries. Without a handler, they would write lines without a time."""


class _EveryLine(logging.Formatter):
    """Writes the time and the title before each line of a message and its traceback."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._head = logging.Formatter(_FORMAT.format(title=title.replace("%", "%%")), _TIME)

    def format(self, record: logging.LogRecord) -> str:
        head = self._head.formatMessage(self._with_time(record))
        return "\n".join(head + line for line in super().format(record).splitlines() or [""])

    def _with_time(self, record: logging.LogRecord) -> logging.LogRecord:
        record.asctime = self.formatTime(record, _TIME)
        return record


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return logging.getLogger(name)


def configure(title: str = "phalanx", level: str = "INFO") -> None:
    """Set up the root of the phalanx logger tree, once per process; a second call replaces the first.

    title: the name of the process, for example "rank 3". level: a standard level name.
    """
    root = logging.getLogger("phalanx")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_EveryLine(title))
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    logging.captureWarnings(True)
    for name in _OTHERS:
        logging.getLogger(name).handlers[:] = [handler]


class Phases:
    """The start-up time by phase, in seconds, in the order in which the phases ended.

    Each phase logs a line when it begins and another one when it ends.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.seconds: dict[str, float] = {}
        self._logger = logger

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        self._logger.info("%s ...", name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin
        self._logger.info("%s: %.2f s", name, self.seconds[name])

# SPDX-License-Identifier: Apache-2.0
"""Logging: one logger tree, lines of text or JSON, and the timing of start-up phases.

Every process of an engine logs to stderr, which it inherits from its parent. Each line of text, also of a message with several, has
the time and names the process by its title. As JSON, a message is one line. What is logged while a request is answered names it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_FORMAT = "%(asctime)s %(levelname).1s {title}: "
_TIME = "%Y-%m-%d %H:%M:%S"
_OTHERS = ("uvicorn", "asyncio", "py.warnings", "opentelemetry")
"""Loggers of libraries. Without a handler, they would write lines without a time."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that this task answers; "" outside of one."""

_settings: dict[str, str] = {}
"""Of this process and those that it starts: "format" ("text" or "json") and "level", where they were chosen."""


class _EveryLine(logging.Formatter):
    """Writes the time and the title before each line of a message and its traceback. Fields of a message follow it."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._head = logging.Formatter(_FORMAT.format(title=title.replace("%", "%%")), _TIME)

    def format(self, record: logging.LogRecord) -> str:
        head = self._head.formatMessage(self._with_time(record))
        fields = {"request_id": request_id.get(), **_fields(record)}
        named = "".join(f" {name}={_one_word(value)}" for name, value in fields.items() if value not in ("", None))
        first, *others = super().format(record).splitlines() or [""]
        return "\n".join(head + line for line in [first + named, *others])

    def _with_time(self, record: logging.LogRecord) -> logging.LogRecord:
        record.asctime = self.formatTime(record, _TIME)
        return record


def _one_word(value: Any) -> str:
    """As it is, or quoted where a reader would take it for several: a path of a client may have spaces and line ends."""
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


class _Json(logging.Formatter):
    """One object per message: time (UTC), level, process, logger, message, then its fields, and the traceback as "exception"."""

    converter = staticmethod(time.gmtime)

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(), "process": self._title, "logger": record.name, "message": record.getMessage(),
            "request_id": request_id.get(), **_fields(record),
        }  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in line.items() if value not in ("", None)}, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def with_fields(**fields: Any) -> dict[str, Any]:
    """The `extra` of a message with fields, which JSON has one by one: logger.info("...", extra=with_fields(tokens=3))."""
    return {"fields": fields}


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return logging.getLogger(name)


def choose(*, form: str = "text", level: str = "info") -> None:
    """Choose format and level for this process and those that it starts. A following `configure` takes them."""
    _settings.update(format=form, level=level.upper())


def settings() -> dict[str, str]:
    """What was chosen, for `inherit` in a child."""
    return dict(_settings)


def inherit(chosen: Mapping[str, str]) -> None:
    """Take the settings of the parent process."""
    _settings.update(chosen)


def configure(title: str = "phalanx", level: str = "INFO") -> None:
    """Set up the root of the phalanx logger tree, once per process; a second call replaces the first.

    title: the name of the process, for example "rank 3". level: a standard level name. A chosen level counts where it is higher,
    and where it is below INFO.
    """
    root = logging.getLogger("phalanx")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(title) if _settings.get("format") == "json" else _EveryLine(title))
    root.handlers[:] = [handler]
    levels = logging.getLevelNamesMapping()
    own, chosen = levels[level.upper()], levels[_settings.get("level", "INFO")]
    root.setLevel(chosen if chosen < logging.INFO else max(own, chosen))
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

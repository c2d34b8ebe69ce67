# SPDX-License-Identifier: Apache-2.0
"""The monitor at a terminal: a frame every few seconds, and keys that change what is shown."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from phalanx.health.monitor import Frame, ServerView, ServerWatch, render

KEYS = "q ends, s sorts the servers by another column, h shows this line"
ORDERS: dict[str, Callable[[ServerView], float]] = {
    "the command line": lambda _: 0.0,
    "tokens/s": lambda server: server.generated_per_s or 0.0,
    "requests that wait": lambda server: server.waiting or 0.0,
    "queue": lambda server: server.queue_used or 0.0,
    "KV": lambda server: server.kv_used or 0.0,
    "TTFT": lambda server: server.ttft.get("p99", 0.0),
}
"""What servers are sorted by, the largest first."""


@dataclass(frozen=True)
class Shown:
    """What keys have chosen."""

    order: str = next(iter(ORDERS))
    help: bool = False

    def after(self, key: str) -> Shown:
        """What a key chooses; unknown ones change nothing."""
        if key == "s":
            names = list(ORDERS)
            return replace(self, order=names[(names.index(self.order) + 1) % len(names)])
        return replace(self, help=not self.help) if key in ("h", "?") else self

    def render(self, frame: Frame) -> RenderableType:
        """The frame in the chosen order, with the keys where they are asked for."""
        drawn = render(replace(frame, servers=tuple(sorted(frame.servers, key=ORDERS[self.order], reverse=True))))
        sorted_by = "" if self.order == next(iter(ORDERS)) else f"sorted by {self.order}"
        lines = [line for line in (sorted_by, KEYS if self.help else "") if line]
        return Group(drawn, *(Text(line, "dim") for line in lines))


def live(watch: ServerWatch, interval: float, console: Console) -> None:
    """Draw a frame every `interval` seconds, until Ctrl-C or the key q."""
    watch.read()
    shown, frame = Shown(), watch.frame()
    try:
        with (
            keyboard() as pressed,
            Live(shown.render(frame), console=console, auto_refresh=False, screen=console.is_terminal) as screen,
        ):
            due = time.monotonic() + interval
            while True:
                key = pressed(max(due - time.monotonic(), 0.0))
                if key == "q":
                    return
                if not key:
                    watch.read()
                    frame, due = watch.frame(), time.monotonic() + interval
                shown = shown.after(key)
                screen.update(shown.render(frame), refresh=True)
    except KeyboardInterrupt:
        return


@contextmanager
def keyboard() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key for so many seconds, and returns it, or "". Without a terminal there are no keys."""
    if not sys.stdin.isatty():
        yield _nap
        return
    import termios  # not on Windows
    import tty

    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> str:
        readable, _, _ = select.select([terminal], [], [], seconds)
        if not readable:
            return ""
        try:
            return os.read(terminal, 64).decode(errors="replace")[:1] or "q"
        except OSError:  # the terminal has gone
            return "q"

    try:
        tty.setcbreak(terminal)  # Ctrl-C stays a signal
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def _nap(seconds: float) -> str:
    time.sleep(seconds)
    return ""

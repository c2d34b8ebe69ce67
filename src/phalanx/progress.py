# SPDX-License-Identifier: Apache-2.0
"""A bar with the time left, for work that takes minutes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[int, int, str], None]
"""Takes how much is done, of how much, and what is next."""


@contextmanager
def progress_bar(title: str) -> Iterator[OnProgress | None]:
    """A bar on standard error that goes when the work ends; None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    # Twice a second: the client of a benchmark shares the cores with what it measures.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, of, what: bar.update(task, completed=done, total=of, description=what)

# SPDX-License-Identifier: Apache-2.0
"""Memory that large requests leave behind goes back to the system.

glibc keeps what is freed: in an arena for each thread that has ever allocated, and above the largest block that is still in use.
After a few bodies at the size limit a server would stay hundreds of MiB larger than it needs to be.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import psutil

from phalanx.launch import M_ARENA_MAX, M_MMAP_THRESHOLD, set_allocator
from phalanx.log import get_logger

logger = get_logger(__name__)

_LARGE_BLOCK = 256 << 10
"""Blocks of this size are mapped each by itself, and go back as soon as they are freed. glibc would raise the limit by itself, up
to 32 MiB, with the first large block that is freed."""
_ARENAS = 2  # the interpreter lock lets one thread at a time allocate, apart from parsers and tokenizers
_CHECK_SECONDS = 2.0
_GROWTH = 8 << 20  # bytes beyond the level after the last time that are worth it
_TIMES = 6  # after growth: at the next check, then after 1, 2, 4, 8 and 16 more


def configure() -> None:
    """Tell the allocator of this process to keep little."""
    set_allocator({M_MMAP_THRESHOLD: _LARGE_BLOCK, M_ARENA_MAX: _ARENAS})


async def trim_when_idle(idle: Callable[[], bool]) -> None:
    """Give back what is free when the process has grown and `idle` says that nobody would wait for it, and again a few times: what
    is freed only later makes the process no smaller by itself. Never returns."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None or not Path("/proc/self/statm").exists():
        return
    process = psutil.Process()
    level = process.memory_info().rss
    times, checks, pause = 0, 0, 1
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        before = process.memory_info().rss
        level = min(level, before)
        if before - level >= _GROWTH:
            times, checks, pause = _TIMES, 0, 1
        checks -= 1
        if not times or checks >= 0 or not idle():
            continue
        gc.collect()  # what lives as long as the server is frozen: this takes a moment
        await asyncio.to_thread(malloc_trim, 0)
        after = process.memory_info().rss
        level += (after - level) // 2
        times, checks, pause = times - 1, pause, 2 * pause
        logger.debug("memory: %d MiB before, %d MiB after what is free went back", before >> 20, after >> 20)

# SPDX-License-Identifier: Apache-2.0
"""The tests, in two lanes at once.

    python scripts/run_tests.py [ARGUMENTS OF PYTEST]

All of them; with --without-sweeps, those that a change of the code should pass before it is sent (`tests/support/sweeps.py`).

Foreground: first the tests that measure gaps between tokens, with no other of this lane; then tests that start ranks, servers and
hosts. They wait a quarter of their time, for processes, probes and limits of time, and some of them fail on a machine that is too
busy. Background: tests that only compute (`tests/conftest.py` lists their folders), which fill these gaps: at the lowest priority,
so that the others do not notice (gaps between tokens are as long with them as without). What the background prints is shown at its
end.

Where only a few tests failed, these run once more, when nothing else does: so a bound of time that a busy machine has broken ends
no run. Those that pass then are listed: their bounds are too tight, or they have a race.

The exit status is not 0 where a test failed that was not run again, or failed again, or where no test was found at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q"]
LANE = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not alone"]
SWEEPS = "--without-sweeps"
STOP_SECONDS = 30.0
FAILED, NOTHING_FOUND = 1, 5
"""pytest's exit statuses where tests failed; and where a choice of tests (-k) leaves a lane without any."""
MOST_AGAIN = 5
"""More failures than these are no accident."""


@dataclass
class Lane:
    """A run of pytest. cache: its folder, where pytest leaves the names of the tests that failed. status: once it has ended."""

    arguments: list[str]
    cache: Path
    status: int = 0

    @property
    def command(self) -> list[str]:
        return [*PYTEST, "-o", f"cache_dir={self.cache}", *self.arguments]

    def failed(self) -> list[str]:
        """The tests that failed in its last run."""
        file = self.cache / "v" / "cache" / "lastfailed"
        return sorted(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []

    def run_failed_again(self) -> None:
        """One after the other; those that fail again stay in the cache."""
        status = run([*self.command, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"])
        self.status = FAILED if status == NOTHING_FOUND else status


def lowest_priority() -> None:
    """Of this process and all that it will start, as long as they stay in its session. Called in a new session.

    Linux shares the cores between sessions first where it groups them (sched_autogroup), and then among a session's processes."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # not every kernel groups them
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")


def run(command: list[str]) -> int:
    """Run a command to its end; returns its exit status. Whatever ends this process ends the command in order first."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a run of pytest, whose fixtures then stop what they have started; kill it after STOP_SECONDS."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        process.wait()


def run_failed_again(lanes: list[Lane]) -> None:
    """Run the few tests that failed once more, with nothing beside them, and say which pass now."""
    failed = [(lane, lane.failed()) for lane in lanes if lane.status == FAILED]
    if not failed or not all(tests for _, tests in failed) or sum(len(tests) for _, tests in failed) > MOST_AGAIN:
        return
    for lane, tests in failed:
        print(f"== again, alone: {', '.join(tests)}", flush=True)
        lane.run_failed_again()
        still = lane.failed()
        for test in tests:
            if test not in still:
                print(f"== PASSES ALONE, FAILED BESIDE OTHERS: {test}", flush=True)


def main(arguments: list[str]) -> int:
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what runs is stopped, and leaves no orphans
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory() as caches:
        gaps = Lane(["-m", "alone", "tests/serve/test_app_bodies_beside_streams.py"], Path(caches, "gaps"))
        foreground = Lane([*LANE, "--lane", "foreground", *arguments], Path(caches, "foreground"))
        background = Lane([*LANE, "--timeout", "1200", "--lane", "background", *arguments], Path(caches, "background"))
        process = subprocess.Popen(
            background.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=lowest_priority,
        )  # fmt: skip
        try:
            if SWEEPS not in arguments:
                print("== tests that measure gaps between tokens", flush=True)
                gaps.status = run(gaps.command)
            print("== tests (several minutes: they start real ranks and servers)", flush=True)
            foreground.status = run(foreground.command)
            print(
                f"== tests that only compute, at the lowest priority beside these ({time.monotonic() - begin:.0f} s so far)",
                flush=True,
            )
            background.status = process.wait()
        finally:
            stop(process)
        printed.seek(0)
        sys.stdout.buffer.write(printed.read())
        sys.stdout.flush()
        run_failed_again([gaps, foreground, background])
    return exit_status(gaps.status, foreground.status, background.status)


def exit_status(gaps: int, *lanes: int) -> int:
    """0 where all passed. A lane that a signal ended has a negative status."""
    if set(lanes) == {NOTHING_FOUND} and not gaps:
        return NOTHING_FOUND
    return next((status for status in (gaps, *lanes) if status not in (0, NOTHING_FOUND)), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

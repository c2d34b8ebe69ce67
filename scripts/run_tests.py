# SPDX-License-Identifier: Apache-2.0
"""The tests, in two lanes at once.

    python scripts/run_tests.py [ARGUMENTS OF PYTEST]

All of them; with --without-sweeps, those that a change of the code should pass before it is sent (`tests/support/sweeps.py`).

Foreground: first the tests that measure gaps between tokens, with no other of this lane; then tests that start ranks, servers and
hosts. They wait a quarter of their time, for processes, probes and limits of time, and some of them fail on a machine that is too
busy. Background: tests that only compute (`tests/conftest.py` lists their folders), which fill these gaps: at the lowest priority,
so that the others do not notice (gaps between tokens are as long with them as without). What the background prints is shown at its
end.

The exit status is not 0 where any test failed, or where no test was found at all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q"]
LANE = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not alone"]
SWEEPS = "--without-sweeps"
STOP_SECONDS = 30.0
NOTHING_FOUND = 5
"""pytest's exit status where a choice of tests (-k) leaves a lane without any."""


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


def main(arguments: list[str]) -> int:
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what runs is stopped, and leaves no orphans
    with tempfile.TemporaryFile() as printed:
        background = subprocess.Popen(
            [*PYTEST, *LANE, "--timeout", "1200", "--lane", "background", *arguments], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=printed, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=lowest_priority,
        )  # fmt: skip
        try:
            if SWEEPS not in arguments:
                print("== tests that measure gaps between tokens", flush=True)
                gaps = [*PYTEST, "-m", "alone", "tests/serve/test_app_bodies_beside_streams.py"]
                if alone := run(gaps):
                    return alone
            print("== tests (several minutes: they start real ranks and servers)", flush=True)
            foreground = run([*PYTEST, *LANE, "--lane", "foreground", *arguments])
            print(
                f"== tests that only compute, at the lowest priority beside these ({time.monotonic() - begin:.0f} s so far)",
                flush=True,
            )
            background.wait()
        finally:
            stop(background)
        printed.seek(0)
        sys.stdout.buffer.write(printed.read())
        sys.stdout.flush()
    statuses = {foreground, background.returncode}
    if statuses == {NOTHING_FOUND}:
        return NOTHING_FOUND
    return max(statuses - {NOTHING_FOUND})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

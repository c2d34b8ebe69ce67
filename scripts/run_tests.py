# SPDX-License-Identifier: Apache-2.0
"""All tests, in two lanes at once.

    python scripts/run_tests.py [ARGUMENTS OF PYTEST]

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
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q"]
LANE = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not alone"]
NOTHING_FOUND = 5
"""pytest's exit status where a choice of tests (-k) leaves a lane without any."""


def lowest_priority() -> None:
    """Of this process and all that it will start, as long as they stay in its session. Called in a new session.

    Linux shares the cores between sessions first where it groups them (sched_autogroup), and then among a session's processes."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # not every kernel groups them
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")


def main(arguments: list[str]) -> int:
    begin = time.monotonic()
    with tempfile.TemporaryFile() as printed:
        background = subprocess.Popen(
            [*PYTEST, *LANE, "--timeout", "1200", "--lane", "background", *arguments], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=printed, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=lowest_priority,
        )  # fmt: skip
        try:
            print("== tests that measure gaps between tokens", flush=True)
            alone = subprocess.run([*PYTEST, "-m", "alone", "tests/serve/test_app_bodies_beside_streams.py"], cwd=ROOT, check=False)
            if alone.returncode:
                return alone.returncode
            print("== tests (several minutes: they start real ranks and servers)", flush=True)
            foreground = subprocess.run([*PYTEST, *LANE, "--lane", "foreground", *arguments], cwd=ROOT, check=False)
            print(
                f"== tests that only compute, at the lowest priority beside these ({time.monotonic() - begin:.0f} s so far)",
                flush=True,
            )
            background.wait()
        finally:
            background.terminate()
            background.wait()
        printed.seek(0)
        sys.stdout.buffer.write(printed.read())
        sys.stdout.flush()
    statuses = {foreground.returncode, background.returncode}
    if statuses == {NOTHING_FOUND}:
        return NOTHING_FOUND
    return max(statuses - {NOTHING_FOUND})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

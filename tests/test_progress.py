# SPDX-License-Identifier: Apache-2.0
"""The bar: at a terminal it shows what is done and the time left, and goes; elsewhere there is none."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys

from phalanx.progress import progress_bar

WORK = """
import time
from phalanx.progress import progress_bar
with progress_bar("working") as on_progress:
    for done in range(1, 4):
        on_progress(done, 4, "steps")
        time.sleep(0.6)
print("ended")
"""


def test_no_bar_without_a_terminal(capsys):
    with progress_bar("working") as on_progress:
        assert on_progress is None
    assert capsys.readouterr() == ("", "")


def test_a_bar_at_a_terminal():
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", WORK], stdout=follower, stderr=follower, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    ) as process:
        text = ""
        while "ended" not in text:
            assert select.select([leader], [], [], 60)[0], text
            text += os.read(leader, 65536).decode(errors="replace")
        assert process.wait(30) == 0
    os.close(leader)
    os.close(follower)
    assert "working" in text
    assert "3/4" in text
    assert "0:00:0" in text, "the time left"
    assert text.index("3/4") < text.rindex("\x1b[2K") < text.index("ended"), "it is erased"

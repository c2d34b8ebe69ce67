# SPDX-License-Identifier: Apache-2.0
"""Every line of the log has a time and the name of its process."""

from __future__ import annotations

import re
import subprocess
import sys

CODE = """
import logging, warnings
from phalanx import log
log.configure("rank 3")
log.get_logger("phalanx.x").info("one\\ntwo")
try:
    1 / 0
except ZeroDivisionError:
    log.get_logger("phalanx.x").exception("100%% broken %s", "x")
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
warnings.warn("beware")
"""
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [IWE] rank 3: .*")


def test_every_line():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    texts = [line.partition("rank 3: ")[2] for line in lines]
    assert texts[:3] == ["one", "two", "100% broken x"]
    assert "ZeroDivisionError: division by zero" in texts
    assert "Invalid HTTP request received." in texts
    assert any("beware" in text for text in texts)

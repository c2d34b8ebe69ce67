# SPDX-License-Identifier: Apache-2.0
"""Every line of the log has a time and the name of its process."""

from __future__ import annotations

import json
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


JSON_CODE = """
from phalanx import launch, log
log.choose(form="json", level="warning")
log.configure("rank 0")
logger = log.get_logger("phalanx.x")
logger.info("not shown")
log.request_id.set("r-1")
logger.warning("one\\n%s", "two", extra=log.with_fields(tokens=3, none=None))
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("broken")
log.choose(form="text", level="debug")
log.configure("rank 1", "WARNING")
logger.debug("three", extra=log.with_fields(tokens=3, path="/x\\n2026 I rank 1: y", model="a b"))
"""


def test_json_is_one_object_per_message_with_fields_and_the_request():
    done = subprocess.run([sys.executable, "-c", JSON_CODE], capture_output=True, text=True, timeout=60, check=True)
    *objects, text = done.stderr.splitlines()
    warning, error = map(json.loads, objects)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", warning.pop("time"))
    head = {"process": "rank 0", "logger": "phalanx.x", "request_id": "r-1"}
    assert warning == {**head, "level": "warning", "message": "one\ntwo", "tokens": 3}
    assert error["message"] == "broken"
    assert error["exception"].endswith("ZeroDivisionError: division by zero")
    fields = r'request_id=r-1 tokens=3 path="/x\n2026 I rank 1: y" model="a b"'
    assert text.endswith(f"D rank 1: three {fields}"), "a level below INFO is of every process"


def test_children_log_as_their_parent_does():
    child = (
        "from phalanx import launch, log; launch.read_config(); log.configure('rank 1'); log.get_logger('phalanx').warning('hi')"
    )
    envelope = json.dumps({"title": "t", "config": {}, "log": {"format": "json", "level": "INFO"}}) + "\n"
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdin.write(envelope)
    process.stdin.flush()
    assert json.loads(process.stderr.readline())["message"] == "hi"
    process.communicate(timeout=60)


def test_every_line():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    texts = [line.partition("rank 3: ")[2] for line in lines]
    assert texts[:3] == ["one", "two", "100% broken x"]
    assert "ZeroDivisionError: division by zero" in texts
    assert "Invalid HTTP request received." in texts
    assert any("beware" in text for text in texts)

# SPDX-License-Identifier: Apache-2.0
"""The process that compiles structured output: what its forks write to stderr comes to the log, line by line with a time."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys

CODE = """
import os, socket, sys
from phalanx import log
from phalanx.serve.structured_output.worker import Compilations

def compile_one(kind, text):
    os.write(2, b"[12:00:00] /project/cpp/x.cc:1: Warning: beware\\n" * int(text))
    if kind == "regex":
        raise ValueError("broken")
    return {"path": text}

log.configure("grammars")
Compilations(socket.socket(fileno=int(sys.argv[1])), compile_one, seconds=60.0, memory=1 << 30).run()
"""
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d W grammars: .*")


def test_every_line_has_a_time():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
        )
        theirs.close()
        replies = ours.makefile("rb")
        for number, (kind, text) in enumerate((("grammar", "2"), ("regex", "0"), ("grammar", "100000"))):
            ours.sendall(json.dumps({"number": number, "kind": kind, "text": text}).encode() + b"\n")
            reply = json.loads(replies.readline())
            assert reply["number"] == number
            assert ("path" in reply) == (kind == "grammar")
        replies.close()
    lines = process.communicate(timeout=60)[1].splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert lines[0].endswith("compiling a grammar: [12:00:00] /project/cpp/x.cc:1: Warning: beware")
    assert any(line.endswith("ValueError: broken") for line in lines)
    assert 10 < sum("beware" in line for line in lines) < 200, "a format that writes much does not fill the log"

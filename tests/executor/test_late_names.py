# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.config.options import EngineOptions
from phalanx.errors import OptionError
from phalanx.executor import late_names
from phalanx.executor.late_names import wait_for_name

pytestmark = pytest.mark.usefixtures("forked_python")

MAX_SECONDS = 15.0
"""From the command to its error, of which 5 are tries; the rest is what two processes take to start on busy cores."""
ABSENT = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_an_address_is_its_own_answer() -> None:
    assert wait_for_name("127.0.0.1", 0.0) == "127.0.0.1"


def test_a_name_that_comes_late_is_waited_for_and_named_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [ABSENT, ABSENT, [(socket.AF_INET, 1, 6, "", ("10.1.2.3", 0))]]

    def resolve(*arguments: object, **keywords: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(late_names, "_RETRY_SECONDS", 0.01)
    assert wait_for_name("leader.group", 5.0) == "10.1.2.3"
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "master_addr='leader.group' cannot be resolved: Name or service not known" in record.message


def test_a_name_that_never_comes_is_an_error_with_its_cause() -> None:
    begin = time.monotonic()
    with pytest.raises(OptionError, match=r"^master_addr='no-such-host.invalid' cannot be resolved; it was tried for 1 s; "):
        wait_for_name("no-such-host.invalid", 0.6)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_command_with_a_name_that_never_resolves_ends_in_time_and_names_the_next_move(node_rank: int) -> None:
    """With the default of master_addr_timeout. `start_timeout` may be as long as the weights need."""
    command = [
        sys.executable, "-m", "phalanx", "serve", "demo", "--device", "cpu", "--tp_size", "2", "--nnodes", "2", "--node_rank",
        str(node_rank), "--master_addr", "no-such-host.invalid", "--insecure_cluster", "--port", "0", "--host", "127.0.0.1",
        "--start_timeout", "900",
    ]  # fmt: skip
    begin = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    seconds = time.monotonic() - begin
    assert ended.returncode in (1, 2), ended.stderr
    assert re.search("master_addr='no-such-host.invalid' cannot be resolved; it was tried for [56] s; ", ended.stderr)
    assert "--master_addr_timeout" in ended.stderr
    assert seconds < MAX_SECONDS, ended.stderr


def test_half_of_the_time_to_an_error_is_for_the_name() -> None:
    """The other half is for the start of Python, which the command above does without, and for the model."""
    assert EngineOptions.of(model="demo").master_addr_timeout <= MAX_SECONDS / 2


SILENT = """
import time
from phalanx import log
from phalanx.errors import OptionError
from phalanx.executor.late_names import wait_for_name
from phalanx.serve.connections import listen
log.configure("test")
listen.LOOKUP_SECONDS = 0.5
begin = time.monotonic()
for act in (lambda: wait_for_name("leader.group", 2.0), lambda: listen.bind("leader.group", 0)):
    try:
        act()
    except OptionError as error:
        print(error)
print(time.monotonic() - begin)
"""


@pytest.mark.root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="not run: needs util-linux")
def test_a_name_server_that_never_answers_is_named_and_not_waited_for(tmp_path: Path) -> None:
    """The C library would wait for 40 s, as it is set here, and log nothing."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.77\noptions timeout:20 attempts:2\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.77", 53))
        begin = f'mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", begin, "sh", sys.executable, "-c", SILENT]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert server.recv(512), "it was asked"
    why = "the name server does not answer"
    name, host, seconds = ended.stdout.splitlines()
    assert name.startswith(f"master_addr='leader.group' cannot be resolved; it was tried for 2 s; {why}; "), ended.stderr
    assert host.startswith(f"host='leader.group' cannot be resolved; {why}; ")
    assert f"master_addr='leader.group' cannot be resolved: {why}; trying again for 1 s" in ended.stderr
    assert float(seconds) < MAX_SECONDS

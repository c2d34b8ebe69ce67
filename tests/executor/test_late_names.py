# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from phalanx.config.options import EngineOptions
from phalanx.errors import OptionError
from phalanx.executor import late_names
from phalanx.executor.late_names import wait_for_name

pytestmark = pytest.mark.usefixtures("forked_python")

MAX_SECONDS = 10.0
"""From the command to its error, of which starting Python and reading the model take two to three on an idle machine."""
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
    assert caplog.text.count("master_addr='leader.group' cannot be resolved: Name or service not known") == 1


def test_a_name_that_never_comes_is_an_error_with_its_cause() -> None:
    begin = time.monotonic()
    with pytest.raises(OptionError, match=r"^master_addr='no-such-host.invalid' cannot be resolved; it was tried for 1 s; "):
        wait_for_name("no-such-host.invalid", 0.6)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_command_with_a_name_that_never_resolves_ends_and_names_the_next_move(node_rank: int) -> None:
    """`start_timeout` may be as long as the weights need; the name is judged long before."""
    command = [
        sys.executable, "-m", "phalanx", "serve", "demo", "--device", "cpu", "--tp_size", "2", "--nnodes", "2", "--node_rank",
        str(node_rank), "--master_addr", "no-such-host.invalid", "--insecure_cluster", "--port", "0", "--host", "127.0.0.1",
        "--start_timeout", "900", "--master_addr_timeout", "1",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode in (1, 2), ended.stderr
    assert "master_addr='no-such-host.invalid' cannot be resolved; it was tried for 1 s; " in ended.stderr
    assert "--master_addr_timeout" in ended.stderr


def test_half_of_the_time_to_an_error_is_for_the_name() -> None:
    assert EngineOptions.of(model="demo").master_addr_timeout <= MAX_SECONDS / 2

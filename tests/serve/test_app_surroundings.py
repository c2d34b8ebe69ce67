# SPDX-License-Identifier: Apache-2.0
"""A server without a home or a folder to write to, beside another one on the same kernel cache, and under idle connections."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.serve_processes import MODEL, Served, fake_server, python_path, rank_server

CONNECTIONS = 3000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", max_position_embeddings=128)


def answers(served: Served) -> str:
    with served.http() as http:
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4
    return str(reply.json()["choices"][0]["text"])


@pytest.mark.parametrize("home", [None, "/nonexistent"])
def test_a_user_without_a_home(tmp_path: Path, checkpoint: Path, home: str | None) -> None:
    """A user id without an entry in the list of users, as containers have it; HOME is not set, or names no folder."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(
        "import pwd\n\ndef nobody(uid):\n    raise KeyError(f'getpwuid(): uid not found: {uid}')\n\npwd.getpwuid = nobody\n"
    )
    environment = {"HOME": home, "USER": None, "LOGNAME": None, "PYTHONPATH": python_path(modules)}
    with rank_server(tmp_path, checkpoint, "--max_seq_len", "64", environment=environment) as served:
        assert answers(served.wait_ready())
        assert "Traceback" not in served.log


def test_a_working_directory_that_cannot_be_written(tmp_path: Path, checkpoint: Path) -> None:
    with rank_server(tmp_path, checkpoint, "--max_seq_len", "64", cwd=Path("/proc")) as served:
        assert answers(served.wait_ready())
        assert "Traceback" not in served.log


def test_two_servers_that_start_at_once_share_a_kernel_cache(tmp_path: Path, checkpoint: Path) -> None:
    flags = ("--max_seq_len", "64", "--kernel_cache_dir", str(tmp_path / "kernels"))
    with rank_server(tmp_path, checkpoint, *flags) as one, rank_server(tmp_path, checkpoint, *flags) as other:
        assert answers(one.wait_ready()) == answers(other.wait_ready())


def test_thousands_of_idle_connections(tmp_path: Path, tiny_model: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CONNECTIONS + 500:
        pytest.skip(f"not run: the hard limit on open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with fake_server(tmp_path, tiny_model) as served, contextlib.ExitStack() as stack:
            text = answers(served.wait_ready())
            for number in range(CONNECTIONS):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=10))
                if number % 2:  # every other one has begun a request, and never ends it
                    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
            begun = time.monotonic()
            for _ in range(20):
                assert answers(served) == text
            assert time.monotonic() - begun < 20 * 0.5
            assert served.child("phalanx engine").is_running()
        with fake_server(tmp_path, tiny_model, port=served.port) as served:  # nothing keeps the port
            assert answers(served.wait_ready()) == text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

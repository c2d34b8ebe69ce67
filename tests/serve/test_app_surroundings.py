# SPDX-License-Identifier: Apache-2.0
"""A server without a home or a folder to write to, and under idle connections."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import socket
import time
from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.serve_processes import MODEL, Served, fake_server, python_path, rank_server

pytestmark = pytest.mark.usefixtures("forked_python")

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


@pytest.mark.parametrize("home", [None, "/proc/nonexistent"])
def test_a_user_without_a_home(tmp_path: Path, checkpoint: Path, home: str | None) -> None:
    """A user id without an entry in the list of users, as containers have it; HOME is not set, or names a folder that nobody, root
    included, can make."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(
        "import pwd\n\ndef nobody(uid):\n    raise KeyError(f'getpwuid(): uid not found: {uid}')\n\npwd.getpwuid = nobody\n"
    )
    environment = {"HOME": home, "USER": None, "LOGNAME": None, "PYTHONPATH": python_path(modules)}
    with rank_server(tmp_path, checkpoint, "--max_seq_len", "64", environment=environment) as served:
        assert answers(served.wait_ready())
        assert "Traceback" not in served.log


AUTO_MAP = {
    name: f"evil.{name}" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor",
    "AutoImageProcessor", "AutoFeatureExtractor", "AutoVideoProcessor")
}  # fmt: skip


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path, checkpoint: Path) -> None:
    """Each file that can name code does, as the formats of transformers have it; each file of code tells when it is run."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "evil"))
    for name in ("config", "tokenizer_config", "generation_config", "processor_config", "preprocessor_config", "video_processor"):
        path = folder / f"{name}.json"
        fields = json.loads(path.read_text()) if path.exists() else {}
        tokenizer = {"auto_map": AUTO_MAP | {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}} if "token" in name else {}
        path.write_text(json.dumps({**fields, "auto_map": AUTO_MAP, "trust_remote_code": True, **tokenizer}))
    (folder / "custom_generate").mkdir()
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    for name in ("evil.py", "modeling_evil.py", "configuration_llama.py", "__init__.py", "custom_generate/generate.py", "setup.py"):
        (folder / name).write_text(code)
    with rank_server(tmp_path, folder, "--max_seq_len", "64") as served:
        assert answers(served.wait_ready())
        with served.http() as http:
            chat = http.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]})
            assert chat.status_code in (200, 400), chat.text
            assert http.post("/tokenize", json={"model": MODEL, "prompt": "x"}).status_code == 200
    assert not (tmp_path / "ran").exists()


def test_a_working_directory_that_cannot_be_written(tmp_path: Path, checkpoint: Path) -> None:
    with rank_server(tmp_path, checkpoint, "--max_seq_len", "64", cwd=Path("/proc")) as served:
        assert answers(served.wait_ready())
        assert "Traceback" not in served.log


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

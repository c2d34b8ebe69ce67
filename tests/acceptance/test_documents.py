# SPDX-License-Identifier: Apache-2.0
"""The Python of README, the quick start and the page of the Python API runs, and so do the commands of the quick start and the
check of an installation, on the demo model over CPU ranks. tests/architecture/test_documents.py parses all commands."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from phalanx.deploy.ray_serve import free_ports
from tests.support.documents import ROOT, blocks, commands

pytestmark = pytest.mark.usefixtures("forked_python")

DOCS = ROOT / "docs"
RANK = " A rank is one process on one device. All ranks together are the world."
PORT = "localhost:8000"


def python(page: Path, kind: str = "python") -> str:
    return "\n".join(block.text for block in blocks(page) if block.kind == kind)


@pytest.fixture(scope="module", autouse=True)
def small_kv_cache() -> Iterator[None]:
    """For the commands: filling the default, 1 GiB on CPU, takes seconds of each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_KV_CACHE_BYTES", str(1 << 26))
        yield


def run(*command: str | Path, stdin: str = "") -> str:
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_python_api_page_runs(tmp_path):
    script = tmp_path / "page.py"
    script.write_text(python(DOCS / "python_api.md"), encoding="utf-8")
    lines = run(sys.executable, script).splitlines()
    assert lines[0] == f"{RANK} stop"
    assert lines[6] in ("True", "False")
    streamed = lines[7:]
    assert len(streamed) > 1, "the text grows, by as much as there is when the stream is read"
    assert streamed[-1] == " A KV block holds the keys and values of 16 tokens, in every layer. kv_"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(streamed))


def test_the_front_page_and_the_quick_start_run(tmp_path):
    script = tmp_path / "page.py"
    script.write_text(python(ROOT / "README.md") + "\nllm.shutdown()\n" + python(DOCS / "quickstart.md"), encoding="utf-8")
    assert run(sys.executable, script).splitlines() == [RANK, RANK]


def test_the_check_of_an_installation_runs():
    lines = [command.words for command in commands(DOCS / "install.md") if command.words[:2] == ["phalanx", "generate"]]
    assert len(lines) == 2
    for words in lines:
        assert run(sys.executable, "-m", *words).startswith(RANK)


@pytest.fixture(scope="module")
def served(small_kv_cache: None) -> Iterator[str]:
    """`localhost:PORT` of the server that the quick start starts, on a free port."""
    address = f"localhost:{free_ports()}"
    words = next(command.words for command in commands(DOCS / "quickstart.md") if command.words[:3] == ["phalanx", "serve", "demo"])
    words = [word.replace("8000", address.partition(":")[2]) for word in words]
    server = subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not _ready(address):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < end
            time.sleep(0.1)
        yield address
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()


def _ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_requests_of_the_quick_start(served):
    assert shutil.which("curl"), "the quick start asks with curl"
    requests = [command.words for command in commands(DOCS / "quickstart.md") if command.words[0] == "curl"]
    assert len(requests) == 2
    answer, metrics = (run(*(word.replace(PORT, served) for word in words), "-sSf") for words in requests)
    assert RANK.strip() in answer
    assert "phalanx:generation_tokens_total" in metrics
    script = python(DOCS / "quickstart.md", "python served")
    assert RANK.strip() in run(sys.executable, "-c", script.replace(PORT, served))
    chat = next(command.words for command in commands(DOCS / "quickstart.md") if command.words[:2] == ["phalanx", "chat"])
    assert RANK.strip() in run(sys.executable, "-m", *(word.replace(PORT, served) for word in chat), stdin="What is a rank?\n")

# SPDX-License-Identifier: Apache-2.0
"""Folders, and a Hub that is played by a server on loopback: found, not found, gated, refusing, offline."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from phalanx.config.locate import DEMO, checkpoint_digest, locate
from phalanx.errors import ModelNotFound

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"read me", "consolidated.safetensors": b"copy"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"

ASK = "import sys; from phalanx.config.locate import locate; print(locate(sys.argv[1], *sys.argv[2:]))"


class Hub(BaseHTTPRequestHandler):
    """The three routes that a download uses, for one model, `org/model`; `org/gated` wants terms accepted."""

    fetched: ClassVar[Counter[str]] = Counter()

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith(("/api/models/org/gated", "/org/gated")):
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        if path.startswith("/api/models/org/model/revision/nowhere"):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/org/model/tree"):
            return self._send_json([self._entry(name) for name in FILES])
        if path.startswith("/api/models/org/model"):
            return self._send_json({"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]})
        name = path.rsplit("/", 1)[-1]
        if path.startswith("/org/model/resolve/") and name in FILES:
            if body:
                Hub.fetched[name] += 1
            etag = hashlib.sha1(FILES[name]).hexdigest()
            return self._send(200, FILES[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, body=body)
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _entry(self, name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(FILES[name]), "oid": hashlib.sha1(FILES[name]).hexdigest()}

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.fetched.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def start(*args: str, endpoint: str, cache: Path, offline: str = "0") -> subprocess.Popen[str]:
    """The Hub's client reads its settings when it is imported, so each asks from a process of its own."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and name != "HF_TOKEN"}
    return subprocess.Popen(
        [sys.executable, "-c", ASK, *args], env={**environment, **settings, "HF_HUB_DISABLE_XET": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ask(*args: str, endpoint: str, cache: Path, offline: str = "0") -> tuple[str, str]:
    """(the folder, the last line of stderr)."""
    with start(*args, endpoint=endpoint, cache=cache, offline=offline) as process:
        out, err = process.communicate(timeout=120)
    return out.strip(), (err.strip().splitlines() or [""])[-1]


def test_a_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path


def test_demo_is_the_package_s_own() -> None:
    if DEMO.exists():
        assert (locate("demo") / "config.json").exists()
    else:
        with pytest.raises(ModelNotFound, match="demo_model"):
            locate("demo")


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "a/b/c", "~/no such model"])
def test_a_path_that_is_not_there_is_no_hub_id(name: str) -> None:
    with pytest.raises(ModelNotFound, match="there is no folder"):
        locate(name)


@pytest.mark.parametrize(("name", "why"), [("x" * 300, "File name too long"), ("~nobody-is-called-so/model", "home directory")])
def test_a_folder_that_cannot_be_read_says_why(name: str, why: str) -> None:
    with pytest.raises(ModelNotFound, match=f"cannot be read; .*{why}.*; give a folder"):
        locate(name)


def test_a_folder_without_config_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelNotFound, match=r"has no config.json; .* contains notes.txt"):
        locate(str(tmp_path))
    assert locate(str(tmp_path), need="notes.txt") == tmp_path
    with pytest.raises(ModelNotFound, match="is a file"):
        locate(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(("name", "message"), [("/nofile", "was not found; there is no folder /nofile"), (__file__, "is a file")])
def test_the_option_that_named_it_is_named(name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=rf"^tokenizer '{name}' .*{message}"):
        locate(name, option="tokenizer")


def test_any_folder_may_do(tmp_path: Path) -> None:
    assert locate(str(tmp_path), need="") == tmp_path


def test_processes_of_one_host_download_once(hub: str, tmp_path: Path) -> None:
    """Only what is needed is fetched; afterwards it is there offline."""
    started = [start("org/model", endpoint=hub, cache=tmp_path) for _ in range(2)]
    outs = []
    for process in started:
        with process:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            outs.append(out.strip())
    assert outs[0] == outs[1]
    assert {path.name for path in Path(outs[0]).iterdir()} == {"config.json", "model.safetensors"}
    assert Hub.fetched == {"config.json": 1, "model.safetensors": 1}
    offline, _ = ask("org/model", endpoint=hub, cache=tmp_path, offline="1")
    assert offline == outs[0]


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("org/gated",), ["'org/gated' is gated", "accept the terms", "hf auth login"]),
        (("org/nothing",), ["'org/nothing' was not found", "the Hub shows no such model", "check the spelling"]),
        (("org/model", "nowhere"), ["at revision 'nowhere' does not exist", "no such revision"]),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(args: tuple[str, ...], parts: list[str], hub: str, tmp_path: Path) -> None:
    folder, last = ask(*args, endpoint=hub, cache=tmp_path)
    assert not folder
    assert "ModelNotFound" in last
    assert all(part in last for part in parts), last


def test_an_unreachable_hub_and_offline_mode(tmp_path: Path) -> None:
    _, last = ask("org/model", endpoint="http://127.0.0.1:9", cache=tmp_path)
    assert "ModelNotFound" in last
    assert "http://127.0.0.1:9" in last
    assert "give a local folder" in last
    _, last = ask("org/model", endpoint="http://127.0.0.1:9", cache=tmp_path, offline="1")
    assert "ModelNotFound" in last
    assert "HF_HUB_OFFLINE" in last


def test_gguf(tmp_path):
    file = tmp_path / "model.Q4_K_M.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0" + b"\0" * 64)
    with pytest.raises(ModelNotFound, match=r"is a GGUF file; .*not GGUF"):
        locate(str(file))
    with pytest.raises(ModelNotFound, match="has GGUF files only"):
        locate(str(tmp_path))
    (tmp_path / "other.bin").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(ModelNotFound, match="is a GGUF file"):
        locate(str(tmp_path / "other.bin"))
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path


def test_gguf_of_the_hub(tmp_path, monkeypatch):
    """Of a Hub id, no GGUF file is downloaded: what is there is a README."""
    (tmp_path / "README.md").write_text("quantized")
    monkeypatch.setattr("phalanx.config.locate._download", lambda *_: tmp_path)
    with pytest.raises(ModelNotFound, match=r"model 'org/Llama-3-8B-GGUF' has GGUF files only"):
        locate("org/Llama-3-8B-GGUF")
    with pytest.raises(ModelNotFound, match=r"has no config\.json; .*README\.md"):
        locate("org/Llama-3-8B")


def test_a_checkpoints_digest_tells_config_and_weights_apart(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    with_weights, config = (checkpoint_digest(tmp_path, weights=weights) for weights in (True, False))
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert checkpoint_digest(tmp_path, weights=True) != with_weights
    assert checkpoint_digest(tmp_path, weights=False) == config
    (tmp_path / "config.json").write_text("{ }")
    assert checkpoint_digest(tmp_path, weights=False) != config


def _weights(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("begin", [0, 2 << 20, (4 << 20) - (64 << 10)])
def test_the_digest_tells_files_of_one_size_and_header_apart(tmp_path, begin):
    """As a fine-tune has them: other values of the same tensors, anywhere in the file."""
    (tmp_path / "config.json").write_text("{}")
    file, header, digests = tmp_path / "model.safetensors", b'{"w": [0, 4194304]}', set()
    for value in (0, 1):
        data = bytearray(4 << 20)
        data[begin : begin + (64 << 10)] = bytes([value]) * (64 << 10)
        for name in (header, header.replace(b"w", b"v")):
            file.write_bytes(_weights(name, data))
            digests.add(checkpoint_digest(tmp_path, weights=True))
    assert len(digests) == 4


def test_the_digest_reads_a_small_part_of_large_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for index in range(3):
        with (tmp_path / f"{index}.safetensors").open("wb") as file:
            file.write(_weights(b"{" + b" " * (3 << 20), b""))
            file.truncate(1 << 30)  # without blocks on the disk

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    checkpoint_digest(tmp_path, weights=True)
    assert bytes_read() - before < 3 * (1 << 20) + 129 * 4096 + 20_000

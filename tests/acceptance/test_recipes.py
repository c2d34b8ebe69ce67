# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/recipes.md, run as they stand there but for ports and paths, where their tools are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from phalanx.deploy.ray_serve import free_ports
from tests.support.documents import blocks
from tests.support.serve_http_app import MODEL, Live, Scripted, live
from tests.support.serve_processes import until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
TEXT = {block.kind: block.text for block in blocks(PAGE)}


@pytest.mark.skipif(shutil.which("nginx") is None or shutil.which("openssl") is None, reason="not run: needs nginx and openssl")
def test_nginx_streams_over_tls_and_asks_the_other_server_while_one_drains(tmp_path):
    port = free_ports()
    certificate(tmp_path)
    with servers() as (first, second):
        text = TEXT["nginx"].replace("127.0.0.1:8000", first.url[7:]).replace("127.0.0.1:8001", second.url[7:])
        text = text.replace("listen 443", f"listen 127.0.0.1:{port}")
        text = text.replace("/etc/nginx/", f"{tmp_path}/")
        folders = "".join(f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        head = f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/errors;"
        (tmp_path / "nginx.conf").write_text(f"{head} events {{}} http {{ access_log off; {folders} {text} }}", encoding="utf-8")
        try_proxy(["nginx", "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)], port, first, second)


@pytest.mark.skipif(shutil.which("envoy") is None or shutil.which("openssl") is None, reason="not run: needs envoy and openssl")
def test_envoy_streams_over_tls_and_asks_the_other_server_while_one_drains(tmp_path):
    port = free_ports()
    certificate(tmp_path)
    with servers() as (first, second):
        text = TEXT["yaml envoy"].replace("/etc/envoy/", f"{tmp_path}/")
        text = text.replace("0.0.0.0, port_value: 443", f"127.0.0.1, port_value: {port}")
        for printed, server in (("8000", first), ("8001", second)):
            text = text.replace(f"port_value: {printed}", f"port_value: {server.url.rpartition(':')[2]}")
        (tmp_path / "envoy.yaml").write_text(text, encoding="utf-8")
        options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
        try_proxy(["envoy", "-c", str(tmp_path / "envoy.yaml"), *options], port, first, second)


@contextmanager
def servers() -> Iterator[tuple[Live, Live]]:
    with live(Scripted("one two three", delay=0.01)) as first, live(Scripted("one two three", delay=0.01)) as second:
        yield first, second


def certificate(folder: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", folder / "llm.key", "-out", folder / "llm.crt",
         "-days", "1", "-subj", "/CN=localhost"], check=True, capture_output=True,
    )  # fmt: skip


def try_proxy(command: list[str], port: int, first: Live, second: Live) -> None:
    """A stream through a proxy comes event by event under the client's id, and nothing is refused while the first server drains."""
    proxy = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=False, timeout=60, trust_env=False) as http:
            until(lambda: _ready(http))
            body = {"model": MODEL, "prompt": "x", "max_tokens": 50, "stream": True}
            with http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "r-1"}) as answer:
                pieces = [piece for piece in answer.iter_raw() if piece]
            assert answer.headers["x-request-id"] == "r-1"
            assert len(pieces) > 2, "events come one by one"
            assert b"[DONE]" in pieces[-1]
            first.on_loop(first.service.admission.drain)
            for _ in range(4):
                assert http.post("/v1/completions", json={**body, "stream": False}).status_code == 200
            assert len(second.engine.added) >= 4
    finally:
        proxy.terminate()
        proxy.wait(20)


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="not run: needs systemd-analyze")
def test_the_unit_is_valid(tmp_path):
    unit = tmp_path / "phalanx.service"
    unit.write_text(TEXT["ini"].replace("/opt/phalanx/bin/phalanx", sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "phalanx.service" in line] == []

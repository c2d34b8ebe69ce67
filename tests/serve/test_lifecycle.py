# SPDX-License-Identifier: Apache-2.0
"""Servers that are stopped and killed: what their clients hear, how they exit, and that nothing is left.

The engine process is real; its executor is the fake one, at 20 ms for a step, so that a stream takes as long as a test needs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

import httpx
import openai
import pytest

from phalanx.deploy.ray_serve import free_ports
from tests.support.loop_delays import SCHEDSTAT, delays_between
from tests.support.serve_processes import MODEL, fake_server, until

pytestmark = pytest.mark.usefixtures("forked_python")

SLOW = {"latency": 0.02}
PLAIN = "/v1/completions"


def ask(tokens: int, **more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "x", "max_tokens": tokens, "ignore_eos": True, **more}


class Reader(threading.Thread):
    """Reads one stream to its end; what it saw is in `pieces`, `error` and `usage`."""

    def __init__(self, served, tokens: int) -> None:
        super().__init__(daemon=True)
        self.pieces, self.error, self.usage = 0, None, None
        self._client, self._tokens = served.openai(), tokens

    def run(self) -> None:
        try:
            stream = self._client.completions.create(
                model=MODEL, prompt="x", max_tokens=self._tokens, stream=True, stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            for chunk in stream:
                self.pieces += bool(chunk.choices)
                self.usage = chunk.usage
        except openai.APIError as error:
            self.error = error
        finally:
            self._client.close()


def reading(served, tokens: int, count: int = 2) -> list[Reader]:
    """Streams under way."""
    readers = [Reader(served, tokens) for _ in range(count)]
    for reader in readers:
        reader.start()
    until(lambda: all(reader.pieces > 2 for reader in readers))
    return readers


def test_sigterm_loses_no_accepted_request(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model, fake=SLOW, api_key=None) as served:
        served.wait_ready()
        assert "is served at http://127.0.0.1" in served.log
        readers = reading(served, 100)
        responses: list[httpx.Response] = []

        def wait() -> None:
            with served.http() as http:
                responses.append(http.post(PLAIN, json=ask(100)))

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: served.metric("num_requests_running") == 3)
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        with served.http() as http:
            until(lambda: http.get("/ready").status_code == 503, 1.0)
            assert http.get("/live").status_code == 200
            refused = http.post(PLAIN, json=ask(1))
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert http.get("/metrics").status_code == 200
        for reader in readers:
            reader.join(20)
            assert reader.error is None
            assert reader.usage.completion_tokens == 100
        waiting.join(20)
        assert responses[0].json()["usage"]["completion_tokens"] == 100
        assert served.process.wait(10) == 0
        served.gone()
        assert time.monotonic() - began < 25


def test_the_end_of_the_terminal_loses_no_accepted_request(tmp_path, tiny_model):
    """SIGHUP, to every process of the server at once, as service managers send it."""
    with fake_server(tmp_path, tiny_model, fake=SLOW) as served:
        served.wait_ready()
        readers = reading(served, 100)
        for process in served.tree:
            process.send_signal(signal.SIGHUP)
        for reader in readers:
            reader.join(20)
            assert reader.error is None
            assert reader.usage.completion_tokens == 100
        assert served.process.wait(10) == 0
        served.gone()


def test_a_server_under_nohup_outlives_the_terminal(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model, fake=SLOW, before=["nohup"]) as served:
        served.wait_ready()
        for process in served.tree:
            process.send_signal(signal.SIGHUP)
        (reader, *_) = reading(served, 20)
        reader.join(20)
        assert reader.error is None
        assert served.process.poll() is None


def test_what_does_not_finish_in_time_gets_an_error(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model, fake=SLOW, shutdown_timeout=0.5) as served:
        served.wait_ready()
        readers = reading(served, 10000)
        served.process.send_signal(signal.SIGTERM)
        for reader in readers:
            reader.join(10)
            assert "shut down" in str(reader.error)
        assert served.process.wait(10) == 0
        served.gone()
        assert "did not finish within 0.5 s" in served.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once(tmp_path, tiny_model, number):
    with fake_server(tmp_path, tiny_model, fake=SLOW) as served:
        served.wait_ready()
        readers = reading(served, 10000)
        served.process.send_signal(number)
        time.sleep(0.3)
        assert served.process.poll() is None
        served.process.send_signal(number)
        assert served.process.wait(3) == 128 + number
        served.gone()
        for reader in readers:
            reader.join(10)
            assert reader.error is not None or not reader.is_alive()


def test_the_engine_is_killed(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model, fake=SLOW) as served:
        served.wait_ready()
        readers = reading(served, 10000)
        slow = socket.create_connection(("127.0.0.1", served.port))  # a connection that does nothing holds nothing up
        served.child("phalanx engine").kill()
        began = time.monotonic()
        for reader in readers:
            reader.join(10)
            assert "engine" in str(reader.error)
        assert served.process.wait(10) == 1
        served.gone(10 - (time.monotonic() - began))
        slow.close()


def test_the_server_is_killed(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model, fake=SLOW) as served:
        served.wait_ready()
        reading(served, 10000, count=1)
        os.kill(served.process.pid, signal.SIGKILL)
        served.gone(10)


def test_a_signal_while_it_starts(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model) as served:
        with served.http(timeout=5) as http:

            def live() -> bool:
                try:
                    return http.get("/live").status_code == 200
                except httpx.TransportError:
                    return False

            until(live, 60)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
        served.gone()


def test_port_in_use(tmp_path, tiny_model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with fake_server(tmp_path, tiny_model, port=port) as served:
            assert served.process.wait(60) == 2
        assert "another process listens there" in served.log
        assert str(port) in served.log
        assert "engine" not in served.log.replace("another process", "")


@pytest.mark.parametrize(
    ("model", "serving", "status", "says"),
    [
        ("nothing-here", {}, 1, "there is no folder"),
        (None, {"chat_template": "{% if"}, 1, "cannot be compiled"),
        (None, {"chat_template": "no-such-file.jinja"}, 2, "chat_template='no-such-file.jinja' is neither a file nor a template"),
        (None, {"host": "192.0.2.1"}, 2, "192.0.2.1"),
        (None, {"host": "no.such.host.invalid"}, 2, "no.such.host.invalid"),
    ],
)
def test_what_cannot_start(tmp_path, tiny_model, model, serving, status, says):
    with fake_server(tmp_path, tmp_path / model if model else tiny_model, **serving) as served:
        assert served.process.wait(60) == status
        assert says in served.log
        assert "Traceback" not in served.log


def test_a_tokenizer_that_is_not_there_is_named_as_one(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model, engine={"tokenizer": "/nofile"}) as served:
        assert served.process.wait(60) == 1
        assert "tokenizer '/nofile' was not found; there is no folder /nofile" in served.log


def test_an_eos_token_that_the_model_lacks_is_dropped_with_a_line(tmp_path, tiny_model):
    copy = shutil.copytree(tiny_model, tmp_path / "model")
    config, names = (json.loads((copy / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    last = config["vocab_size"] - 1  # <tool>
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": last, "eos_token_id": None}))
    (copy / "tokenizer_config.json").write_text(json.dumps({**names, "eos_token": "<tool>"}))
    with fake_server(tmp_path, copy) as served:
        with served.wait_ready().http() as http:
            answer = http.post(PLAIN, json={"model": MODEL, "prompt": [5, 6], "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        assert f"eos ids [{last}] of the tokenizer are dropped: the model has tokens 0..{last - 1}" in served.log


def test_the_key_is_nowhere(tmp_path, tiny_model):
    """Not in the log, and not where `ps` would show it."""
    port = free_ports()
    with fake_server(tmp_path, tiny_model, api_key="very-secret", port=port) as served:
        served.wait_ready()
        with served.http() as http:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers={"authorization": "Bearer very-secret"}).status_code == 200
        shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout
        assert "phalanx server" in shown
        assert "very-secret" not in shown
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(10) == 0
        assert "very-secret" not in served.log


def test_the_first_who_asks_for_the_description_holds_up_nobody(tmp_path, tiny_model):
    """It is made while the engine starts. Made for the first who asked, it took 0.3 s of the event loop."""
    if not SCHEDSTAT.exists():
        pytest.skip("not run: needs Linux's times of threads")
    with fake_server(tmp_path, tiny_model, fake=SLOW, delays=tmp_path) as served:
        served.wait_ready()
        begin = time.monotonic()
        with served.http() as http:
            assert http.get("/openapi.json").json()["info"]["title"] == "Phalanx"
        time.sleep(0.1)
        assert max(delays_between(tmp_path / "loop", begin, time.monotonic()), default=0.0) < 0.1

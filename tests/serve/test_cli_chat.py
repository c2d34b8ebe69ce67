# SPDX-License-Identifier: Apache-2.0
"""What a user sees at a terminal: local models over the engine process with its fake executor, and servers over HTTP."""

from __future__ import annotations

import functools
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from phalanx import LLM, SamplingParams, cli
from phalanx.engine.executor import FAKE_EXECUTOR
from phalanx.serve.client import EngineProcessClient
from tests.support.checkpoints import write_checkpoint
from tests.support.serve_http_app import Scripted, live
from tests.support.serve_output_checkpoints import OUTPUT_FAMILIES, tokenizer_of_family

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(autouse=True)
def fake_ranks(monkeypatch):
    monkeypatch.setattr(EngineProcessClient, "start", functools.partial(EngineProcessClient.start, executor=FAKE_EXECUTOR))


def typed(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_generate_prints_what_generate_gives(folder, capsys, monkeypatch):
    with LLM(folder) as llm:
        texts = [
            out.outputs[0].text for out in llm.generate(["a", "b\n"], SamplingParams(max_tokens=9, temperature=0), use_tqdm=False)
        ]
    assert cli.main(["generate", str(folder), "-p", "a", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == texts[0] + "\n"
    typed(monkeypatch, "b\n")
    assert cli.main(["generate", str(folder), "--max_tokens", "9"]) == 0
    assert capsys.readouterr().out == texts[1] + "\n"
    assert cli.main(["generate", str(folder), "-p", "a", "--prompt", "b\n", "--max_tokens", "9"]) == 0
    assert capsys.readouterr().out == f"{texts[0]}\n{texts[1]}\n"


def test_a_prompt_that_is_too_long(folder, capsys):
    assert cli.main(["generate", str(folder), "--prompt", "word " * 300]) == 1
    assert "max_seq_len is 256, the model's own limit" in capsys.readouterr().err
    assert cli.main(["generate", str(folder), "--max_seq_len", "100", "--prompt", "word " * 300]) == 1
    assert "shorten the prompt or raise max_seq_len (the model ends at 256)" in capsys.readouterr().err


def test_the_reasoning_of_a_server_goes_to_stderr(capsys, monkeypatch):
    tokenizer = tokenizer_of_family("qwen3")
    engine = Scripted("<think>\nI greet.\n</think>\n\nHello!", tokenizer=tokenizer, eos=OUTPUT_FAMILIES["qwen3"].eos)
    with live(engine, tokenizer=tokenizer) as server:
        typed(monkeypatch, "one\ntwo\n")
        assert cli.main(["chat", server.url]) == 0
    output = capsys.readouterr()
    assert output.out == "Hello!\nHello!\n"
    assert "I greet.\n\nI greet.\n\n" in output.err
    assert "I greet" not in tokenizer.decode(engine.added[-1].token_ids)


def test_a_terminal_has_a_banner_commands_and_earlier_lines():
    with live(Scripted("Hello!")) as server:
        terminal, its_end = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "chat", server.url, "--system", "be brief"],
            stdin=its_end,
            stdout=its_end,
            stderr=its_end,
        )
        os.close(its_end)
        screen = ""

        def until(text):
            nonlocal screen
            while text not in screen:
                screen += os.read(terminal, 65536).decode()
            screen = screen.partition(text)[2]

        until(f"A chat with {server.url}. /help lists")
        until("> ")
        for line, shown in (
            ("one", "Hello!"), ("\x1b[A", "Hello!"), ("/history", "user: one\r\nassistant: Hello!\r\nuser: one"),
            ("/frob", "there is no /frob"), ("/help", "/clear"), ("/clear", "> "), ("/history", "system: be brief"),
            ("/system be kind", "> "), ("two", "Hello!"),
        ):  # fmt: skip
            os.write(terminal, f"{line}\n".encode())
            until(shown)
        os.write(terminal, b"/exit\n")
        assert process.wait(30) == 0
        os.close(terminal)
    texts = [server.engine.tokenizer.decode(added.token_ids) for added in server.engine.added]
    assert [text.count("one") for text in texts] == [1, 2, 0], "the second line was the first, by the arrow key"
    assert "be kind" in texts[2]


def test_chat_with_a_model_remembers(folder, capsys, monkeypatch):
    with LLM(folder) as llm:
        params = SamplingParams(max_tokens=6, temperature=0)
        begin = [{"role": "system", "content": "be brief"}]
        first = llm.chat([*begin, {"role": "user", "content": "one"}], params).outputs[0].text
        talk = [
            *begin,
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "two"},
        ]
        second = llm.chat(talk, params).outputs[0].text
    typed(monkeypatch, "one\n\ntwo\n")
    assert cli.main(["chat", str(folder), "--system", "be brief", "--max_tokens", "6"]) == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n"


class Answers(BaseHTTPRequestHandler):
    """Repeats the last message in capitals, a letter at a time; "fail" is refused. `bodies` are the requests."""

    bodies: list[dict]

    def do_GET(self):
        self._say(200, {"data": [{"id": "parrot"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append({**body, "key": self.headers.get("Authorization")})
        text = body["messages"][-1]["content"]
        if text == "fail":
            self._say(400, {"error": {"message": "this cannot be said"}})
            return
        events = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": letter}}]} for letter in text.upper()]
        events += [{"choices": []}]
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        content = "".join(lines).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _say(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextmanager
def server():
    handler = type("Handler", (Answers,), {"bodies": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler.bodies
        server.shutdown()
        thread.join()


def test_chat_with_a_server(capsys, monkeypatch):
    with server() as (url, bodies):
        typed(monkeypatch, "hello\nfail\nth\u2028ere\n")  # which is one line, and so is the event that has it
        assert cli.main(["chat", url + "/v1/", "--api_key", "hunter2", "--max_tokens", "7"]) == 1  # for "fail"
    out, err = capsys.readouterr()
    assert out == "HELLO\nTH\u2028ERE\n"
    assert "this cannot be said" in err
    assert "hunter2" not in err
    assert [body["key"] for body in bodies] == ["Bearer hunter2"] * 3
    assert bodies[0] == {**bodies[0], "model": "parrot", "stream": True, "max_tokens": 7, "temperature": 0.0}
    # What was refused is not part of the talk.
    assert [message["content"] for message in bodies[2]["messages"]] == ["hello", "HELLO", "th\u2028ere"]


def test_a_refusal_is_a_failure_unless_somebody_sees_it(capsys, monkeypatch):
    with server() as (url, bodies):
        typed(monkeypatch, "hello\n")
        assert cli.main(["chat", url]) == 0
        monkeypatch.setattr(Answers, "do_GET", lambda self: self._say(401, {"error": {"message": "no key"}}))
        typed(monkeypatch, "hello\n")
        assert cli.main(["chat", url]) == 1
        assert "status 401; no key" in capsys.readouterr().err
        typed(monkeypatch, "hello\n")
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        assert cli.main(["chat", url]) == 0
    assert len(bodies) == 1


def test_one_ctrl_c_ends_a_chat_that_waits_for_a_line():
    with server() as (url, _):
        command = [sys.executable, "-m", "phalanx", "chat", url]
        chat = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            chat.stdin.write("hello\n")
            chat.stdin.flush()
            assert chat.stdout.readline() == "HELLO\n"
            time.sleep(0.3)
            chat.send_signal(signal.SIGINT)
            assert chat.wait(10) == 130
            assert chat.stderr.read() == ""
        finally:
            chat.kill()
            chat.communicate()

# SPDX-License-Identifier: Apache-2.0
"""Memory over many mixed requests: 20,000 of all routes to `phalanx serve demo` on CPU, valid and invalid, whole and left early,
with one large hostile body in a hundred.

After each thousand, when nothing runs, it writes the seconds and the resident memory of each process, those that read large bodies
included. It passes if every answer has
the status that its request must get, memory is flat after the warm-up, and no KV block is in use at the end. The warm-up fills what
is bounded: the store of responses, the caches of grammars, of words of the tokenizer, and of prefixes. With --fake_ranks the server
and the engine are real, and nothing is computed: minutes instead of half an hour on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import harness
from benchmarks.serve import started

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE, DEMO = ROOT / "scripts" / "clients" / "tools.jinja", ROOT / "src" / "phalanx" / "demo_model"
FLAT_BYTES = 16 * 2**20
"""Growth of one process after the warm-up that is no leak: heaps are fragmented, and samples differ by some MiB."""
IDLE = ("num_requests_running", "num_requests_waiting", "num_requests_queued", "num_tokens_queued", "kv_cache_usage_perc")
REST_SECONDS = 6.0
"""In which an idle server gives back what large bodies have left."""
_LETTERS = "etaoin shrdlucmfwypvbgkjqxz ETAOIN äöüßéñ 日本語 русский 😀🚀 .,;:!?-()[]{}0123456789\n"


@dataclass(frozen=True)
class Request:
    """status: which the answer must have. leaves: the client leaves after the first bytes of the answer."""

    path: str
    body: Any = None
    status: int = 200
    method: str = "POST"
    leaves: bool = False


@dataclass
class Mix:
    """Requests at random, from a seed. responses: ids of stored ones, which later requests go on from, read and delete. largest:
    bytes of a hostile body, at most."""

    model: str
    chance: random.Random
    tools: bool = True
    largest: int = 7 << 20
    responses: list[str] = field(default_factory=list)

    def next(self) -> Request:
        """The next request."""
        kinds: dict[Callable[[], Request], int] = {
            self._chat: 29, self._completion: 20, self._response: 18, self._structured: 3, self._text: 8, self._invalid: 9,
            self._stored: 6, self._leaves: 5, self._get: 1, self._hostile: 1,
        }  # fmt: skip
        return self.chance.choices(list(kinds), list(kinds.values()))[0]()

    def text(self, longest: int = 200) -> str:
        """Words that no other request has: they fill caches by their content."""
        return "".join(self.chance.choices(_LETTERS, k=self.chance.randint(1, longest)))

    def _messages(self) -> list[dict[str, Any]]:
        turns = [{"role": "user", "content": self.text(1000 if self.chance.random() < 0.05 else 100)}]
        if self.chance.random() < 0.3:
            turns += [{"role": "assistant", "content": self.text()}, {"role": "user", "content": self.text()}]
        return turns

    def _sampling(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {}, {"temperature": 0}, {"top_p": 0.9, "seed": self.chance.randrange(1000)}, {"stop": [self.text(3).strip() or "x"]},
            {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"logit_bias": {str(self.chance.randrange(3, 1000)): 5}},
        ]  # fmt: skip
        return {"model": self.model, "max_tokens": self.chance.randint(1, 8), **self.chance.choice(choices)}

    def _streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.chance.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _chat(self) -> Request:
        body = self._streamed({**self._sampling(), "messages": self._messages(), "user": self.text(20)})
        if self.chance.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 5, "n": 2}
        if self.tools and self.chance.random() < 0.1:
            body["tools"] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
        return Request("/v1/chat/completions", body)

    def _completion(self) -> Request:
        prompt: Any = self.text()
        if self.chance.random() < 0.3:
            prompt = [[self.chance.randrange(3, 250) for _ in range(self.chance.randint(1, 100))] for _ in range(2)]
        body = {**self._sampling(), "prompt": prompt}
        if self.chance.random() < 0.2:
            return Request("/v1/completions", {**body, "logprobs": 3, "echo": True, "prompt_logprobs": 3})
        return Request("/v1/completions", self._streamed({**body, "n": self.chance.choice([1, 1, 2])}))

    def _response(self) -> Request:
        body = {"model": self.model, "input": self.text(), "max_output_tokens": self.chance.randint(1, 8)}
        if self.responses and self.chance.random() < 0.3:
            body["previous_response_id"] = self.chance.choice(self.responses)
        if self.chance.random() < 0.3:
            body["stream"] = True
        return Request("/v1/responses", body)

    def _structured(self) -> Request:
        values = [f"{self.chance.randrange(50)}", "b"]
        schema = {"type": "object", "properties": {"a": {"enum": values}}, "required": ["a"]}
        fields: dict[str, Any] = self.chance.choice([
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            {"guided_choice": values}, {"guided_regex": f"[ab]{{1,{self.chance.randrange(1, 50)}}}"},
            {"response_format": {"type": "json_object"}},
        ])  # fmt: skip
        return Request("/v1/chat/completions", self._streamed({**self._sampling(), "messages": self._messages(), **fields}))

    def _text(self) -> Request:
        if self.chance.random() < 0.3:
            return Request("/detokenize", {"model": self.model, "tokens": [self.chance.randrange(3, 250) for _ in range(50)]})
        if self.chance.random() < 0.5:
            return Request("/tokenize", {"model": self.model, "messages": self._messages()})
        return Request("/tokenize", {"model": self.model, "prompt": self.text(4000)})

    def _invalid(self) -> Request:
        chat = {"model": self.model, "messages": [{"role": "user", "content": "x"}]}
        refused = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"const": self.text(9)}}}}
        return self.chance.choice([
            Request("/v1/chat/completions", {**chat, f"unknown_{self.chance.randrange(10**6)}": 1}, 400),
            Request("/v1/chat/completions", {**chat, "temperature": self.text(5) + "x"}, 400),
            Request("/v1/chat/completions", {**chat, "response_format": refused}, 400),
            Request("/v1/completions", {"model": self.model, "prompt": [3] * 5000}, 400),
            Request("/v1/completions", {"model": self.text(9) + "?", "prompt": "x"}, 404),
            Request("/v1/completions", b'{"model": ' + self.text(300).encode(), 400),
            Request(f"/v1/{self.chance.randrange(10**9)}", {}, 404),
            Request("/v1/responses", {"model": self.model, "input": "x", "previous_response_id": self.text(9) + "?"}, 400),
        ])  # fmt: skip

    def _hostile(self) -> Request:
        """A large body that is read to its end, in a process of its own, and refused."""
        size = self.chance.randint(1 << 20, self.largest)
        chat = b'{"model": "%b", "messages": [{"role": "user", "content": "%b"}]%b}'
        plain = b'{"model": "%b", "prompt": %b}'
        model, text = self.model.encode(), self.text(50).encode("ascii", "ignore").replace(b'"', b" ").replace(b"\n", b" ")
        repeated = b"x" * size if not text else text * (size // len(text))
        return self.chance.choice([
            Request("/v1/completions", plain % (model, b"[" + b"5," * (size // 2) + b"5]"), 400),
            Request("/v1/completions", plain % (model, b'"%b"' % repeated), 400),
            Request("/v1/completions", plain % (model, b"[" * size), 400),
            Request("/v1/chat/completions", chat % (model, repeated, b""), 400),
            Request("/v1/chat/completions", chat % (model, b"x", b', "unknown": [' + b"{}," * (size // 3) + b"{}]"), 400),
            Request("/v1/chat/completions", chat % (model, b"x", b', "stop": [' + b'"a",' * (size // 4) + b'"a"]'), 400),
            Request("/detokenize", b'{"model": "%b", "tokens": [%b5]}' % (model, b'"",' * (size // 3)), 400),
        ])  # fmt: skip

    def _stored(self) -> Request:
        if len(self.responses) < 10:
            return self._response()
        if len(self.responses) > 400:  # before the server drops the oldest
            del self.responses[:100]
        kind = self.chance.randrange(3)
        if kind == 0:
            return Request(f"/v1/responses/{self.responses.pop()}", method="DELETE")
        return Request(f"/v1/responses/{self.chance.choice(self.responses)}{'/input_items' if kind == 1 else ''}", method="GET")

    def _leaves(self) -> Request:
        body = {"model": self.model, "messages": self._messages(), "max_tokens": 500, "stream": True, "ignore_eos": True}
        return Request("/v1/chat/completions", body, leaves=True)

    def _get(self) -> Request:
        return Request(self.chance.choice(["/v1/models", "/metrics", "/version", "/openapi.json"]), method="GET")


async def drive(url: str, mix: Mix, count: int, *, clients: int) -> Counter[str]:
    """Send `count` requests by `clients` at once. Returns how many got another status than they must, by path and statuses."""
    wrong: Counter[str] = Counter()
    left = iter(range(count))
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async def one(http: httpx.AsyncClient) -> None:
        for _ in left:
            request = mix.next()
            body = {"content": request.body} if isinstance(request.body, bytes) else {"json": request.body}
            headers = {"Content-Type": "application/json"}
            async with http.stream(request.method, request.path, headers=headers, **body) as answer:
                text = b""
                async for part in answer.aiter_raw():
                    text += part
                    if request.leaves:
                        break
            gone = request.method != "POST" and "/responses/" in request.path and answer.status_code == 404  # another deleted it
            if answer.status_code != request.status and not gone and not (request.status == 200 and b"_not_found" in text):
                wrong[f"{request.path} {request.status} {answer.status_code} {text[:300]!r}"] += 1
            elif request.path == "/v1/responses" and answer.status_code == 200 and text.startswith(b"{"):
                mix.responses.append(text.split(b'"id":"', 1)[1].split(b'"', 1)[0].decode())

    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120, trust_env=False) as http:
        await asyncio.gather(*(one(http) for _ in range(clients)))
    return wrong


def becomes_idle(url: str, seconds: float = 30.0) -> bool:
    """Whether soon nothing runs, waits or is queued, and no KV block is in use."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
        values = [line for line in lines if not line.startswith("#") and any(f":{stem}" in line for stem in IDLE)]
        if values and all(float(line.rpartition(" ")[2]) == 0 for line in values):
            return True
        time.sleep(0.1)
    return False


def resident(server: psutil.Process) -> dict[str, int]:
    """Resident bytes of the server's processes that stay, by title: without the forks that check formats or read bodies."""
    processes = [server, *(child for child in server.children() if child.is_running())]
    processes += [rank for child in processes[1:] for rank in child.children() if "rank" in " ".join(rank.cmdline())]
    sizes: dict[str, int] = {}
    for process in processes:
        title = " ".join(process.cmdline()).strip() or str(process.pid)
        sizes[title] = process.memory_info().rss
    return sizes


def rested(server: psutil.Process, before: dict[str, int]) -> dict[str, int]:
    """`resident`, once no process is much larger than `before`, or REST_SECONDS later."""
    end = time.monotonic() + REST_SECONDS
    while True:
        sizes = resident(server)
        if all(size - before.get(title, size) < FLAT_BYTES / 4 for title, size in sizes.items()) or time.monotonic() > end:
            return sizes
        time.sleep(0.5)


@dataclass
class Soak:
    """What came of the requests so far. seconds, samples: when, and resident bytes by process. wrong: statuses that were not
    expected. idle: nothing was in use whenever requests had ended."""

    seconds: list[float] = field(default_factory=list)
    samples: list[dict[str, int]] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)
    idle: bool = True

    def grown(self, warm: int) -> dict[str, int]:
        """By process: median of the last three samples less that of the three behind the warm-up, in bytes."""
        first, last = self.samples[warm : warm + 3], self.samples[-3:]
        return {
            title: int(statistics.median(sample.get(title, size) for sample in last))
            - int(statistics.median(sample.get(title, size) for sample in first))
            for title, size in self.samples[-1].items()
        }


def soak(url: str, server: psutil.Process, mix: Mix, *, requests: int, every: int, warm_up: int, clients: int) -> Iterator[Soak]:
    """Send requests; yields after `every` of them. warm_up: samples in which memory may grow."""
    state, begin = Soak(), time.monotonic()
    for _ in range(0, requests, every):
        state.wrong += asyncio.run(drive(url, mix, every, clients=clients))
        state.idle = becomes_idle(url) and state.idle
        state.seconds.append(round(time.monotonic() - begin, 1))
        state.samples.append(rested(server, state.samples[-1]) if len(state.samples) > warm_up else resident(server))
        yield state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1000, help="requests between two samples")
    parser.add_argument("--warm_up", type=int, default=6, help="samples before which memory may grow")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--fake_ranks", action="store_true", help="nothing is computed; server and engine are real")
    parser.add_argument("--name", default="serve_soak_cpu", help="of the result file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends, too
    with started.server(lambda port: _command(port, fake=arguments.fake_ranks)) as (server, url):
        return _run(arguments, psutil.Process(server.pid), url)


def _command(port: int, *, fake: bool) -> list[str]:
    if fake:
        engine = {"model": str(DEMO), "device": "cpu", "max_batch_size": 32, "max_seq_len": 2048}
        serving = {"port": port, "served_model_name": "demo", "chat_template": str(TEMPLATE)}
        options = {"engine": engine, "serving": serving, "fake": {}}
        return [sys.executable, "-m", "tests.support.serve_fake_server", json.dumps(options)]
    command = [sys.executable, "-m", "phalanx", "serve", "demo", "--device", "cpu", "--chat_template", str(TEMPLATE)]
    return [*command, "--kv_cache_bytes", str(1 << 26), "--port", str(port)]


def _run(arguments: argparse.Namespace, server: psutil.Process, url: str) -> int:
    mix, good = Mix("demo", random.Random(arguments.seed)), False
    amounts = {name: getattr(arguments, name) for name in ("requests", "every", "warm_up", "clients")}
    for state in soak(url, server, mix, **amounts):
        sizes = ", ".join(f"{title} {size / 2**20:.1f}" for title, size in state.samples[-1].items())
        count = len(state.samples) * arguments.every
        print(f"{count:6} requests, {state.seconds[-1]:7.1f} s, MiB: {sizes}", flush=True)
        grown = state.grown(arguments.warm_up) if len(state.samples) > arguments.warm_up + 3 else {}
        figures = {
            "asked": vars(arguments), "requests": count, "seconds": state.seconds, "resident_bytes": state.samples,
            "grown_bytes": grown, "wrong_statuses": sum(state.wrong.values()), "no_block_in_use": state.idle,
        }  # fmt: skip
        harness.write(arguments.name, figures)
        good = not state.wrong and state.idle and all(size < FLAT_BYTES for size in grown.values())
    for line, number in state.wrong.items():
        print(f"{number} x {line}")
    print(
        f"after the warm-up: {', '.join(f'{title} {size / 2**20:+.1f} MiB' for title, size in grown.items())}; idle: {state.idle}"
    )
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

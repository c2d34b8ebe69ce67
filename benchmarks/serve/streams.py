# SPDX-License-Identifier: Apache-2.0
"""The streaming capacity of the server itself: an engine with one token per stream every 5 ms (`paced_engine`), the real server,
and the client of `phalanx bench serve` in a third process.

Reports the arrived and the offered tokens per second and the CPU time of the server process per token; the same for chats, for
responses without streaming, and for `LLM.generate` without a server. A server that is too slow merges tokens into fewer events and
falls behind: `events/token` and the latency show it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil

from benchmarks import harness
from benchmarks.serve import started
from phalanx import launch
from phalanx.bench import load, streaming_client
from phalanx.config.locate import DEMO
from phalanx.serve.tokenizer import Tokenizer

TEXT = (
    "The ranks of a phalanx move as one. Each of them holds a part of every layer; what one has computed, the others need at once, "
    "and so a step is as long as its slowest part. (A token is some 4 characters of English text; numbers like 1,234.5 and words "
    "such as na\u00efve or \u4e16\u754c are split more finely.)\n\n"
    "    def step(batch):\n        return [rank.run(batch) for rank in ranks]\n\n"
)
KINDS = ("completions", "chat", "whole", "offline")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=1000)
    parser.add_argument("--step_ms", type=float, default=5.0)
    parser.add_argument("--offline_rows", type=int, default=512)
    parser.add_argument("--offline_step_ms", type=float, default=25.0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--name", default="serve_streams_cpu", help="name of the results file; empty: none is written")
    arguments = parser.parse_args()
    rows = []
    for kind in arguments.kinds.split(","):
        row = offline(arguments) if kind == "offline" else online(kind, arguments)
        rows.append(row)
        print(_line(row))
    if arguments.name:
        path = harness.write(arguments.name, {"asked": vars(arguments), "rows": rows})
        print(f"written: {path.relative_to(harness.ROOT)}")
    return 0


def _line(row: dict[str, Any]) -> str:
    line = f"{row['kind']:12s} offered {row['offered_tok_s']:7.0f} tok/s, arrived {row['tok_s']:7.0f}; "
    line += f"CPU per token {row['cpu_us_per_token']:.1f} us, {row['of_them_in_the_kernel']:.1f} of it in the kernel"
    if "itl_ms" not in row:
        return line
    times = "first token p50 {:.0f} ms, between events p50 {:.2f} p99 {:.2f} ms".format(
        row["ttft_ms"]["p50"], row["itl_ms"]["p50"], row["itl_ms"]["p99"]
    )
    return f"{line}; {row['events_per_token']:.3f} events/token; {times}; {row['late_steps']} steps of the engine began late"


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def online(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Drive the server with `streams` requests at once."""
    with server(arguments.step_ms) as (process, port):
        drive = [
            sys.executable,
            "-m",
            "benchmarks.serve.streams",
            "drive",
            kind,
            str(port),
            str(arguments.streams),
            str(arguments.new_tokens),
        ]
        subprocess.run([*drive[:-1], "20"], check=True, stdout=subprocess.DEVNULL, cwd=harness.ROOT)  # imports, caches
        before, late = _cpu(process), _late_steps(port)
        figures = json.loads(subprocess.run(drive, check=True, capture_output=True, text=True, cwd=harness.ROOT).stdout)
        spent, late = _per_token(before, _cpu(process), arguments.streams * arguments.new_tokens), _late_steps(port) - late
    assert figures["completed"] == arguments.streams, figures["errors"]
    streamed = {} if kind == "whole" else {name: figures[name] for name in ("events_per_token", "ttft_ms", "itl_ms")}
    return {
        "kind": kind, "offered_tok_s": arguments.streams / arguments.step_ms * 1e3, "tok_s": figures["output_tok_s"],
        "late_steps": late, **spent, **streamed,
    }  # fmt: skip


def _late_steps(port: int) -> int:
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("phalanx:num_preemptions_total{")))


@contextlib.contextmanager
def server(step_ms: float) -> Iterator[tuple[psutil.Process, int]]:
    """`phalanx serve demo` over a paced engine; its process and port."""
    command = [sys.executable, "-m", "benchmarks.serve.streams", "serve"]
    with started.server(lambda port: [*command, str(port), str(step_ms)], env=_environment()) as (process, url):
        yield psutil.Process(process.pid), int(url.rpartition(":")[2])


def _cpu(process: psutil.Process) -> tuple[float, float]:
    times = process.cpu_times()
    return float(times.user), float(times.system)


def _per_token(before: tuple[float, float], after: tuple[float, float], tokens: int) -> dict[str, float]:
    user, system = ((b - a) / tokens * 1e6 for a, b in zip(before, after, strict=True))
    return {"cpu_us_per_token": user + system, "of_them_in_the_kernel": system}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{harness.ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}


def serve(port: int, step_ms: float) -> int:
    """The server process."""
    from phalanx.config import EngineOptions
    from phalanx.config.serving import ServeOptions
    from phalanx.serve.app import run

    with paced(step_ms):
        return run(EngineOptions.of(model="demo", device="cpu"), ServeOptions.of(host="127.0.0.1", port=port))


@contextlib.contextmanager
def paced(step_ms: float) -> Iterator[None]:
    """Engines that are started from here are paced ones."""
    tokenizer, begin = Tokenizer.load(DEMO), launch.start
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    pace = {"seconds": step_ms / 1e3, "tokens": token_ids, "vocab_size": tokenizer.vocab_size}

    def start(module: str, config: dict[str, Any], title: str, **more: Any) -> launch.Child:
        assert module == "phalanx.engine"
        return begin("benchmarks.serve.paced_engine", {**config, "paced": pace}, title, **more)

    before, launch.start = os.environ.get("PYTHONPATH"), start
    os.environ["PYTHONPATH"] = _environment()["PYTHONPATH"]
    try:
        yield
    finally:
        launch.start = begin
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Chat(streaming_client.ApiEndpoint):
    """A server for chats."""

    def request(self, body: dict[str, Any]) -> bytes:
        messages = [{"role": "user", "content": "What is a rank?"}]
        arguments = {name: value for name, value in body.items() if name != "prompt"}
        return super().request({**arguments, "messages": messages}).replace(b"/v1/completions", b"/v1/chat/completions", 1)


def drive(kind: str, port: int, streams: int, tokens: int) -> dict[str, Any]:
    """The client process: `streams` requests at once, of so many new tokens."""
    url = f"http://127.0.0.1:{port}"
    target = (Chat if kind == "chat" else streaming_client.ApiEndpoint).of(url)
    prompts = load.Load(requests=streams, input_len=32, output_len=tokens, concurrency=streams).prompts()
    bodies = [streaming_client.body_of("demo", prompt, tokens) for prompt in prompts]

    async def every() -> list[streaming_client.Sample]:
        return await asyncio.gather(
            *(streaming_client.send(target, body, due=time.perf_counter(), expected=tokens, timeout=300) for body in bodies)
        )

    async def wholes() -> list[streaming_client.Sample]:
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:

            async def one(body: dict[str, Any]) -> streaming_client.Sample:
                sample = streaming_client.Sample(time.perf_counter())
                answer = await client.post("/v1/completions", json={**body, "stream": False, "stream_options": None})
                sample.end = time.perf_counter()
                sample.arrivals.append(sample.end)
                sample.completion_tokens = answer.json()["usage"]["completion_tokens"]
                return sample

            return await asyncio.gather(*(one(body) for body in bodies))

    with asyncio.Runner(loop_factory=load._loop_factory()) as runner:
        samples = runner.run(wholes() if kind == "whole" else every())
    events = sum(len(sample.arrivals) for sample in samples)
    return {**load.summary(samples), "events_per_token": events / (streams * tokens)}


# ---- offline ---------------------------------------------------------------------------------------------------------


def offline(arguments: argparse.Namespace) -> dict[str, Any]:
    """`LLM.generate` over a paced engine, in a process of its own."""
    words = ["offline", str(arguments.offline_rows), str(arguments.new_tokens), str(arguments.offline_step_ms)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serve.streams", *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return {"kind": "offline", "offered_tok_s": arguments.offline_rows / arguments.offline_step_ms * 1e3, **figures}


def generate(rows: int, tokens: int, step_ms: float) -> dict[str, float]:
    """The process that generates."""
    from phalanx import LLM, SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with paced(step_ms), LLM("demo", device="cpu") as llm:
        llm.generate([[1, 2, 3]] * 4, params, use_tqdm=False)
        process = psutil.Process()
        before, began = _cpu(process), time.perf_counter()
        outputs = llm.generate([[1, 2, 3]] * rows, params, use_tqdm=False)
        seconds, after = time.perf_counter() - began, _cpu(process)
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert count == rows * tokens
    return {"tok_s": count / seconds, **_per_token(before, after, count)}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", port, step_ms]:
            sys.exit(serve(int(port), float(step_ms)))
        case ["drive", kind, port, streams, tokens]:
            print(json.dumps(drive(kind, int(port), int(streams), int(tokens))))
        case ["offline", rows, tokens, step_ms]:
            print(json.dumps(generate(int(rows), int(tokens), float(step_ms))))
        case _:
            sys.exit(main())

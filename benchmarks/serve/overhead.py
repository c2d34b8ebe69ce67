# SPDX-License-Identifier: Apache-2.0
"""What the server costs: tokens per second through HTTP with 32 streams, beside offline `generate` with the same load.

Both run the demo model on CPU: 32 requests at once with the same prompt ids and lengths; over HTTP they stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import record

TARGET = 0.80


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tp_size", type=int, default=1)
    asked = parser.parse_args()
    prompts = [[3 + (17 * i + 31 * j) % 500 for j in range(asked.prompt_tokens)] for i in range(asked.streams)]
    offline = offline_rates(prompts, asked.new_tokens, asked.repeats, asked.tp_size)
    served = served_rates(prompts, asked.new_tokens, asked.repeats, asked.tp_size)
    ratio = max(served) / max(offline)
    print(f"offline generate: {max(offline):8.1f} tokens/s")
    print(f"over HTTP:        {max(served):8.1f} tokens/s with {asked.streams} streams")
    print(f"ratio: {ratio:.2f} (at least {TARGET:.2f} is asked for)")
    figures = {"asked": vars(asked), "offline_tokens_per_s": offline, "served_tokens_per_s": served, "ratio": ratio}
    print(f"written: {record.write('serve_overhead_cpu', figures).relative_to(record.ROOT)}")
    return 0 if ratio >= TARGET else 1


def offline_rates(prompts: list[list[int]], new_tokens: int, repeats: int, tp: int) -> list[float]:
    from phalanx import LLM, SamplingParams

    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    rates = []
    with LLM("demo", tensor_parallel_size=tp, enable_prefix_caching=False, device="cpu") as llm:
        llm.generate(prompts[:2], params, use_tqdm=False)
        for _ in range(repeats):
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            rates.append(sum(len(o.outputs[0].token_ids) for o in outputs) / seconds)
    return rates


def served_rates(prompts: list[list[int]], new_tokens: int, repeats: int, tp: int) -> list[float]:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "phalanx", "serve", "demo", "--tp_size", str(tp), "--port", str(port), "--device", "cpu"]
    server = subprocess.Popen([*command, "--no_enable_prefix_caching"])
    try:
        return asyncio.run(_drive(f"http://localhost:{port}", prompts, new_tokens, repeats))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


async def _drive(url: str, prompts: list[list[int]], new_tokens: int, repeats: int) -> list[float]:
    limits = httpx.Limits(max_connections=len(prompts) + 4)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
        await _ready(client)
        await asyncio.gather(*(_stream(client, prompt, 8) for prompt in prompts[:2]))
        rates = []
        for _ in range(repeats):
            begin = time.perf_counter()
            made = await asyncio.gather(*(_stream(client, prompt, new_tokens) for prompt in prompts))
            rates.append(sum(made) / (time.perf_counter() - begin))
        return rates


async def _ready(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        try:
            if (await client.get("/ready")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the server was not ready after 120 s")


async def _stream(client: httpx.AsyncClient, prompt: list[int], new_tokens: int) -> int:
    """Completion tokens of one streamed request, as its usage says."""
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    made = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if event.get("usage"):
                    made = event["usage"]["completion_tokens"]
    assert made == new_tokens, f"{made} tokens came over HTTP"
    return made


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Crowds: 200 streams at once, 500 that leave, ten times what the server can do. The engine is real, its executor the fake one.

The rush at full length, over a real model, is `benchmarks/serve/overload.py`; its load is made by the same code.
"""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import closing

import httpx
import psutil
import pytest

from benchmarks.serve.overload import GONE, TIMES, Client, closed_loop, open_loop
from tests.support.serve_processes import MODEL, Served, fake_server, until

pytestmark = pytest.mark.usefixtures("forked_python")

SECONDS = 8.0
"""Of the rush; the benchmark takes 60."""
FLAT = 12 * 2**20


def memory(served: Served) -> int:
    return sum(psutil.Process(process.pid).memory_info().rss for process in served.tree[:2])


def wait_until_idle(served: Served) -> None:
    """Nothing runs, waits or is held any more."""
    for stem in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_requests_queued", "num_tokens_queued"):
        until(lambda stem=stem: served.metric(stem) == 0.0)


def test_two_hundred_streams(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model, engine={"max_batch_size": 64}) as served:
        served.wait_ready()

        async def one(client, number: int) -> tuple[str, int]:
            stream = await client.completions.create(
                model=MODEL, prompt=f"number {number}", max_tokens=24, temperature=0, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            text, tokens = "", 0
            async for chunk in stream:
                text += "".join(choice.text for choice in chunk.choices)
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            return text, tokens

        async def crowd() -> None:
            async with served.async_openai() as client:
                streams = await asyncio.gather(*(one(client, number) for number in range(200)))
                assert {tokens for _, tokens in streams} == {24}
                for number in (0, 77, 199):
                    completion = await client.completions.create(
                        model=MODEL, prompt=f"number {number}", max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
                    )
                    assert completion.choices[0].text == streams[number][0]

        asyncio.run(crowd())
        wait_until_idle(served)
        assert served.metric("generation_tokens_total") == 203 * 24
        assert served.metric("request_success_total") == 203


def test_five_hundred_that_leave(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model, fake={"latency": 0.004}, engine={"max_batch_size": 16}) as served:
        served.wait_ready()
        chance = random.Random(11)

        async def one(client: httpx.AsyncClient) -> None:
            body = {
                "model": MODEL, "prompt": [chance.randrange(3, 300) for _ in range(chance.randrange(1, 200))], "max_tokens": 2000,
                "ignore_eos": True, "stream": chance.random() < 0.7, "n": chance.choice([1, 1, 1, 2]),
            }  # fmt: skip
            try:
                async with asyncio.timeout(chance.uniform(0.0, 0.4)), client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        pass
            except TimeoutError:
                pass

        async def leave(count: int) -> None:
            limits = httpx.Limits(max_connections=50)
            async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=60, trust_env=False) as client:
                for _ in range(count // 50):
                    await asyncio.gather(*(one(client) for _ in range(50)))

        asyncio.run(leave(100))
        wait_until_idle(served)
        before = memory(served)
        asyncio.run(leave(500))
        wait_until_idle(served)
        assert memory(served) - before < FLAT
        with served.http() as http:
            assert http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2}).status_code == 200


def test_ten_times_the_capacity(tmp_path, tiny_model):
    body = {"model": MODEL, "prompt": "What is a rank?", "max_tokens": 16, "ignore_eos": True}
    engine = {"max_batch_size": 4}
    with fake_server(tmp_path, tiny_model, fake={"latency": 0.05}, engine=engine, max_num_queued_reqs=4) as served:
        served.wait_ready()

        async def rush() -> None:
            with closing(Client.of(served.url)) as client:
                capacity = await closed_loop(client, body, clients=4, seconds=4.0)
                assert set(capacity.statuses) == {200}
                await open_loop(client, body, rate=TIMES * capacity.rate, seconds=1.0)
                before = memory(served)
                load = await open_loop(client, body, rate=TIMES * capacity.rate, seconds=SECONDS)
                assert set(load.statuses) == {200, 429}
                assert not load.broken
                assert not load.without_retry_after
                assert load.rate > 0.9 * capacity.rate
                assert memory(served) - before < FLAT
                wait_until_idle(served)
                last = await open_loop(
                    client, body, rate=TIMES * capacity.rate, seconds=3.0,
                    halfway=lambda: served.process.send_signal(signal.SIGTERM),
                )  # fmt: skip
                assert not last.broken, "an accepted request was lost"
                assert last.statuses[200] > 0
                assert set(last.statuses) <= {200, 429, 503, GONE}

        asyncio.run(rush())
        assert served.process.wait(20) == 0
        served.gone()


@pytest.mark.parametrize("tokens", [100])
def test_queued_tokens(tmp_path, tiny_model, tokens):
    engine = {"max_batch_size": 1}
    with fake_server(tmp_path, tiny_model, fake={"latency": 0.02}, engine=engine, max_num_queued_tokens=tokens) as served:
        served.wait_ready()
        body = {"model": MODEL, "prompt": [5] * 60, "max_tokens": 50, "ignore_eos": True}

        async def crowd() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=served.url, timeout=300, trust_env=False) as client:
                first = asyncio.create_task(client.post("/v1/completions", json=body))
                while served.metric("num_requests_running") < 1:
                    await asyncio.sleep(0.02)
                rest = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
                return await asyncio.gather(first, *rest)

        answers = asyncio.run(crowd())
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert "60 tokens wait, and 100 may" in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "overloaded"
        assert served.metric("request_refused_total") == 2

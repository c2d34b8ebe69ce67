# SPDX-License-Identifier: Apache-2.0
"""Formats that take long to check hold up nobody: neither short formats nor requests without one."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from tests.support.serve_processes import MODEL, fake_server

pytestmark = pytest.mark.usefixtures("forked_python")

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
SOON = 1.0


def slow_schema(number: int) -> str:
    """A schema that takes longer to check than it may: each two of its patterns of names are compared."""
    names = [{f"^{number}_{j}_{i}[a-z]{{0,9}}$": {} for i in range(16)} for j in range(16)]
    return json.dumps({"allOf": [{"type": "object", "patternProperties": each} for each in names]})


def test_behind_four_long_ones(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model, engine={"max_batch_size": 8}) as served:
        served.wait_ready()

        async def run() -> None:
            async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as client:

                async def seconds(**fields: object) -> float:
                    begin = time.monotonic()
                    answer = await client.post("/v1/chat/completions", json={**CHAT, **fields})
                    assert answer.status_code == 200, answer.text
                    return time.monotonic() - begin

                await seconds(guided_regex="a")  # it starts the checks, and the engine reads the vocabulary
                long = [
                    asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "guided_json": slow_schema(number)}))
                    for number in range(4)
                ]
                await asyncio.sleep(0.3)
                trivial, plain = [], []
                for number in range(6):
                    trivial.append(await seconds(guided_json={"type": "object", "properties": {f"p{number}": {"type": "integer"}}}))
                    plain.append(await seconds())
                    await asyncio.sleep(0.2)
                # One may meet a moment in which others have the cores; behind a long one, all would be late.
                assert sorted(trivial)[-2] < SOON, trivial
                assert sorted(plain)[-2] < SOON, plain
                for one in long:
                    one.cancel()
                await asyncio.gather(*long, return_exceptions=True)

        asyncio.run(run())

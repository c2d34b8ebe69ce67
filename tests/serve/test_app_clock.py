# SPDX-License-Identifier: Apache-2.0
"""A wall clock that jumps by hours and days under a server: no stream stalls, and what expires does so by elapsed time."""

from __future__ import annotations

import time

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.serve_processes import MODEL, Served, python_path, rank_server

SECONDS = 6.0
JUMPS = (0.0, 6 * 3600.0, -6 * 3600.0, 400 * 86400.0)
"""Seconds by which the clock is wrong, each for JUMP_SECONDS, in every process of the server."""
JUMP_SECONDS = 0.3
CLOCK = f"""
import time
real, real_ns, monotonic = time.time, time.time_ns, time.monotonic
def offset():
    return {JUMPS}[int(monotonic() / {JUMP_SECONDS}) % {len(JUMPS)}]
time.time = lambda: real() + offset()
time.time_ns = lambda: real_ns() + int(offset() * 1e9)
"""
STORED_SECONDS = 3.0
MAX_GAP_SECONDS = 10.0
"""Far below an hour, and above what a loaded machine makes."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("clock")
    checkpoint = write_checkpoint(folder / "checkpoint", "llama", max_position_embeddings=2048)
    (folder / "modules").mkdir()
    (folder / "modules" / "sitecustomize.py").write_text(CLOCK, encoding="utf-8")
    surroundings = {"PYTHONPATH": python_path(folder / "modules")}
    flags = ("--max_seq_len", "2048", "--stored_response_ttl", str(STORED_SECONDS), "--stall_timeout", "15")
    with rank_server(folder, checkpoint, *flags, environment=surroundings) as served:
        yield served.wait_ready()


def streamed(served: Served) -> tuple[set[int], float, int]:
    """A stream of a few hundred tokens: the dates of its chunks, its longest gap in seconds, and its tokens."""
    dates, gap, tokens, latest = set(), 0.0, 0, time.monotonic()
    with served.openai() as client:
        answer = client.completions.create(
            model=MODEL, prompt=[5, 6, 7], max_tokens=400, stream=True, extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )  # fmt: skip
        for chunk in answer:
            gap, latest = max(gap, time.monotonic() - latest), time.monotonic()
            dates.add(chunk.created)
            tokens = chunk.usage.completion_tokens if chunk.usage is not None else tokens
    return dates, gap, tokens


def test_streams_go_on_while_the_clock_jumps(served: Served) -> None:
    end, dates = time.monotonic() + SECONDS, set[int]()
    while time.monotonic() < end or max(dates) - min(dates) < 3600:
        assert time.monotonic() < end + 60, "the server's clock did not jump"
        created, gap, tokens = streamed(served)
        dates |= created
        assert tokens == 400
        assert gap < MAX_GAP_SECONDS
    assert served.process.poll() is None
    for words in ("stands still", "no heartbeat", "Traceback", "was ended"):
        assert words not in served.log, served.log


def test_what_is_stored_expires_by_the_time_that_has_passed(served: Served) -> None:
    """A jump of 400 days expires nothing, and one back keeps nothing."""
    with served.http() as http:
        body = {"model": MODEL, "input": "x", "max_output_tokens": 16}
        begin = time.monotonic()
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        path, early = f"/v1/responses/{answer.json()['id']}", 0
        end = time.monotonic()
        while (now := time.monotonic()) < begin + STORED_SECONDS - 0.5:
            assert http.get(path).status_code == 200, f"expired after {now - begin:.1f} s"
            early += 1
            time.sleep(0.1)
        assert early > len(JUMPS)
        time.sleep(max(0.0, end + STORED_SECONDS + 0.5 - time.monotonic()))
        assert http.get(path).status_code == 404

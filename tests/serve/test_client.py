# SPDX-License-Identifier: Apache-2.0
"""The client against a process that misbehaves on purpose, and against the real engine process with its fake executor."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from phalanx import launch
from phalanx.config import EngineOptions, SamplingParams
from phalanx.engine.messages import RequestUpdate, TokenLogprobs
from phalanx.errors import EngineClosed, EngineError, ModelError, PromptTooLong, RankDied, RequestError
from phalanx.serve import client as client_module
from phalanx.serve.client import EngineProcessClient
from phalanx.serve.update_stream import COALESCED_TOKENS, MAX_SCORED_TOKENS, MAX_TOKENS, UpdateStream

pytestmark = pytest.mark.usefixtures("forked_python")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scripted(monkeypatch):
    """EngineProcessClient.start of an engine that behaves in the named way; its process, and the folder for sockets."""
    started = []
    begin = launch.start

    def start_scripted(module, config, title, *, environment=None):
        assert (module, title, environment) == ("phalanx.engine", "phalanx engine", None)
        started.append(begin("tests.support.serve_scripted_engine", config, title))
        return started[-1]

    monkeypatch.setattr(launch, "start", start_scripted)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tempfile.mkdtemp(prefix="t", dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", folder)

    class Scripted:
        children = started
        sockets = Path(folder)

        @staticmethod
        async def start(way, **options):
            return await EngineProcessClient.start(EngineOptions.of(model=way, **options))

    yield Scripted
    assert all(not child.alive for child in started), "a process is left"
    assert not list(Path(folder).iterdir()), "something is left in the folder for sockets"
    os.rmdir(folder)


async def tokens(client, prompt, name="r", **params):
    token_ids = []
    async with aclosing(client.add(name, prompt, SamplingParams(**params))) as updates:
        async for update in updates:
            token_ids += update.tokens
    return token_ids


def test_requests_and_a_clean_end(scripted):
    async def run():
        client = await scripted.start("works")
        assert not list(scripted.sockets.iterdir())  # nothing is left even if this process were killed now
        assert client.facts.max_seq_len == 1024
        assert client.eos_token_ids == [2]
        many = [tokens(client, [1], name=str(i), max_tokens=6) for i in range(50)]
        assert await asyncio.gather(*many) == [[0, 1, 2, 3, 4, 5]] * 50
        assert (await client.stats()).steps == 0
        with pytest.raises(PromptTooLong):
            client.check([1] * 1024, SamplingParams())
        with pytest.raises(RequestError, match="token 1000"):
            client.check([1000], SamplingParams())
        await client.close()
        assert scripted.children[0].process.returncode == 0
        await client.close()
        with pytest.raises(EngineClosed):
            await tokens(client, [1])
        with pytest.raises(EngineClosed):
            await client.stats()

    asyncio.run(run())


def test_leaving_early_and_abort(scripted):
    async def run():
        client = await scripted.start("works")
        stream = client.add("a", [1], SamplingParams(max_tokens=6))
        assert (await anext(stream)).tokens == [0, 1, 2, 3, 4, 5]  # what came together is one update
        await stream.aclose()
        waiting = asyncio.create_task(tokens(client, [14], name="b"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match=r"^request id 'b' is in use"):
            await tokens(client, [14], name="b")
        client.abort(["b", "unknown"])
        assert await waiting == []
        cancelled = asyncio.create_task(tokens(client, [14], name="c"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        # "a" was whole before it was left; what was left early is forgotten in the engine.
        assert (await client.stats()).steps == 2
        await client.close()

    asyncio.run(run())


def test_what_comes_while_nobody_reads_is_joined():
    async def run():
        stream = UpdateStream()
        stream.put(RequestUpdate("r", [1], [TokenLogprobs(1, -1.0, 1)], prompt_logprobs=[None], cached_tokens=4, scheduled=9))
        stream.put(RequestUpdate("r", [2, 3], [TokenLogprobs(2, -1.0, 1), TokenLogprobs(3, -1.0, 1)], cached_tokens=4, accepted=1))
        joined = await stream.next()
        assert (joined.tokens, [one.token for one in joined.logprobs]) == ([1, 2, 3], [1, 2, 3])
        assert (joined.prompt_logprobs, joined.cached_tokens, joined.finish_reason, joined.accepted) == ([None], 4, None, 1)
        assert joined.scheduled == 9
        waits = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.put(RequestUpdate("r", [4]))
        stream.put(RequestUpdate("r", [5], finish_reason="stop", stop_reason=5))
        last = await waits
        assert (last.tokens, last.finish_reason, last.stop_reason, stream.ended) == ([4, 5], "stop", 5, True)

    asyncio.run(run())


@pytest.mark.parametrize(("scored", "limit"), [(True, MAX_SCORED_TOKENS), (False, MAX_TOKENS)])
def test_many_tokens_that_nobody_has_read_come_in_parts_between_which_others_run(scored, limit):
    """A client that does not read for a minute leaves twenty thousand tokens, whose scores would take 2 s of the event loop."""
    count = 5 * limit // 2

    async def run():
        stream = UpdateStream()
        for token in range(count):
            logprobs = [TokenLogprobs(token, -1.0, 1)] if scored else []
            stream.put(RequestUpdate("r", [token], logprobs, prompt_logprobs=None if token else [None], cached_tokens=3))
        stream.put(RequestUpdate("r", [], finish_reason="length"))
        turns, parts = [], []

        async def others():
            while True:
                turns.append(len(parts))
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        while not parts or parts[-1].finish_reason is None:
            parts.append(await stream.next())
        task.cancel()
        assert [len(part.tokens) for part in parts] == [limit, limit, limit // 2]
        assert [token for part in parts for token in part.tokens] == list(range(count))
        assert [one.token for part in parts for one in part.logprobs] == (list(range(count)) if scored else [])
        assert [part.prompt_logprobs for part in parts] == [[None], None, None]
        assert [part.cached_tokens for part in parts] == [3, 3, 3]
        assert {1, 2} <= set(turns), "others ran between two parts"

    asyncio.run(run())


def test_scores_of_a_prompt_in_parts_come_with_the_first_token():
    async def run():
        stream = UpdateStream()
        scores = [None, *(TokenLogprobs(token, -1.0, 1) for token in range(4))]
        waits = asyncio.create_task(stream.next())
        for part in (scores[:2], scores[2:4]):
            stream.put(RequestUpdate("r", [], prompt_logprobs=part))
            await asyncio.sleep(0)
            assert not waits.done()
        stream.put(RequestUpdate("r", [7], prompt_logprobs=scores[4:], cached_tokens=2))
        first = await waits
        assert (first.prompt_logprobs, first.tokens, first.cached_tokens) == (scores, [7], 2)

    asyncio.run(run())


def test_an_error_comes_after_the_tokens_before_it():
    async def run():
        stream = UpdateStream()
        stream.put(RequestUpdate("r", [1]))
        stream.fail(EngineError("the engine has failed"))
        assert (await stream.next()).tokens == [1]
        with pytest.raises(EngineError, match="the engine has failed"):
            await stream.next()

    asyncio.run(run())


def test_nothing_changes_a_stream_that_has_ended():
    async def run():
        ended, lost = UpdateStream(), UpdateStream()
        ended.put(RequestUpdate("r", [1], finish_reason="length"))
        ended.put(RequestUpdate("r", [], finish_reason="abort"))  # an abort that crossed the last token
        last = await ended.next()
        assert (last.tokens, last.finish_reason) == ([1], "length")
        lost.fail(EngineError("the engine has failed"))
        lost.put(RequestUpdate("r", [1]))
        assert lost.ended
        with pytest.raises(EngineError, match="the engine has failed"):
            await lost.next()

    asyncio.run(run())


def test_a_patient_reader_is_woken_at_the_end():
    async def run():
        ended, lost = UpdateStream(coalesce=True), UpdateStream(coalesce=True)
        waits = [asyncio.create_task(stream.next()) for stream in (ended, lost)]
        for stream in (ended, lost):
            stream.put(RequestUpdate("r", [1]))
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waits)
        ended.put(RequestUpdate("r", [2], finish_reason="length"))
        lost.fail(EngineError("the engine has failed"))
        assert (await waits[0]).tokens == [1, 2]
        assert (await waits[1]).tokens == [1]
        with pytest.raises(EngineError, match="the engine has failed"):
            await lost.next()

    asyncio.run(run())


def test_a_patient_reader_takes_many_tokens_at_once_before_the_end():
    async def run():
        stream = UpdateStream(coalesce=True)
        wait = asyncio.create_task(stream.next())
        for number in range(COALESCED_TOKENS):
            assert not wait.done()
            stream.put(RequestUpdate("r", [number]))
            await asyncio.sleep(0)
        assert (await wait).tokens == list(range(COALESCED_TOKENS))
        stream.put(RequestUpdate("r", [7], finish_reason="length"))
        assert (await stream.next()).tokens == [7]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("way", "kind", "message"),
    [
        ("bad model", ModelError, "they are not there"),
        ("dies at start", EngineError, "the engine process exited with status 3"),
    ],
)
def test_engines_that_do_not_start(scripted, way, kind, message):
    with pytest.raises(kind, match=message):
        asyncio.run(scripted.start(way))


def test_an_engine_that_never_starts(scripted, monkeypatch):
    monkeypatch.setattr(client_module, "SILENCE", 0.5)
    with pytest.raises(EngineError, match=r"^the engine did not start within 1 s"):
        asyncio.run(scripted.start("never starts", start_timeout=0.5))


def test_a_start_that_is_cancelled(scripted):
    async def run():
        starting = asyncio.create_task(scripted.start("never starts"))
        await asyncio.sleep(0.3)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(run())


@pytest.mark.parametrize(
    ("way", "kind", "message"),
    [
        ("is killed", EngineError, "the engine process was killed by SIGKILL"),
        ("loses a rank", RankDied, "rank 1 .*killed by SIGKILL"),
        ("sends nonsense", EngineError, "^the engine sent what cannot be read; DecodeError"),
        ("is stopped", EngineError, "^the engine process has sent no heartbeat for 1 s"),
    ],
)
def test_every_open_stream_hears_of_the_end(scripted, monkeypatch, way, kind, message):
    if way == "is stopped":
        monkeypatch.setattr(client_module, "SILENCE", 1)

    async def run():
        client = await scripted.start(way)
        heard = []
        client.on_failure(heard.append)
        begin = time.monotonic()
        errors = await asyncio.gather(
            tokens(client, [14], name="waits"), tokens(client, [13], name="ends it"), return_exceptions=True
        )
        assert time.monotonic() - begin < 10
        assert [type(error) for error in errors] == [kind, kind]
        assert errors[0] is not errors[1]
        assert [type(error) for error in heard] == [kind]
        for error in (*errors, *heard):
            with pytest.raises(kind, match=message):
                raise error
        with pytest.raises(kind, match=message):
            await tokens(client, [1], name="too late")
        await client.close()

    asyncio.run(run())


def test_a_refusal_ends_one_request_only(scripted):
    async def run():
        client = await scripted.start("refuses")
        with pytest.raises(RequestError, match="bad luck"):
            await tokens(client, [13])
        assert await tokens(client, [1], max_tokens=2) == [0, 1]
        await client.close()

    asyncio.run(run())


def test_closing_ends_open_streams_and_kills_what_does_not_listen(scripted):
    async def run():
        client = await scripted.start("ignores shutdown")
        waiting = asyncio.create_task(tokens(client, [14]))
        await asyncio.sleep(0)
        await client.close(timeout=0.3)
        with pytest.raises(EngineClosed):
            await waiting
        assert scripted.children[0].process.returncode == -9

    asyncio.run(run())


def test_a_close_that_is_cancelled_leaves_neither_process_nor_socket(scripted):
    """As by a second Ctrl-C, while the engine takes its time."""

    async def run():
        client = await scripted.start("ignores shutdown")
        closing = asyncio.create_task(client.close(timeout=60))
        await asyncio.sleep(0.1)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not scripted.children[0].alive
        assert client._socket.closed

    asyncio.run(run())


def test_a_failed_start_that_is_cancelled_as_it_cleans_up_leaves_no_socket(scripted, monkeypatch):
    """As a replica's is when another one failed at the same time."""
    clients = []
    create = EngineProcessClient.__init__

    def recorded(client, options):
        create(client, options)
        clients.append(client)

    monkeypatch.setattr(EngineProcessClient, "__init__", recorded)

    async def run():
        starting = asyncio.create_task(scripted.start("never starts"))
        await asyncio.sleep(0.3)
        (client,) = clients
        client._fail(EngineError("another one failed, too"))
        while not client._closing:
            await asyncio.sleep(0)
        starting.cancel()  # inside _end
        with pytest.raises((asyncio.CancelledError, EngineError)):
            await starting
        assert client._socket.closed
        assert client._context.closed

    asyncio.run(run())


def test_experts_that_come_behind_a_failure_have_no_reader(scripted, caplog):
    async def run():
        client = await scripted.start("answers late")
        with pytest.raises(RankDied):
            await client.experts_by_replica()
        await asyncio.sleep(0.2)
        assert "cannot be read" not in caplog.text
        await client.close()

        client = await scripted.start("works")
        assert [stats.experts for stats in await client.experts_by_replica()] == [8]
        await client.close()

    asyncio.run(run())


def test_no_thread_or_descriptor_is_left(scripted):
    async def once():
        client = await scripted.start("works")
        await tokens(client, [1], max_tokens=2)
        await client.close()

    asyncio.run(once())
    me = psutil.Process()
    before = me.num_fds()
    for _ in range(3):
        asyncio.run(once())
    assert me.num_fds() <= before

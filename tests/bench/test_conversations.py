# SPDX-License-Identifier: Apache-2.0
"""Conversations with a real server, whose device holds few of them; what is asked, and what is counted."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import httpx
import pytest

from phalanx import cli
from phalanx.bench import conversations, load, prefix_hits, report
from phalanx.bench.conversations import Conversations
from phalanx.bench.load import Load
from phalanx.bench.streaming_client import ApiEndpoint, Sample
from phalanx.errors import OptionError, RequestError
from phalanx.planner.arrivals import HASHED
from tests.support.checkpoints import write_checkpoint
from tests.support.serve_processes import rank_server

pytestmark = pytest.mark.usefixtures("forked_python")

WANTED = Conversations(
    6, num_turns=6, input_len=20, output_len=8, common_prefix_num_tokens=32, tool_calls=1, tool_num_tokens=12, think_time=0.01,
    max_active_conversations=4, concurrency=2,
)  # fmt: skip
TOKENS = 32 + 6 * 8 + 3 * (20 + 12)
"""Of one conversation when it ends."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Its device has room for two conversations, its host for all."""
    folder = tmp_path_factory.mktemp("server")
    model = write_checkpoint(folder / "llama", "llama")
    token = 2 * 2 * 2 * 16 * 4  # bytes: of keys and values, layers, heads, values of a head, fp32
    flags = ("--kv_cache_bytes", str(2 * TOKENS * token), "--kv_host_memory", str(20 * TOKENS * token), "--kv_block_size", "4")
    with rank_server(folder, model, *flags, "--dtype", "fp32", "--max_seq_len", str(TOKENS), "--max_batch_size", "2") as running:
        yield running.wait_ready()


def test_conversations_on_a_real_server(server, capsys):
    document = conversations.run(server.url, None, WANTED)
    results = document["results"]
    assert (results["completed"], results["failed"], results["unsent"]) == (6 * WANTED.requests_each, 0, 0)
    turns = results["turns"]
    assert [each["turn"] for each in turns] == [1, 2, 3, 4, 5, 6]
    assert [each["prompt_tokens"] / 6 for each in turns] == [52, 72, 100, 120, 148, 168], "each has all before it"
    assert all(each["cached_tokens"] > 0.5 * each["prompt_tokens"] for each in turns[1:])
    hits = results["prefix_cache"]
    assert hits["queries"] == sum(each["prompt_tokens"] for each in turns)
    assert hits["hits"] == hits["tiers"]["device"] + hits["tiers"]["host"] == sum(each["cached_tokens"] for each in turns)
    assert hits["tiers"]["host"] > 0
    json.dumps(document, allow_nan=False)
    report.show(*conversations.tables(document))
    shown = " ".join(capsys.readouterr().out.split())
    assert "6 conversations of 6 messages, 1 calls of tools behind each message" in shown
    assert f"of {hits['queries']:,} prompt tokens, device " in shown


def test_a_conversation_ends_with_the_request_that_fails(server):
    long = replace(WANTED, num_conversations=2, num_turns=8, tool_calls=0, input_len=60, rate=1000.0)
    results = conversations.run(server.url, None, long)["results"]
    assert (results["completed"], results["failed"], results["unsent"]) == (4, 2, 2), "the third prompt is too long"
    assert results["errors"] == {"status 400": 2}
    assert [each["completed"] for each in results["turns"]] == [2, 2, 0]
    with pytest.raises(RequestError, match=r"all 1 requests to .* failed; status 400"):
        conversations.run(server.url, None, replace(long, num_conversations=1, input_len=9999))


def test_a_trace_on_a_real_server(server, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 3 * HASHED, [1, 2, 3]), (500, 4 * HASHED, [1, 2, 3, 4]), (1000, HASHED + 64, [9, 5])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": length, "output_length": 64, "hash_ids": ids}) + "\n"
            for at, length, ids in rows
        )
    )
    wanted = Load(2, 1, 1, trace=str(trace), speed=10.0, shorten=32, warmup=0)
    first, second = wanted.prompts()
    assert (len(first), len(second), wanted.output_lens(), wanted.due()) == (48, 64, [2, 2], [0.0, 0.05])
    assert second[:48] == first
    assert len(set(first)) > 16, "tokens of a block differ"
    document = load.run(server.url, None, wanted)
    assert document["asked"]["requests"] == 2
    assert document["results"]["completed"] == 2
    assert document["results"]["prefix_cache"]["hits"] >= 44
    closed = load.run(server.url, None, replace(wanted, requests=9, concurrency=1))
    assert closed["results"]["completed"] == 3
    assert "of " + str(trace) in load.table(closed).title.replace("\n", " ")


def test_the_same_seed_says_the_same():
    def texts(wanted: Conversations, number: int) -> list[list[int]]:
        return [turn.tokens for turn in wanted.turns(number)]

    assert texts(WANTED, 1) == texts(WANTED, 1) != texts(WANTED, 2)
    assert texts(WANTED, 1)[0][:32] == texts(WANTED, 2)[0][:32]
    assert texts(WANTED, 1)[0][32:] != texts(WANTED, 2)[0][32:]
    assert [len(tokens) for tokens in texts(replace(WANTED, prefix_num_tokens=5), 1)] == [57, 12, 20, 12, 20, 12]
    waits = [turn.wait for number in range(400) for turn in WANTED.turns(number)]
    assert sum(waits) / (400 * 2) == pytest.approx(0.01, rel=0.1), "before each message but the first"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_turns": 3}, "num_turns=3 is not an even number"),
        ({"rate": 0.0}, "rate=0.0 is not above 0"),
        ({"vocab_size": 3}, "leaves no token ids"),
    ],
)
def test_conversations_that_cannot_be(changed, message):
    with pytest.raises(OptionError, match=message):
        replace(WANTED, **changed)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "1", "--num_turns", "4", "--tool_calls", "0"], "--num_turns, --tool_calls do nothing without --num_con"),
        (["--num_conversations", "2", "--skip_first", "1", "--trace", "x"], "--skip_first, --trace do nothing with --num_conv"),
        (["--trace", "x", "--rate", "2"], "rate=2.0 and length_range=1.0 do not apply to a trace"),
        (["--trace", "x", "--speed", "0"], "speed=0.0 is not above 0"),
        (["--trace", "x.jsonl"], "trace 'x.jsonl' is not a file"),
        (["--trace", "{trace}", "--shorten", "3"], "a trace cannot be 3 times shorter"),
    ],
)
def test_what_contradicts_itself_is_refused(flags, message, tmp_path, capsys, server):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1]}')
    assert cli.main(["bench", "serve", server.url, *(flag.format(trace=trace) for flag in flags)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_command_holds_conversations(server, tmp_path):
    file = tmp_path / "report.json"
    flags = ["--num_conversations", "2", "--num_turns", "2", "--input_len", "9", "--output_len", "3", "--json", str(file)]
    assert cli.main(["bench", "serve", server.url, *flags]) == 0
    assert json.loads(file.read_text())["results"]["completed"] == 2


@pytest.mark.parametrize(
    "answer", [httpx.Response(404), httpx.Response(200, json={"count": 1}), httpx.Response(200, text="<html>")]
)
def test_a_server_that_does_not_tokenize(answer):
    async def ask():
        transport = httpx.MockTransport(lambda request: answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            await conversations._tokens_of(client, "m", "a")

    with pytest.raises(
        RequestError, match="the server does not tokenize answers, so that no conversation can go on; POST http://a/tokenize"
    ):
        asyncio.run(ask())


def test_an_answer_that_is_not_tokenized_ends_its_conversation_alone(server, monkeypatch):
    texts_sent = []

    async def tokens_of(client, model, text):
        texts_sent.append(text)
        if len(texts_sent) == 2:  # the first asks whether the server has the route
            raise httpx.ReadTimeout("too slow")
        return [5]

    monkeypatch.setattr(conversations, "_tokens_of", tokens_of)
    results = conversations.run(server.url, None, replace(WANTED, num_conversations=2, num_turns=4))["results"]
    assert results["errors"] == {"its last answer was not tokenized": 1}
    assert results["completed"] > 0
    assert results["unsent"] > 0


def test_of_each_turn_what_was_answered():
    samples = [
        [
            Sample(1.0, [1.5], 2.0, 1, prompt_tokens=10, cached_tokens=0),
            Sample(3.0, [3.25], 4.0, 1, prompt_tokens=20, cached_tokens=12),
        ],
        [Sample(1.0, [1.1], 2.0, 1, prompt_tokens=10, cached_tokens=4), Sample(3.0, [], 3.1, 0, "timed out")],
    ]
    first, second = conversations.by_turn(samples)
    assert (first["completed"], first["prompt_tokens"], first["cached_tokens"]) == (2, 20, 4)
    assert first["ttft_ms"]["max"] == pytest.approx(500)
    assert (second["completed"], second["prompt_tokens"], second["cached_tokens"]) == (1, 20, 12)
    assert conversations.by_turn([]) == []
    (untold,) = conversations.by_turn([[Sample(1.0, [1.5], 2.0, 1, prompt_tokens=10)], [samples[1][0]]])
    assert untold["cached_tokens"] is None, "a server that does not say what it found has not found nothing"


def test_counters_of_all_engines_and_of_servers_without_tiers():
    text = """# TYPE phalanx:prefix_cache_queries counter
phalanx:prefix_cache_queries_total{model_name="m",engine="0"} 10.0
phalanx:prefix_cache_queries_total{model_name="m",engine="1"} 5.0
phalanx:prefix_cache_hits_total{model_name="m",engine="0"} 7.0
phalanx:prefix_cache_tier_hits_total{model_name="m",engine="0",tier="device"} 4.0
phalanx:prefix_cache_tier_hits_total{model_name="m",engine="0",tier="host"} 3.0
"""
    one = prefix_hits.counters(text)
    other = prefix_hits.counters('vllm:prefix_cache_queries_total{engine="0"} 2e1\nvllm:prefix_cache_hits_total{engine="0"} 6\n')
    assert one == {"queries": 15, "hits": 7, "tier_hits device": 4, "tier_hits host": 3}
    assert other == {"queries": 20, "hits": 6}
    hits = prefix_hits.between(one, one + one)
    assert hits == {"queries": 15, "hits": 7, "tiers": {"device": 4, "host": 3}}
    assert prefix_hits.text(hits) == "found: 46.7% of 15 prompt tokens, device 26.7%, host 20.0%"
    assert prefix_hits.counters("up 1\n") is None
    assert "unknown" in prefix_hits.text(prefix_hits.between(None, one))


@pytest.mark.parametrize("rate", [None, math.inf])
def test_so_many_conversations_go_on_at_once(rate, monkeypatch):
    active, most = 0, 0

    async def nothing(*_):
        return None

    async def one(endpoint, model, wanted, number, limit, answered):
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.001)
        active -= 1
        return [Sample(0.0, completion_tokens=number)]

    for module, name, instead in (
        (conversations, "_converse", one),
        (conversations, "_tokens_of", nothing),
        (prefix_hits, "read", nothing),
    ):
        monkeypatch.setattr(module, name, instead)
    wanted = replace(WANTED, num_conversations=9, max_active_conversations=3, rate=rate, model="a")
    _, samples, _ = asyncio.run(conversations._drive(ApiEndpoint.of("http://127.0.0.1:1", None), wanted))
    assert [each.completion_tokens for (each,) in samples] == list(range(9))
    assert most == 3

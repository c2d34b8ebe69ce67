# SPDX-License-Identifier: Apache-2.0
"""Load on a real server over fake ranks; the arithmetic exactly; and what is counted when requests fail."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from itertools import pairwise
from subprocess import CalledProcessError

import pytest

from benchmarks.serve import closed_loop
from phalanx.bench import load, report, shapes
from phalanx.bench.load import Load
from phalanx.bench.streaming_client import Sample
from phalanx.errors import EngineError, OptionError, RequestError
from tests.support.checkpoints import write_checkpoint
from tests.support.serve_processes import fake_server, rank_server, until

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server over ranks that take 10 ms a step, with the shape and the stand-in tokenizer of a published model."""
    folder = tmp_path_factory.mktemp("served")
    model = shapes.write("llama-3-8b", folder / "model")
    engine = {"max_batch_size": 4, "max_seq_len": 512, "load_format": "dummy"}
    with fake_server(folder, model, fake={"latency": 0.01}, engine=engine, max_num_queued_reqs=4) as server:
        yield server.wait_ready()


def test_due_times():
    due = load.arrival_times(20.0, 4000, 1)
    assert due[0] == 0
    assert due == sorted(due) == load.arrival_times(20.0, 4000, 1) != load.arrival_times(20.0, 4000, 2)
    gaps = [later - earlier for earlier, later in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.06)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.1)  # as of a Poisson process
    assert load.arrival_times(math.inf, 3, 0) == [0.0] * 3


def test_the_arithmetic():
    samples = [
        Sample(10.0, [10.5, 10.6, 10.8], 11.0, 3), Sample(10.0, [11.5, 11.6], 12.0, 3), Sample(10.0, [], 14.0, 0, "status 429"),
        Sample(10.0, [10.2], 10.3, 1, "1 of 3 tokens"), Sample(10.0, [], 10.1, 0, "status 429"),
    ]  # fmt: skip
    figures = load.summary(samples)
    assert (figures["completed"], figures["failed"]) == (2, 3)
    assert figures["errors"] == {"status 429": 2, "1 of 3 tokens": 1}
    assert (figures["seconds"], figures["output_tokens"]) == (4.0, 6)
    assert (figures["output_tok_s"], figures["requests_s"]) == (1.5, 0.5)
    assert figures["ttft_ms"]["p50"] == pytest.approx(1000)
    assert figures["itl_ms"]["mean"] == pytest.approx((100 + 200 + 100) / 3)
    assert figures["itl_ms"]["max"] == pytest.approx(200)
    assert figures["tpot_ms"]["mean"] == pytest.approx((150 + 50) / 2)
    assert figures["e2e_ms"]["p90"] == pytest.approx(1900)
    assert load.summary([])["itl_ms"] is None


def test_the_servers_words_are_kept_once():
    refused = [Sample(0.0, error="status 400", message=f"{number} tokens are too many") for number in (7, 8)]
    figures = load.summary([*refused, Sample(0.0, error="timed out")])
    assert figures["errors"] == {"status 400": 2, "timed out": 1}
    assert figures["said"] == {"status 400": "7 tokens are too many"}


def test_requests_that_come_first_count_for_throughput_alone():
    samples = [Sample(10.0, [14.0, 16.0], 16.0, 3), Sample(10.0, [10.5, 10.7], 10.7, 3), Sample(10.7, [10.9], 11.0, 0, "timed out")]
    figures = load.summary(samples, skip=1)
    assert (figures["completed"], figures["failed"], figures["output_tokens"], figures["seconds"]) == (2, 1, 6, 6.0)
    assert figures["ttft_ms"]["max"] == pytest.approx(500)
    assert figures["tpot_ms"]["max"] == pytest.approx(100)
    assert load.summary(samples, skip=2)["ttft_ms"] is None


def test_lengths_of_a_range():
    varied = Load(300, 100, 50, concurrency=2, length_range=0.8)
    prompts, outputs = [len(prompt) for prompt in varied.prompts()], varied.output_lens()
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (80, 100, 40, 50)
    assert sum(prompts) / 300 == pytest.approx(90, abs=1.5)
    assert len(set(zip(prompts, outputs, strict=True))) > 150  # drawn apart
    assert outputs == varied.output_lens()
    fixed = Load(3, 100, 50, concurrency=2)
    assert [len(prompt) for prompt in fixed.prompts()] == [100] * 3
    assert fixed.output_lens() == [50] * 3
    assert fixed.prompts()[0][:80] == varied.prompts()[0][:80]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_range": 0.0}, "not above 0"),
        ({"length_range": 1.1}, "at most 1"),
        ({"skip_first": 4}, "leaves none of 4 requests"),
    ],
)
def test_impossible_lengths_and_first_requests(options, message):
    with pytest.raises(OptionError, match=message):
        Load(4, 10, 10, concurrency=2, **options)


@pytest.mark.parametrize("options", [{}, {"rate": 1.0, "concurrency": 2}, {"rate": 0.0}, {"rate": math.nan}])
def test_a_rate_or_a_concurrency(options):
    with pytest.raises(OptionError, match="rate"):
        Load(1, 1, 1, **options)


def test_open_loop_counts_from_when_a_request_was_due():
    async def slow(number, due):
        time.sleep(0.05)  # holds up the loop, as a server can hold up its client
        return Sample(due, [time.perf_counter()], time.perf_counter(), 1)

    samples = asyncio.run(load.open_loop(slow, [0.0, 0.0, 0.0]))
    assert load.summary(samples)["ttft_ms"]["max"] >= 150


def test_closed_loop_keeps_so_many_open():
    open_now, most = 0, 0

    async def one(number, due):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.05 if number == 0 else 0.001)
        open_now -= 1
        return Sample(due, completion_tokens=number)

    samples = asyncio.run(load.closed_loop(one, 20, 3))
    assert [sample.completion_tokens for sample in samples] == list(range(20))  # as sent, not as ended
    assert most == 3


def test_a_concurrency_on_a_real_server(served, capsys):
    calls = []
    wanted = Load(8, 16, 12, concurrency=4, length_range=0.5, skip_first=4)
    document = load.run(served.url, None, wanted, on_progress=lambda done, of, what: calls.append((done, of, what)))
    assert calls == [(number, 8, "requests") for number in range(1, 9)], "the warm-up does not count"
    figures = document["results"]
    lengths = Load(8, 16, 12, concurrency=4, length_range=0.5).output_lens()
    assert (figures["completed"], figures["failed"], figures["output_tokens"]) == (8, 0, sum(lengths))
    assert document["asked"]["length_range"] == 0.5
    assert figures["itl_ms"]["p50"] > 5  # ranks take 10 ms a step
    assert figures["ttft_ms"]["p50"] < figures["e2e_ms"]["p50"]
    assert document["asked"]["model"] == "tiny"
    json.dumps(document, allow_nan=False)
    report.show(load.table(document))
    shown = capsys.readouterr().out
    assert "4 streams" in shown
    assert "8 x 16 in / 12 out, each 50% to 100% of that, latencies without the first 4" in " ".join(shown.split())
    assert "roofline: unknown over HTTP" in shown


def test_closed_loops_of_a_benchmark(served):
    loop = closed_loop.summary(closed_loop.measured(served.url, concurrency=3, rounds=4, tokens=20))
    assert (loop["requests"], loop["completed"], loop["skip_first"], loop["input_len"]) == (12, 12, 3, 20)
    assert loop["ttft_ms"]["p50"] > 5
    assert "url" not in loop
    replica = closed_loop.replica_of("H200", "llama-3-8b", ["--dtype", "bf16", "--kv_cache_dtype", "fp8", "--max_seq_len", "4096"])
    few, many = (closed_loop.predicted(replica, closed_loop.closed_loop_of(count, 3, 64)) for count in (2, 32))
    assert few["requests"] == 6
    assert few["tpot_ms"]["p50"] < many["tpot_ms"]["p50"]
    with pytest.raises(CalledProcessError, match="status 429"):  # 4 run and 4 wait
        closed_loop.measured(served.url, concurrency=20, rounds=1, tokens=20)


def test_a_rate_that_is_too_much(served, capsys):
    document = load.run(served.url, None, Load(40, 16, 12, rate=math.inf))
    figures = document["results"]
    report.show(load.table(document))
    assert capsys.readouterr().out.count("status 429: ") == 1
    assert figures["errors"] == {"status 429": figures["failed"]}
    assert figures["failed"] > 0
    assert list(figures["said"]) == ["status 429"]
    assert figures["completed"] + figures["failed"] == 40


def test_every_request_refused(served):
    with pytest.raises(RequestError, match=r"all 3 requests to .* failed; status 404 \(3\): .*another"):
        load.run(served.url, None, Load(3, 16, 4, concurrency=1, model="another", warmup=0))
    with pytest.raises(RequestError, match=r"all 2 requests to .* failed; status 400 \(2\): .*600.*512"):
        load.run(served.url, None, Load(2, 600, 4, concurrency=1))


def test_a_server_that_asks_for_a_key(tmp_path_factory):
    folder = tmp_path_factory.mktemp("locked")
    model = shapes.write("llama-3-8b", folder / "model")
    with fake_server(folder, model, engine={"max_seq_len": 512, "load_format": "dummy"}, api_key="secret") as server:
        url = server.wait_ready().url
        why = r"status 401.*the API key is missing or wrong.*; give the server's key with --api_key$"
        for key in (None, "another"):
            with pytest.raises(RequestError, match=f"does not list its models; it answered with {why}"):
                load.run(url, key, Load(2, 16, 4, concurrency=1))
            with pytest.raises(RequestError, match=f"requests to .* failed; {why}"):
                load.run(url, key, Load(2, 16, 4, concurrency=1, model="tiny"))
        assert load.run(url, "secret", Load(2, 16, 4, concurrency=1))["results"]["completed"] == 2


def test_a_url_of_something_else(served):
    with pytest.raises(RequestError, match=r"/none does not list its models; it answered with status 404; .*; name the model with"):
        load.run(f"{served.url}/none", None, Load(1, 1, 1, concurrency=1))


def test_a_rank_is_killed_under_load(tmp_path, capsys):
    model = write_checkpoint(tmp_path / "model", "llama", max_position_embeddings=8192)
    with rank_server(tmp_path, model, "--tp_size", "2") as running:
        running.wait_ready()
        rank = running.child("phalanx rank 1")

        def kill():
            until(lambda: running.metric("generation_tokens_total") > 8)
            rank.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(RequestError, match=r"requests to .* failed; error event: rank_died \(3\): .*rank 1"):
            load.run(running.url, None, Load(3, 16, 8000, concurrency=3, warmup=0))
        killer.join()


def test_nobody_there():
    with pytest.raises(EngineError, match=r"ConnectError.*start it with `phalanx serve`"):
        load.run("http://127.0.0.1:9", None, Load(1, 1, 1, concurrency=1))


def test_against_the_offline_figure(served, tmp_path):
    file = tmp_path / "offline.json"
    row = {"requests": 4, "input_len": 16, "output_len": 8, "output_tok_s": 100.0, "roof_tok_s": 1000.0}
    file.write_text(json.dumps({"results": [{"requests": 4, "input_len": 16, "output_len": 8}, {**row, "requests": 5}, row]}))
    figures = load.run(served.url, None, Load(4, 16, 8, concurrency=4), file)["results"]
    assert figures["fraction_of_offline"] == pytest.approx(figures["output_tok_s"] / 100)
    assert figures["fraction_of_roof"] == pytest.approx(figures["output_tok_s"] / 1000)
    with pytest.raises(OptionError, match=r"it has no batch-9x16x8; make one"):
        load.offline_row(file, Load(9, 16, 8, concurrency=4))
    with pytest.raises(OptionError, match="all have as many tokens"):
        load.offline_row(file, Load(8, 16, 12, concurrency=4, length_range=0.8))


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"results": {"completed": 1}}', '{"results": [{"a": 1}]}'])
def test_an_offline_report_that_is_none(text, tmp_path):
    file = tmp_path / "offline.json"
    if text is not None:
        file.write_text(text)
    why = "No such file or directory" if text is None else "it is not a report of `phalanx bench throughput` or `all`"
    with pytest.raises(OptionError) as error:
        load.offline_row(file, Load(9, 16, 8, concurrency=4))
    cure = "make one with `phalanx bench throughput --workload batch-9x16x8 --json FILE`"
    assert str(error.value) == f"the offline report {file} cannot be used; {why}; {cure}"

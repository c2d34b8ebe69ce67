# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one server: where requests go, real replicas over HTTP, and one that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal

import msgspec
import openai
import pytest

from phalanx import LLM, SamplingParams
from phalanx.config import EngineOptions
from phalanx.engine.messages import EngineFacts, RankFacts, RequestUpdate, Stats
from phalanx.errors import CapacityError, EngineClosed, EngineError, LayoutError, OptionError
from phalanx.hardware.nvml import Gpu
from phalanx.hardware.probe import Machine
from phalanx.layout import Layout
from phalanx.serve import replicas
from phalanx.serve.replicas import CHUNK_TOKENS, ReplicaChoice, ReplicatedEngineClient
from tests.support.checkpoints import write_checkpoint
from tests.support.serve_processes import MODEL, rank_server, until

pytestmark = pytest.mark.usefixtures("forked_python")

PROMPTS = [f"What does rank {number} hold?" for number in range(6)]


def test_the_least_busy_replica_takes_a_request():
    choice = ReplicaChoice(3, 10_000)
    assert [_placed(choice, [number] * 10) for number in range(4)] == [0, 1, 2, 0]
    choice.end(1, 10)
    assert choice.choose([9] * 10, range(3)) == 1
    choice.grow(1, 500)
    assert choice.choose([9] * 10, range(3)) == 2
    assert choice.choose([9] * 10, [0]) == 0  # the only one that is left
    choice.end(1, 500)
    assert choice.tokens == [20, 0, 10]


def test_a_prefix_leads_to_its_cache_unless_there_is_much_to_do():
    choice = ReplicaChoice(2, 10_000)
    shared = list(range(4 * CHUNK_TOKENS))
    assert _placed(choice, [*shared, 1, 2, 3]) == 0
    choice.end(0, len(shared) + 3)
    assert _placed(choice, [7] * 30) == 0  # equal: the first
    assert choice.choose([*shared, 4, 5], range(2)) == 0  # 30 tokens to do, and 256 that need not be computed
    choice.grow(0, 5 * CHUNK_TOKENS)
    assert choice.choose([*shared, 4, 5], range(2)) == 1
    other = [shared[0] + 1, *shared[1:]]
    assert choice.choose(other, range(2)) == 1


def test_prefixes_are_forgotten_with_the_cache():
    choice = ReplicaChoice(2, 2 * CHUNK_TOKENS)
    first, second = list(range(2 * CHUNK_TOKENS)), list(range(1000, 1000 + 2 * CHUNK_TOKENS))
    for prompt in (first, second):
        choice.begin(1, prompt)
        choice.end(1, len(prompt))
    assert choice.choose(second, range(2)) == 1
    assert choice.choose(first, range(2)) == 0


def _placed(choice: ReplicaChoice, prompt: list[int]) -> int:
    replica = choice.choose(prompt, range(len(choice.tokens)))
    choice.begin(replica, prompt)
    return replica


def test_facts_and_counters_of_all():
    ranks = [RankFacts(rank, 0, "cpu", (0, 2)) for rank in (0, 1)]
    facts = EngineFacts("m", "fp32", "cpu", Layout(tp=2), 100, 8, 64, 16, 50, 800, 300, [1], ranks, phases={"load": 2.0})
    merged = replicas.merged_facts([facts, facts])
    assert merged.layout == Layout(tp=2, replicas=2)
    assert (merged.max_batch_size, merged.num_blocks, merged.max_seq_len) == (16, 100, 100)
    assert [rank.rank for rank in merged.ranks] == [0, 1]
    one = Stats(running=1, prompt_tokens=5, rank_bytes={0: {"kv": 1}, 1: {"kv": 2}}, ran={"eager/steps": 3})
    both = replicas.merged_stats([one, one])
    assert (both.running, both.prompt_tokens, both.ran) == (2, 10, {"eager/steps": 6})
    assert both.rank_bytes == {0: {"kv": 1}, 1: {"kv": 2}, 2: {"kv": 1}, 3: {"kv": 2}}
    assert both.dp_running == []
    one, other = Stats(accepted_tokens=[3, 1], wrong_head=1), Stats(accepted_tokens=[2, 0], wrong_head=1)
    drafts = replicas.merged_stats([one, other, Stats()])
    assert (drafts.accepted_tokens, drafts.wrong_head) == ([5, 1], 1)


def test_lists_of_all_and_ranks_behind_a_replica_that_has_failed():
    stats = Stats(
        rank_bytes={0: {"kv": 1}, 1: {"kv": 2}}, rank_gauges={0: {"watts": 5.0}, 1: {"watts": 6.0}}, dp_running=[3, 2],
        dp_blocks_referenced=[7, 8],
    )  # fmt: skip
    failed = msgspec.structs.replace(stats, rank_gauges={})
    both = replicas.merged_stats([failed, stats])
    assert both.rank_gauges == {2: {"watts": 5.0}, 3: {"watts": 6.0}}
    assert (both.dp_running, both.dp_blocks_referenced) == ([3, 2, 3, 2], [7, 8, 7, 8])


def test_host_memory_is_of_the_host(monkeypatch):
    shares = []

    async def start(options, number):
        shares.append(options.kv_host_memory)
        return ScriptedReplica()

    monkeypatch.setattr(replicas, "free_host_memory", lambda: 900)
    for memory in (0, 800, "auto"):
        options = EngineOptions(model="demo", device="cpu", replicas=3, kv_host_memory=memory)
        asyncio.run(ReplicatedEngineClient.start(options, start))
    assert shares == [0] * 3 + [266] * 3 + [150] * 3


def test_host_memory_that_only_a_part_of_the_replicas_can_have_is_refused_before_any_starts(monkeypatch):
    monkeypatch.setattr(replicas, "free_host_memory", lambda: 900)
    options = EngineOptions(model="demo", device="cpu", replicas=2, kv_host_memory=1400)  # 700 each, and 810 may be used
    with pytest.raises(CapacityError, match=r"kv_host_memory=1,400 does not fit .* 900 bytes are available"):
        asyncio.run(ReplicatedEngineClient.start(options, lambda options, number: pytest.fail(f"replica {number} starts")))


class ScriptedReplica:
    """The parts of an `EngineProcessClient` that `ReplicatedEngineClient` uses. Its requests end after one update, or with
    `error`."""

    def __init__(self, error: EngineError | None = None) -> None:
        self.facts = EngineFacts("m", "fp32", "cpu", Layout(), 100, 8, 64, 16, 50, 800, 300, [1])
        self.latest, self.failure, self.error = Stats(), None, error
        self.requests, self.left = 0, 0

    def on_failure(self, callback):
        pass

    async def add(self, request_id, token_ids, params, *, coalesce=False):
        self.requests += 1
        if self.error is not None:
            raise self.error
        try:
            while True:
                yield RequestUpdate(request_id, [5])
        finally:
            self.left += 1

    def latest_by_replica(self):
        return [self.latest]

    async def close(self, timeout=10.0):
        self.failure = EngineClosed("the engine was shut down")


def test_a_replica_that_has_failed_has_no_adapters():
    both = [ScriptedReplica(), ScriptedReplica()]
    for each in both:
        each.latest = Stats(running=2, adapters_running={"a": 1}, adapters_waiting={"a": 1}, adapters_in_slots=["a"])
    both[0].failure = EngineClosed("it has ended")
    failed, alive = ReplicatedEngineClient(both).latest_by_replica()
    assert (failed.adapters_running, failed.adapters_waiting, failed.adapters_in_slots) == ({}, {}, [])
    assert alive.adapters_in_slots == ["a"]


def test_leaving_a_stream_early_aborts_at_once():
    async def run():
        engine = ReplicatedEngineClient([ScriptedReplica()])
        async with contextlib.aclosing(engine.add("r", [1], SamplingParams())) as updates:
            await anext(updates)
        assert engine._engines[0].left == 1

    asyncio.run(run())


def test_an_error_of_a_replica_that_lives_is_not_tried_again():
    async def run():
        engine = ReplicatedEngineClient([ScriptedReplica(EngineError("no"))])
        with pytest.raises(EngineError, match="no"):
            await anext(engine.add("r", [1], SamplingParams()))
        assert engine._engines[0].requests == 1

    asyncio.run(run())


def test_after_it_is_closed_every_call_says_so():
    async def run():
        engine = ReplicatedEngineClient([ScriptedReplica(), ScriptedReplica()])
        await engine.close()
        for call in (lambda: anext(engine.add("r", [1], SamplingParams())), engine.stats, engine.experts_by_replica):
            with pytest.raises(EngineClosed):
                await call()

    asyncio.run(run())


def test_each_replica_has_gpus_of_its_own(monkeypatch):
    gpus = tuple(Gpu(number, f"GPU-{number}", "H200", 90, 1 << 37, 1 << 37) for number in range(4))
    machine = Machine(gpus, 1 << 38, 1 << 38, 8)
    monkeypatch.setattr("phalanx.hardware.probe.detect_machine", lambda: machine)
    options = EngineOptions.of(model="m", replicas=2, tensor_parallel_size=2)
    first, second = {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}, {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3"}
    assert replicas.gpus_of_replicas(options) == [first, second]
    with pytest.raises(LayoutError, match=r"replicas 3 x 2 ranks = 6 ranks need one GPU each; this host has 4"):
        replicas.gpus_of_replicas(options.model_copy(update={"replicas": 3}))
    with pytest.raises(OptionError, match="nnodes=2"):
        replicas.gpus_of_replicas(options.model_copy(update={"nnodes": 2}))
    assert replicas.gpus_of_replicas(options.model_copy(update={"device": "cpu"})) == [None, None]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("replicas"), "llama", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def served(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("served")
    with rank_server(folder, model, "--replicas", "2") as running:
        yield running.wait_ready()


def test_both_answer_and_say_what_one_says(served, model):
    """Twelve requests at once, to two replicas; greedy and drawn answers are those of one engine."""
    params = [SamplingParams(max_tokens=20, temperature=0.0), SamplingParams(max_tokens=20, seed=5)]
    with LLM(model, device="cpu") as llm:
        expected = [[output.outputs[0].text for output in llm.generate(PROMPTS, each, use_tqdm=False)] for each in params]

    async def all_at_once() -> list[str]:
        async with served.async_openai() as client:
            requests = [
                client.completions.create(model=MODEL, prompt=prompt, max_tokens=20, **fields)
                for fields in ({"temperature": 0}, {"seed": 5}) for prompt in PROMPTS
            ]  # fmt: skip
            return [response.choices[0].text for response in await asyncio.gather(*requests)]

    assert asyncio.run(all_at_once()) == [text for texts in expected for text in texts]
    text = _metrics(served)
    for replica in (0, 1):
        assert f'phalanx:engine_up{{engine="{replica}",model_name="tiny"}} 1.0' in text
        assert _of(text, "generation_tokens_total", replica) >= 60
        assert f'phalanx:rank_memory_bytes{{engine="{replica}",kind="weights",model_name="tiny",rank="0"}}' in text
    assert len(re.findall("^# TYPE phalanx:num_requests_running ", text, re.MULTILINE)) == 1
    assert {"phalanx engine 0", "phalanx engine 1"} <= {process.cmdline()[0].strip() for process in served.tree}


def test_one_dies_and_the_other_serves_on(served):
    """Streams of the dead one end with an error that says why; the other's go on, and so do new requests, of either prefix."""

    async def streams() -> tuple[int, list[str]]:
        async with served.async_openai() as client:
            fields = {"model": MODEL, "max_tokens": 800, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
            open_streams = [await client.completions.create(prompt=prompt, **fields) for prompt in PROMPTS[:4]]
            firsts = asyncio.gather(*(anext(stream) for stream in open_streams))
            await firsts
            ranks = [process for process in served.tree if process.cmdline()[0].strip() == "phalanx rank 0"]
            doomed = next(process for process in ranks if "engine 1" in process.parent().cmdline()[0])
            # Two each, unless one replica was slower at first: then it has fewer tokens of output, and gets the third as well.
            running = int(_of(await asyncio.to_thread(_metrics, served), "num_requests_running", 1))
            os.kill(doomed.pid, signal.SIGKILL)

            async def error_of(stream: openai.AsyncStream[openai.types.Completion]) -> str:
                try:
                    async for _ in stream:
                        pass
                except openai.APIError as error:
                    return str(error)
                return ""

            return running, await asyncio.gather(*map(error_of, open_streams))

    running, ends = asyncio.run(streams())
    errors = [error for error in ends if error]
    assert len(errors) == running
    assert 1 <= running <= 3
    assert all("rank 0" in error for error in errors)
    with served.http() as http:
        assert http.get("/ready").status_code == 200
    until(lambda: 'phalanx:engine_up{engine="1",model_name="tiny"} 0.0' in _metrics(served))
    assert _of(_metrics(served), "generation_tokens_total", 1) >= 60, "counters do not fall"
    with served.openai() as client:
        for prompt in PROMPTS:
            assert client.completions.create(model=MODEL, prompt=prompt, max_tokens=5).choices[0].text
    assert "replica 1 of 2 has failed; 1 serve on" in served.log


def test_the_last_one_ends_the_server(served):
    survivor = next(p for p in served.tree if p.is_running() and p.cmdline() and p.cmdline()[0].strip() == "phalanx rank 0")
    os.kill(survivor.pid, signal.SIGKILL)
    served.gone()
    assert served.process.returncode == 1
    assert "replica 0 of 2 has failed; 0 serve on" in served.log


def test_a_replica_that_cannot_start_ends_all(tmp_path):
    with pytest.raises(Exception, match="nowhere"), LLM(tmp_path / "nowhere", replicas=2, skip_tokenizer_init=True):
        pass


def _metrics(served) -> str:
    with served.http() as http:
        return http.get("/metrics").text


def _of(text: str, stem: str, replica: int) -> float:
    return float(re.search(rf'^phalanx:{stem}{{engine="{replica}",model_name="tiny"}} (.*)$', text, re.MULTILINE)[1])

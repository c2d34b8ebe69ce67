# SPDX-License-Identifier: Apache-2.0
"""One prompt becomes completions with text, over the fake engine."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing

import pytest

from phalanx.config import SamplingParams
from phalanx.engine.messages import RequestUpdate
from phalanx.errors import PromptTooLong, RankDied, RequestError
from phalanx.serve.completions import MAX_BURST, _delta, stream_completions
from phalanx.serve.detokenize import Detokenizer
from phalanx.serve.fake_client import FakeEngineClient, fake_facts
from phalanx.serve.outputs import RequestOutput
from phalanx.serve.tokenizer import Tokenizer
from phalanx.serve.update_stream import _first_of
from tests.support.serve_small_tokenizers import byte_level, write

TEXT = "hello world, 你好 🙂 the end. hello again"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(write(tmp_path_factory.mktemp("tokenizer"), byte_level()))


@pytest.fixture
def engine(tokenizer):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    return FakeEngineClient(lambda add: itertools.cycle(ids), facts=fake_facts(eos_token_ids=[tokenizer.eos_token_id]))


async def collect(engine, tokenizer, params, prompt=(1, 2, 3)):
    output = RequestOutput.empty("r", None, prompt, params.n)
    deltas = []
    async with aclosing(stream_completions(engine, tokenizer, "r", list(prompt), params)) as parts:
        async for delta in parts:
            deltas.append(delta)
            output.add(delta)
    return output, deltas


def ask(engine, tokenizer, params, prompt=(1, 2, 3)):
    return asyncio.run(collect(engine, tokenizer, params, prompt))


def test_text_and_tokens(engine, tokenizer):
    count = len(tokenizer.encode(TEXT, add_special_tokens=False))
    output, deltas = ask(engine, tokenizer, SamplingParams(max_tokens=count))
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason, output.finished) == (TEXT, "length", None, True)
    assert completion.token_ids == tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(deltas) == count
    assert engine.aborted == []


def test_a_stop_string_ends_here_and_in_the_engine(engine, tokenizer):
    output, _ = ask(engine, tokenizer, SamplingParams(max_tokens=1000, stop=["好 ", "zzz"], logprobs=0))
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hello world, 你", "stop", "好 ")
    assert tokenizer.decode(completion.token_ids).startswith("hello world, 你好 ")
    assert len(completion.logprobs) == len(completion.token_ids)
    assert completion.cumulative_logprob == -len(completion.token_ids)
    assert engine.aborted == ["r-0"]


def test_drafts_behind_a_stop_string_are_not_counted(tokenizer):
    """They came in one row with it: usage must not tell of more drafts that were accepted than of tokens."""
    params, ids = SamplingParams(stop=["好 "]), tokenizer.encode(TEXT, add_special_tokens=False)
    delta = _delta(RequestUpdate("r", ids, accepted=len(ids) - 1), Detokenizer(tokenizer, params), params, 0)
    assert delta.text == "hello world, 你"
    assert 0 < delta.accepted == len(delta.token_ids) < len(ids) - 1
    rest = RequestUpdate("r", [*ids], accepted=5)
    first = _first_of(rest, 3)
    assert (first.accepted, rest.accepted) == (3, 2)


@pytest.mark.parametrize(("keep", "text"), [(False, "hello"), (True, "hello world")])
def test_a_stop_token_is_seen_only_on_request(engine, tokenizer, keep, text):
    world = tokenizer.encode("hello world", add_special_tokens=False)[1]
    output, _ = ask(engine, tokenizer, SamplingParams(stop_token_ids=[world], include_stop_str_in_output=keep))
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason, completion.token_ids[-1]) == (
        text,
        "stop",
        world,
        world,
    )


def test_n_completions_have_their_own_seeds(engine, tokenizer):
    output, deltas = ask(engine, tokenizer, SamplingParams(n=3, max_tokens=4, seed=2**63 - 2, prompt_logprobs=1))
    assert [len(completion.token_ids) for completion in output.outputs] == [4, 4, 4]
    assert [add.request_id for add in engine.added] == ["r-0", "r-1", "r-2"]
    assert [add.params.seed for add in engine.added] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [add.params.prompt_logprobs for add in engine.added] == [1, None, None]
    assert [add.params.n for add in engine.added] == [1, 1, 1]
    assert len(output.prompt_logprobs) == 3
    assert {delta.index for delta in deltas[:6]} == {0, 1, 2}  # side by side


def test_leaving_early_aborts_what_still_runs(engine, tokenizer):
    async def leave():
        async with aclosing(stream_completions(engine, tokenizer, "r", [1], SamplingParams(n=3, max_tokens=100))) as parts:
            async for _ in parts:
                break
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert sorted(engine.aborted) == [add.request_id for add in engine.added] != []


def test_no_tokenizer_or_no_detokenization(engine, tokenizer):
    for output, _ in (
        ask(engine, None, SamplingParams(max_tokens=3)),
        ask(engine, tokenizer, SamplingParams(detokenize=False, max_tokens=3)),
    ):
        assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 3)


def test_refusals_and_failures_are_raised(engine, tokenizer):
    with pytest.raises(PromptTooLong, match=r"1024 tokens .*max_seq_len is 1024"):
        ask(engine, tokenizer, SamplingParams(), [1] * 1024)
    with pytest.raises(RequestError, match=r"token 1000 in prompt is unknown.*0\.\.999"):
        ask(engine, tokenizer, SamplingParams(n=2), [1000])
    engine.delay = 0.05
    error = RankDied("rank 3 ran a step", held="it was killed by SIGKILL")

    async def lose():
        asyncio.get_running_loop().call_later(0.1, engine.fail, error)
        await collect(engine, tokenizer, SamplingParams(n=2, max_tokens=500))

    with pytest.raises(RankDied, match="rank 3"):
        asyncio.run(lose())


def test_abort_ends_the_stream(engine, tokenizer):
    async def run():
        asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(engine.abort, ["r-0"]))
        return await collect(engine, tokenizer, SamplingParams(max_tokens=500))

    output, _ = asyncio.run(run())
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) < 500


def test_completions_begin_one_by_one(engine, tokenizer, monkeypatch):
    """One in each iteration of the event loop, in which streams go on: each sends its whole prompt to the engine."""
    iteration, began = 0, []
    add = engine.add

    def counted(*args, **more):
        began.append(iteration)
        return add(*args, **more)

    async def count():
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    async def run():
        counting = asyncio.create_task(count())
        _, deltas = await collect(engine, tokenizer, SamplingParams(n=7, max_tokens=2, ignore_eos=True))
        counting.cancel()
        return deltas

    monkeypatch.setattr(engine, "add", counted)
    assert {delta.index for delta in asyncio.run(run())} == set(range(7))
    assert len(set(began)) == len(began) == 7


def test_deltas_that_wait_are_read_in_bursts_between_which_others_run(engine, tokenizer):
    """A client that did not read leaves thousands of deltas of its completions here: they held up every stream for a second."""
    n, tokens, turns = 4, 200, 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run():
        params = SamplingParams(n=n, max_tokens=tokens, ignore_eos=True, logprobs=0)
        async with aclosing(stream_completions(engine, tokenizer, "r", [1, 2, 3], params)) as parts:
            count = len((await anext(parts)).token_ids)
            await asyncio.sleep(0.5)  # nobody reads
            task = asyncio.create_task(others())
            longest = unbroken = latest = 0
            async for delta in parts:
                unbroken = unbroken + 1 if turns == latest else 0
                latest, longest, count = turns, max(longest, unbroken), count + len(delta.token_ids)
            task.cancel()
        return longest, count

    longest, count = asyncio.run(run())
    assert count == n * tokens
    assert longest <= MAX_BURST

# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions` with the official client: what is streamed is what is whole."""

from __future__ import annotations

import asyncio

import openai
import pytest

from phalanx.serve.openai import completions
from phalanx.serve.openai.logprobs import prompt_logprobs
from phalanx.serve.openai.schema.responses import CompletionResponse
from tests.serve.openai.conftest import TEXT
from tests.support.serve_http_app import MODEL, Scripted, live, tokenizer_of

TOKENS = tokenizer_of().encode(TEXT, add_special_tokens=False)


def stream_of(client, **fields):
    chunks = list(client.completions.create(model=MODEL, stream=True, **fields))
    for chunk in chunks:
        CompletionResponse.model_validate(chunk.to_dict())
    return chunks


def test_whole_answer(client):
    answer = client.completions.create(model=MODEL, prompt="What?", max_tokens=100)
    CompletionResponse.model_validate(answer.to_dict())
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    prompt = len(tokenizer_of().encode("What?"))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len(TOKENS) + 1)
    assert answer.usage.total_tokens == prompt + len(TOKENS) + 1


def test_sixteen_tokens_by_default(client):
    answer = client.completions.create(model=MODEL, prompt="What?")
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 16)


def test_streamed_text_is_the_whole_text(client):
    chunks = stream_of(client, prompt="What?", max_tokens=100, stream_options={"include_usage": True})
    assert "".join(c.choices[0].text for c in chunks[:-1]) == TEXT
    assert all("\ufffd" not in c.choices[0].text for c in chunks[:-1])
    assert len(chunks) > 10
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(TOKENS) + 1
    assert all(c.usage is None for c in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-2:] == [None, "stop"]


@pytest.mark.parametrize("stop", ["wör", "🙃", "is a", [" rank", "this is"], "你好", "d 🙂"])
def test_stop_strings_cross_tokens(client, stop):
    first = min(TEXT.index(one) for one in ([stop] if isinstance(stop, str) else stop))
    choice = client.completions.create(model=MODEL, prompt="x", max_tokens=100, stop=stop).choices[0]
    assert choice.text == TEXT[:first]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason in ([stop] if isinstance(stop, str) else stop)
    chunks = stream_of(client, prompt="x", max_tokens=100, stop=stop)
    assert "".join(c.choices[0].text for c in chunks) == choice.text
    assert client.completions.create(
        model=MODEL, prompt="x", max_tokens=100, stop=stop, extra_body={"include_stop_str_in_output": True}
    ).choices[0].text == TEXT[:first] + choice.stop_reason  # fmt: skip


@pytest.mark.parametrize("stop", ["wör", "rank"])
def test_a_stop_string_aborts_what_runs(server, client, stop):
    before = len(server.engine.aborted)
    client.completions.create(model=MODEL, prompt="x", max_tokens=100, stop=stop)
    assert len(server.engine.aborted) == before + 1


def test_every_cut_by_max_tokens(client):
    for limit in range(1, len(TOKENS) + 1):
        choice = client.completions.create(model=MODEL, prompt="x", max_tokens=limit).choices[0]
        assert choice.text == tokenizer_of().decode(TOKENS[:limit])
        assert "".join(c.choices[0].text for c in stream_of(client, prompt="x", max_tokens=limit)) == choice.text


def test_many_prompts_and_n(client):
    answer = client.completions.create(model=MODEL, prompt=["a", "bb", "ccc"], n=2, max_tokens=2, echo=True)
    assert [c.index for c in answer.choices] == list(range(6))
    begin = tokenizer_of().decode(TOKENS[:2])
    assert [c.text for c in answer.choices] == [p + begin for p in ("a", "a", "bb", "bb", "ccc", "ccc")]
    chunks = stream_of(client, prompt=["a", "bb"], n=2, max_tokens=3)
    texts = {i: "".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in range(4)}
    assert set(texts.values()) == {tokenizer_of().decode(TOKENS[:3])}


def test_token_ids(server, client):
    client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=1)
    assert server.engine.added[-1].token_ids == [5, 6, 7]
    answer = client.completions.create(model=MODEL, prompt=[[5], [6, 7]], max_tokens=1)
    assert len(answer.choices) == 2
    with pytest.raises(openai.BadRequestError, match="outside of this model's vocabulary"):
        client.completions.create(model=MODEL, prompt=[10**6], max_tokens=1)


def test_seeds_of_n(server, client):
    client.completions.create(model=MODEL, prompt="x", n=3, seed=7, max_tokens=1)
    assert sorted(add.params.seed for add in server.engine.added[-3:]) == [7, 8, 9]
    client.completions.create(model=MODEL, prompt="x", n=2, seed=2**63 - 1, max_tokens=1)
    assert sorted(add.params.seed for add in server.engine.added[-2:]) == [-(2**63), 2**63 - 1]
    with pytest.raises(openai.BadRequestError, match="seed"):
        client.completions.create(model=MODEL, prompt="x", seed=2**63, max_tokens=1)


def test_logprobs(client):
    choice = client.completions.create(model=MODEL, prompt="x", max_tokens=4, logprobs=1).choices[0]
    texts = [tokenizer_of().token_text(token) for token in TOKENS[:4]]
    assert choice.logprobs.tokens == texts
    assert choice.logprobs.token_logprobs == [-1.0] * 4
    assert choice.logprobs.top_logprobs == [{text: -1.0} for text in texts]
    assert choice.logprobs.text_offset == [sum(map(len, texts[:i])) for i in range(4)]
    chunks = stream_of(client, prompt="x", max_tokens=4, logprobs=1)
    assert [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens] == texts
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=4, logprobs=0).choices[0].logprobs.top_logprobs is None


def test_scoring_a_prompt(client):
    """echo with max_tokens 0: the prompt's own logprobs and not a token more; for each of n."""
    answer = client.completions.create(model=MODEL, prompt="a rank", max_tokens=0, echo=True, logprobs=0, n=2)
    prompt = tokenizer_of().encode("a rank")
    for choice in answer.choices:
        assert choice.text == "a rank"
        assert choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs == [None] + [-1.0] * (len(prompt) - 1)
        assert choice.logprobs.text_offset[1] == 0  # the begin token has no text of its own
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 0)


SMILES = "a 😀 rank 你🙂"


def assert_offsets(choice, *, shown=lambda text: True):
    """Each complete token that is shown is in the text at its offset, and tokens of one character share one."""
    offsets = choice.logprobs.text_offset
    assert offsets == sorted(offsets)
    for text, offset in zip(choice.logprobs.tokens, offsets, strict=True):
        if "�" in text:
            assert not choice.text[offset : offset + 1].isascii()
        elif shown(text):
            assert choice.text[offset : offset + len(text)] == text


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_characters_of_several_tokens(stream):
    with live(Scripted(SMILES)) as served, served.openai() as client:
        request = {"model": MODEL, "prompt": SMILES, "max_tokens": 40, "echo": True, "logprobs": 0}
        choice = client.completions.create(**request).choices[0]
        assert choice.text == SMILES * 2
        assert_offsets(choice, shown=lambda text: text not in ("<s>", "</s>"))
        assert choice.logprobs.text_offset[choice.logprobs.tokens.index(" rank")] == SMILES.index(" rank")
        if stream:
            chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**request, stream=True)]
            assert [offset for one in chunks if one for offset in one.text_offset] == choice.logprobs.text_offset


@pytest.mark.parametrize("skip", [True, False])
def test_offsets_of_echoed_token_ids(client, skip):
    prompt = tokenizer_of().encode("a</s> rank</s>b")
    choice = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, echo=True, logprobs=0, extra_body={"skip_special_tokens": skip}
    ).choices[0]
    assert choice.text.startswith("a rankb" if skip else "<s>a</s> rank</s>b")
    assert_offsets(choice, shown=lambda text: not skip or text not in ("<s>", "</s>"))


def test_a_truncated_prompt_is_echoed_as_far_as_it_is_kept(client):
    ids = tokenizer_of().encode("hello world, a</s> rank", add_special_tokens=False)
    for prompt in ("hello world, a</s> rank", ids):
        body = {"truncate_prompt_tokens": 3, "skip_special_tokens": False}
        choice = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=2, echo=True, logprobs=0, extra_body=body
        ).choices[0]
        kept = tokenizer_of().decode(ids[-3:], skip_special_tokens=False)
        assert choice.text.startswith(kept)
        assert choice.logprobs.tokens[:3] == [tokenizer_of().token_text(token) for token in ids[-3:]]
        assert_offsets(choice)
    choice = client.completions.create(
        model=MODEL, prompt="a rank", max_tokens=1, echo=True, logprobs=0, extra_body={"truncate_prompt_tokens": 100}
    ).choices[0]
    assert choice.text.startswith("a rank")
    assert_offsets(choice, shown=lambda text: text != "<s>")


def test_offsets_of_a_text_with_special_tokens(client):
    choice = client.completions.create(model=MODEL, prompt="a</s> rank</s>b", max_tokens=2, echo=True, logprobs=0).choices[0]
    assert choice.text.startswith("a</s> rank</s>b")
    assert choice.logprobs.tokens[0] == "<s>"
    assert choice.logprobs.text_offset[:2] == [0, 0]
    assert_offsets(choice, shown=lambda text: text != "<s>")


def test_fields_reach_the_engine(server, client):
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    client.completions.create(
        model=MODEL, prompt="x", max_tokens=3, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1, seed=3,
        logit_bias={"7": -5}, user="me", best_of=1, suffix="", extra_body=extra,
    )  # fmt: skip
    params = server.engine.added[-1].params
    for name, value in {**extra, "temperature": 0.5, "top_p": 0.9, "presence_penalty": 1, "seed": 3, "logit_bias": {7: -5}}.items():
        assert getattr(params, name) == value, name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 3}, "best_of=3 is not supported"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
        ({"prompt": ""}, None),  # the begin token makes it a prompt
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"temperature": 2.5}, "temperature"),
        ({"extra_body": {"min_tokens": 20, "max_tokens": 2}}, "min_tokens"),
        ({"extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"extra_body": {"guided_regex": "a", "guided_json": {}}}, "exclude each other"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
    ],
)
def test_what_is_rejected(client, fields, message):
    fields = {"model": MODEL, "prompt": "x", "max_tokens": 1, **fields}
    if message is None:
        client.completions.create(**fields)
        return
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.completions.create(**fields)
    assert set(error.value.body) == {"message", "type", "param", "code"}


def test_async_client(server):
    async def ask() -> list[str]:
        async with server.async_openai() as client:

            async def one(i: int) -> str:
                stream = await client.completions.create(model=MODEL, prompt=f"{i}", max_tokens=100, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(20)))

    assert asyncio.run(ask()) == [TEXT] * 20


@pytest.mark.parametrize("prompt", [[5] * 8, [5] * 600])
def test_completions_share_the_scores_of_their_prompt(server, client, monkeypatch, prompt):
    """They are encoded once, and each choice has them."""
    encoded = []
    monkeypatch.setattr(completions, "prompt_logprobs", lambda *args: encoded.append(prompt_logprobs(*args)) or encoded[-1])
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, n=3, extra_body={"prompt_logprobs": 1})
    first, *others = [choice.to_dict()["prompt_logprobs"] for choice in answer.choices]
    assert (len(first), first[0]) == (len(prompt), None)
    assert others == [first, first]
    assert len(encoded) == 1


@pytest.mark.parametrize("n", [1, 2])
def test_scores_come_with_a_first_token_whose_text_comes_later(client, n):
    fields = {"n": n, "stop": TEXT[:20] + "never", "extra_body": {"prompt_logprobs": 1}}  # all text may be the stop's beginning
    answer = client.completions.create(model=MODEL, prompt=[5] * 8, max_tokens=4, **fields)
    assert [len(choice.to_dict()["prompt_logprobs"]) for choice in answer.choices] == [8] * n
    assert [choice.text for choice in answer.choices] == [tokenizer_of().decode(TOKENS[:4])] * n


def test_an_echo_with_scores_in_a_stream_with_the_usage_so_far(client):
    """Its first event is long: it comes in parts, and is the same event."""
    fields = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    stream = client.completions.create(
        model=MODEL, prompt=[5] * 600, max_tokens=3, echo=True, logprobs=1, stream=True, extra_body=fields
    )
    chunks = list(stream)
    assert all(chunk.usage is not None for chunk in chunks)
    assert sum(len(choice.logprobs.tokens) for chunk in chunks for choice in chunk.choices if choice.logprobs) == 603

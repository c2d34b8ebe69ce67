# SPDX-License-Identifier: Apache-2.0
"""`/v1/messages` with the official client over a scripted engine: streams, tools, thinking, counts and errors."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from phalanx.serve.anthropic.schema import MessageEvent, MessageObject, MessagesErrorResponse, TokenCount
from tests.support.serve_http_app import HERMES_TEMPLATE, MODEL, Scripted, live
from tests.support.serve_reasoning import OSLO, THINKS, THOUGHT, served

pytestmark = pytest.mark.usefixtures("forked_python")

USER = {"role": "user", "content": "What?"}
WEATHER = {
    "name": "weather", "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'


@contextmanager
def asking(url, **more):
    import anthropic

    with anthropic.Anthropic(base_url=url, **{"api_key": "none", "max_retries": 0, "timeout": 60, **more}) as client:
        yield client


@contextmanager
def scripted(text, **options):
    with live(Scripted(text, delay=0), template=HERMES_TEMPLATE, **options) as server, asking(server.url) as client:
        yield server, client


def ask(client, **fields):
    answer = client.messages.create(**{"model": MODEL, "max_tokens": 300, "messages": [USER], **fields})
    MessageObject.model_validate(answer.to_dict())
    return answer


def streamed(client, **fields):
    """The message that the client assembles of a stream, and its events."""
    events = list(client.messages.create(**{"model": MODEL, "max_tokens": 300, "messages": [USER], **fields}, stream=True))
    for event in events:
        MessageEvent.model_validate(event.to_dict())
    with client.messages.stream(**{"model": MODEL, "max_tokens": 300, "messages": [USER], **fields}) as stream:
        return stream.get_final_message(), events


def blocks(message):
    return [{key: value for key, value in block.to_dict().items() if key not in ("signature", "id")} for block in message.content]


def prompt_of(server):
    """The last prompt that the engine got, as text."""
    return server.engine.tokenizer.decode(server.engine.added[-1].token_ids, skip_special_tokens=False)


def test_a_text_whole_and_streamed():
    with scripted("Hello wörld.") as (server, client):
        sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}  # that newer versions of the client have no keywords for
        answer = ask(client, system="Be brief.", stop_sequences=["zz"], extra_body=sampling)
        params = server.engine.added[-1].params
        assert {name: getattr(params, name) for name in sampling} == sampling
        assert (blocks(answer), answer.stop_reason, answer.model) == ([{"type": "text", "text": "Hello wörld."}], "end_turn", MODEL)
        assert answer.id.startswith("msg_")
        message, events = streamed(client)
        assert blocks(message) == blocks(answer)
        assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", answer.usage.output_tokens)
        kinds = [event.type for event in events]
        assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert kinds.count("content_block_delta") > 3, "as it is generated"
        assert (events[0].message.usage.input_tokens, events[0].message.content) == (message.usage.input_tokens, [])


def test_why_an_answer_ends():
    with scripted("one two three four") as (_, client):
        assert ask(client, max_tokens=3).stop_reason == "max_tokens"
        stopped = ask(client, stop_sequences=["three"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "three", "one two ")


def test_a_call_and_its_result():
    with scripted("Let me see. " + CALL) as (server, client):
        answer = ask(client, tools=[WEATHER])
        assert blocks(answer) == [
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
        ]
        assert answer.stop_reason == "tool_use"
        message, events = streamed(client, tools=[WEATHER])
        assert (blocks(message), message.stop_reason) == (blocks(answer), "tool_use")
        assert [event.index for event in events if event.type == "content_block_start"] == [0, 1]
        result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": [{"type": "text", "text": "Rain"}]}
        turns = [
            USER, {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}, {"role": "user", "content": "Well?"},
        ]  # fmt: skip
        ask(client, tools=[WEATHER], messages=turns)
        prompt = prompt_of(server)
        assert "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nLet me see.<tool_call>\n" in prompt
        assert prompt.endswith(
            "<|im_start|>tool\nRain<|im_end|>\n<|im_start|>user\nSo?\nWell?<|im_end|>\n<|im_start|>assistant\n"
        ), "two turns of the user are one message"


def test_forced_and_forbidden_calls():
    with scripted(CALL) as (server, client):
        ask(client, tools=[{**WEATHER, "name": "mcp__" + "n" * 123}])  # of a server of the client's
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            ask(client, tools=[WEATHER], tool_choice=choice)
            assert server.engine.added[-1].params.structured_output is not None
        answer = ask(client, tools=[WEATHER], tool_choice={"type": "none"})
        assert [block.type for block in answer.content] == ["text"]
        two = ask(client, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block.type for block in two.content] == ["tool_use"]
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
        ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
        assert server.engine.added[-1].params.structured_output is not None


def test_thinking():
    with served("qwen3", THINKS["qwen3"] + "It rains.") as (server, _), asking(server.url) as client:
        answer = ask(client, thinking={"type": "enabled", "budget_tokens": 1024})
        assert blocks(answer) == [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": "It rains."}]
        assert answer.content[0].signature
        message, events = streamed(client)
        assert blocks(message) == blocks(answer)
        assert message.content[0].signature
        assert {event.delta.type for event in events if event.type == "content_block_delta"} == {
            "thinking_delta", "signature_delta", "text_delta",
        }  # fmt: skip
        assert [block.type for block in ask(client, thinking={"type": "disabled"}).content] == ["text"]
        ask(client, messages=[USER, {"role": "assistant", "content": answer.content}, USER])


def test_a_last_message_of_the_assistant_goes_on():
    with scripted("world") as (server, client):
        ask(client, messages=[USER, {"role": "assistant", "content": "Hello "}])
        assert prompt_of(server).endswith("<|im_start|>assistant\nHello ")


def test_system_blocks():
    with scripted("x") as (server, client):
        parts = ["x-anthropic-billing-header: cch=1;", "Be brief.", "Be kind."]
        ask(client, system=[{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in parts])
        assert prompt_of(server).startswith("<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>")


def test_counted_tokens_are_those_of_the_prompt():
    import anthropic

    with scripted("x") as (server, client):
        fields = {"model": MODEL, "messages": [USER], "system": "Be brief.", "tools": [WEATHER]}
        count = client.messages.count_tokens(**fields)
        TokenCount.model_validate(count.to_dict())
        usage = ask(client, **fields).usage
        with pytest.raises(anthropic.BadRequestError) as raised:
            client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "x " * 9000}])
        assert raised.value.body["error"]["param"] == "messages"
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens == len(server.engine.added[-1].token_ids)


def test_errors_have_anthropics_form():
    import anthropic

    with scripted("x", api_key="k") as (server, _):
        with asking(server.url) as wrong, pytest.raises(anthropic.AuthenticationError, match="the API key is missing or wrong"):
            ask(wrong)
        with asking(server.url, api_key="k") as client:
            assert ask(client).content
            for fields, kind, message in (
                ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
                ({"max_tokens": 0}, anthropic.BadRequestError, "greater than or equal to 1"),
                ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError, "text only"),
                ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, anthropic.BadRequestError, "servers are not built"),
                ({"messages": [{"role": "user", "content": []}]}, anthropic.BadRequestError, "none has a block"),
                ({"tool_choice": {"type": "tool"}}, anthropic.BadRequestError, "tool_choice.name"),
                ({"messages": [{"role": "user", "content": "x " * 4000}]}, anthropic.BadRequestError, "max_seq_len"),
            ):  # fmt: skip
                with pytest.raises(kind) as raised:
                    ask(client, **fields)
                body = raised.value.body
                MessagesErrorResponse.model_validate(body)
                assert message in json.dumps(body), body
                assert body["request_id"] == raised.value.response.headers["x-request-id"]


def test_an_error_in_mid_stream_reaches_the_client():
    import anthropic

    from phalanx.errors import EngineError

    engine = Scripted("one two three four five six", delay=0.01)
    with live(engine, template=HERMES_TEMPLATE) as server, asking(server.url) as client:
        stream = client.messages.create(model=MODEL, max_tokens=300, messages=[USER], stream=True)
        assert [next(stream).type for _ in range(3)][-1] == "content_block_delta"
        server.on_loop(engine.fail, EngineError("rank 1 is gone"))
        with pytest.raises(anthropic.APIStatusError, match="rank 1 is gone"):
            list(stream)

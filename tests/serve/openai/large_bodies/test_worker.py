# SPDX-License-Identifier: Apache-2.0
"""A large body is answered as a small one is: each request is sent as it is, and padded with spaces beyond the limit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from phalanx.serve.openai.body import LARGE_BYTES
from phalanx.serve.openai.large_bodies import messages
from phalanx.serve.openai.large_bodies.messages import unpacked
from tests.support.serve_http_app import HERMES_TEMPLATE, MODEL, Live, Scripted, live, tokenizer_of

CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PADDING = " " * (LARGE_BYTES + 1)
VARYING = {"id", "created", "created_at", "completed_at", "usage", "item_id", "system_fingerprint", "request_id"}

REQUESTS: dict[str, tuple[str, dict[str, object]]] = {
    "a prompt": (PLAIN, {"prompt": "one two", "max_tokens": 4}),
    "an echo": (PLAIN, {"prompt": "one two", "max_tokens": 4, "echo": True}),
    "an echo of token ids": (PLAIN, {"prompt": [5, 6, 7], "max_tokens": 2, "echo": True}),
    "prompts": (PLAIN, {"prompt": ["one", "two three"], "n": 2, "max_tokens": 4, "stop": ["z"], "logit_bias": {"5": 1.5}}),
    "lists of token ids": (PLAIN, {"prompt": [[5, 6], [7]], "max_tokens": 3, "user": "somebody"}),
    "truncated": (PLAIN, {"prompt": "one two three", "truncate_prompt_tokens": 2, "max_tokens": 2, "echo": True}),
    "a chat": (CHAT, {"messages": [USER], "max_tokens": 6, "seed": 3}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 3}),
    "tools": (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "a",
        "content": "1"}], "tools": [TOOL], "tool_choice": "auto", "max_tokens": 6}),
    "continued": (CHAT, {"messages": [USER, {"role": "assistant", "content": "On"}], "continue_final_message": True,
        "add_generation_prompt": False, "max_tokens": 3}),
    "a response": (RESPONSES, {"input": "hello", "max_output_tokens": 16, "metadata": {"a": "b"}, "instructions": "Be brief."}),
    "items": (RESPONSES, {"input": [{"role": "user", "content": "hello"}], "max_output_tokens": 16, "tools": [
        {"type": "function", **TOOL["function"]}]}),
    "a message": ("/v1/messages", {"messages": [USER], "max_tokens": 6, "system": "Be brief.", "tools": [
        {"name": "f", "input_schema": TOOL["function"]["parameters"]}]}),
    "a count": ("/v1/messages/count_tokens", {"messages": [USER], "system": "Be brief."}),
    "a message with an image": ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 6}),
    "embeddings": ("/v1/embeddings", {"input": ["one two", "three"], "dimensions": 2}),
    "documents": ("/v1/rerank", {"query": "one two", "documents": ["three", "one"], "top_n": 1}),
    "returned documents": ("/v1/rerank", {"query": "one", "documents": [{"text": "three"}, "one"], "return_documents": True}),
    "scores": ("/v1/score", {"text_1": ["one", "two"], "text_2": ["three", "one"]}),
    "a score of one with many": ("/v1/score", {"text_1": "one", "text_2": ["three", "one", "two"]}),
    "scores of lists that do not fit": ("/v1/score", {"text_1": ["one", "two"], "text_2": ["three"]}),
    "an empty text among others": ("/v1/embeddings", {"input": ["one", ""]}),
    "an empty document": ("/v1/rerank", {"query": "one", "documents": ["three", ""]}),
    "a list of tokens that is too long": ("/v1/embeddings", {"input": [[5], [5] * 3000]}),
    "a count that is too long": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "one two " * 2000}]}),
    "tokenize": ("/tokenize", {"prompt": "one two"}),
    "tokenize a chat": ("/tokenize", {"messages": [USER], "tools": [TOOL]}),
    "detokenize": ("/detokenize", {"tokens": [5, 6, 7]}),
    "another model": (PLAIN, {"model": "other", "prompt": "x"}),
    "an empty prompt": (PLAIN, {"prompt": ""}),
    "an unknown field": (CHAT, {"messages": [USER], "max_token": 1}),
    "a wrong value": (CHAT, {"messages": [USER], "temperature": 9}),
    "a token of no model": (PLAIN, {"prompt": [2_000_000]}),
    "a prompt that is too long": (PLAIN, {"prompt": [5] * 3000}),
    "a text that is too long": (PLAIN, {"prompt": "one two " * 900, "max_tokens": 7}),
    "a chat that is too long": (CHAT, {"messages": [{"role": "user", "content": "one two " * 900}], "max_tokens": 7}),
    "two formats": (CHAT, {"messages": [USER], "guided_regex": "a", "guided_json": {}}),
    "neither prompt nor messages": ("/tokenize", {}),
    "a response to nothing": (RESPONSES, {"input": "x", "previous_response_id": "resp_0"}),
    "a reference to nothing": (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_0"}]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    tokenizer = tokenizer_of(HERMES_TEMPLATE)
    with live(Scripted("Hello, this is a rank.", tokenizer=tokenizer), tokenizer=tokenizer) as running:
        yield running


def constant(value: object) -> object:
    """An answer without what differs from one to the next."""
    if isinstance(value, dict):
        return {name: constant(inner) for name, inner in value.items() if name not in VARYING}
    return [constant(inner) for inner in value] if isinstance(value, list) else value


def answers(server: Live, path: str, fields: dict[str, object]) -> list[tuple[int, object]]:
    body = json.dumps({"model": MODEL, **fields})
    with server.client() as http:
        replies = [http.post(path, content=one, headers={"content-type": "application/json"}) for one in (body, body + PADDING)]
    return [(reply.status_code, constant(reply.json())) for reply in replies]


@pytest.mark.parametrize("name", REQUESTS)
def test_it_is_answered_like_a_small_one(server, name):
    small, large = answers(server, *REQUESTS[name])
    assert large == small


def test_a_stream_and_its_prompt(server):
    path, fields = REQUESTS["tools"]
    small, large = answers(server, path, fields)
    assert small[0] == large[0] == 200
    prompts = [added.token_ids for added in server.engine.added[-2:]]
    assert prompts[0] == prompts[1]
    assert server.engine.added[-1].params == server.engine.added[-2].params


def test_it_goes_on_after_a_stored_response(server):
    with server.client() as http:
        first = http.post(RESPONSES, json={"model": MODEL, "input": "hello", "max_output_tokens": 16}).json()
    more = {"input": "and then?", "previous_response_id": first["id"], "max_output_tokens": 16}
    small, large = answers(server, RESPONSES, more)
    assert small[0] == large[0] == 200
    assert server.engine.added[-1].token_ids == server.engine.added[-2].token_ids
    item = {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "x"}]}
    small, large = answers(server, RESPONSES, {**item, "max_output_tokens": 16})
    assert small[0] == large[0] == 200
    assert server.engine.added[-1].token_ids == server.engine.added[-2].token_ids


def test_a_small_body_that_goes_on_after_much_is_a_large_one(server, monkeypatch):
    """What is stored would be decoded on the event loop."""
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * LARGE_BYTES}]}
    bodies, read = [], server.service.large_bodies.read
    monkeypatch.setattr(server.service.large_bodies, "read", lambda *args: bodies.append(args) or read(*args))
    with server.client() as http:
        create = lambda **fields: http.post(RESPONSES, json={"model": MODEL, "max_output_tokens": 16, **fields})  # noqa: E731
        first = create(input=[{"role": "user", "content": "hello"}, thoughts]).json()
        assert len(bodies) == 1
        assert create(input="more", previous_response_id=first["id"]).status_code == 200
        assert len(bodies) == 2
        output = {"type": "item_reference", "id": first["output"][0]["id"]}
        assert create(input=[output, {"role": "user", "content": "x"}]).status_code == 200
        assert len(bodies) == 2
        items = http.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
        assert create(input=[{"type": "item_reference", "id": items[0]["id"]}, {"role": "user", "content": "x"}]).status_code == 200
        assert len(bodies) == 3
        assert http.get(f"{RESPONSES}/{first['id']}").json() == first


def test_the_server_gets_no_tokens_of_a_prompt_that_is_too_long(server, monkeypatch):
    """A body has up to eight million tokens, of which the server's interpreter lock would make a list for 0.2 s."""
    numbers = []
    monkeypatch.setattr(messages, "unpacked", lambda data: numbers.append(len(data)) or unpacked(data))
    for name in ("a prompt that is too long", "a text that is too long", "a chat that is too long"):
        [_, (status, error)] = answers(server, *REQUESTS[name])
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
    assert numbers == []


def test_accepted_fields_are_counted(server):
    with server.client() as http:
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, "user": "somebody"})
        http.post(PLAIN, content=body + PADDING, headers={"content-type": "application/json"})
        assert 'CompletionRequest.user"' in http.get("/metrics").text


def test_a_rendering_that_takes_too_much_memory_is_a_400():
    """The kernel limits the process: the template of the operator's checkpoint cannot take the host's memory."""
    greed = "{{ m.content * 10**11 }}"  # no constant: those are computed as the template is compiled
    tokenizer = tokenizer_of(
        "{% for m in messages %}{{ m.content }}{% if m.content == 'more' %}" + greed + "{% endif %}{% endfor %}"
    )
    with live(Scripted("Hello.", tokenizer=tokenizer), tokenizer=tokenizer) as running, running.client() as http:
        for content, status in (("x", 200), ("more", 400), ("x", 200)):
            body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}]}) + PADDING
            reply = http.post(CHAT, content=body, headers={"content-type": "application/json"}, timeout=60)
            assert reply.status_code == status, reply.text
            assert ("of memory" in reply.text) == (status == 400)

# SPDX-License-Identifier: Apache-2.0
"""The worst bodies of each route, at the size limit or just below the size from which on another process reads them."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.serve.openai.body import MAX_BODY_BYTES
from phalanx.serve.openai.schema.completion import MAX_PROMPTS
from phalanx.serve.openai.schema.fields import MAX_N
from tests.serve.conftest import LENGTH
from tests.support.serve_processes import MODEL, Served

CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SIZE = MAX_BODY_BYTES - 2048
STORED = 8
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
)
USER = {"role": "user", "content": "x"}


def plain(**fields) -> str:
    return json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, **fields})


def chat(**fields) -> str:
    return json.dumps({"model": MODEL, "messages": [USER], "max_tokens": 1, **fields})


def response(**fields) -> str:
    return json.dumps({"model": MODEL, "input": "x", "max_output_tokens": 16, **fields})


def raw(head: str, unit: str, tail: str, *, last: str) -> str:
    """`head`, as many units as fit, `last` in place of another unit, and `tail`."""
    return head + unit * ((SIZE - len(head) - len(tail)) // len(unit)) + last + tail


def calls(arguments: str, count: int = 1) -> str:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call] * count}])


def prompt(unit: str, last: str) -> str:
    return raw(f'{{"model": "{MODEL}", "max_tokens": 1, "prompt": [', unit, "]}", last=last)


def field(name: str, open_: str, unit: str, last: str, close: str) -> str:
    return raw(chat()[:-1] + f', "{name}": {open_}', unit, f"{close}}}", last=last)


def new_text() -> str:
    """Makes a grammar that is not compiled yet."""
    return uuid.uuid4().hex


BODIES: dict[str, Callable[[], tuple[str, str]]] = {
    "arguments of lists": lambda: (CHAT, calls('{"a": [' + "[]," * 2_500_000 + "1]}")),
    "arguments of numbers": lambda: (CHAT, calls('{"a": [' + "1," * 3_800_000 + "1]}")),
    "arguments of one text": lambda: (CHAT, calls('{"a": "' + "x" * 7_800_000 + '"}')),
    "arguments of many calls": lambda: (CHAT, calls('{"a": [' + "[]," * 20_000 + "1]}", 120)),
    "logit_bias": lambda: (PLAIN, plain(logit_bias={str(i): 1 for i in range(500_000)})),
    "logit_bias out of range": lambda: (PLAIN, plain(logit_bias={str(i): 1000 for i in range(500_000)})),
    "token ids": lambda: (PLAIN, prompt("1,", "1")),
    "lists of token ids": lambda: (PLAIN, prompt("[1],", "[1]")),
    "wrong token ids": lambda: (PLAIN, prompt("-1,", "-1")),
    "texts of prompts": lambda: (PLAIN, prompt('"",', '""')),
    "mixed prompts": lambda: (PLAIN, prompt('1,"",', "1")),
    "one text": lambda: (PLAIN, plain(prompt="This is a rank. " * (SIZE // 16))),
    "one escaped text": lambda: (PLAIN, raw(f'{{"model": "{MODEL}", "prompt": "', "\\u00e9", '"}', last="")),
    "one text of a message": lambda: (CHAT, chat(messages=[{"role": "user", "content": "x" * SIZE}])),
    "parts of messages": lambda: (
        CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 1000}] * 250),
    ),
    "unknown members of messages": lambda: (CHAT, chat(messages=[{"role": "user", "content": "x", "bad": 1}] * 150_000)),
    "unknown fields": lambda: (PLAIN, plain(**{f"x{i}": 1 for i in range(500_000)})),
    "template variables": lambda: (CHAT, field("chat_template_kwargs", '{"a": [', "{},", "{}", "]}")),
    "template texts": lambda: (CHAT, field("chat_template_kwargs", '{"a": [', '"b",', '"b"', "]}")),
    "schema": lambda: (CHAT, field("guided_json", '{"enum": [', '"b",', '"b"', "]}")),
    "schema of objects": lambda: (CHAT, field("guided_json", '{"enum": [', "{},", "{}", "]}")),
    "schema as text": lambda: (CHAT, chat(guided_json='{"enum": [' + "[]," * 2_500_000 + "1]}")),
    "schema of one text": lambda: (CHAT, chat(guided_json={"enum": ["x" * (SIZE - 200)]})),
    "regular expression": lambda: (CHAT, chat(guided_regex="a" * (SIZE - 200))),
    "tools": lambda: (
        CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"enum": ["b"] * 10_000}}}] * 120),
    ),
    "stops": lambda: (PLAIN, plain(stop=["a"] * 1_500_000)),
    "stop ids": lambda: (PLAIN, plain(stop_token_ids=[1] * 2_500_000)),
    "text that fits": lambda: (PLAIN, plain(prompt="This is a rank. " * 3500)),
    "token ids that fit": lambda: (PLAIN, plain(prompt=[5] * (LENGTH - 10))),
    "user": lambda: (PLAIN, plain(user="x" * (SIZE - 100))),
    "no JSON": lambda: (PLAIN, "[" * SIZE),
    "lists": lambda: (PLAIN, raw("[", "[],", "]", last="[]")),
    "quotes": lambda: (PLAIN, '"' * SIZE),
    "backslashes": lambda: (PLAIN, '"' + "\\\\" * (SIZE // 2) + '"'),
    "text to tokenize": lambda: ("/tokenize", json.dumps({"prompt": "This is a rank. " * 2**16})),
    "fewer tokens": lambda: ("/detokenize", json.dumps({"tokens": [5] * 500_000})),
    "tokens": lambda: ("/detokenize", raw('{"tokens": [', "1,", "]}", last="1")),
    "wrong tokens": lambda: ("/detokenize", raw('{"tokens": [', '"",', "]}", last="1")),
    "text of a response": lambda: (RESPONSES, response(input="This is a rank. " * (SIZE // 16))),
    "text of a response that fits": lambda: (RESPONSES, response(input="This is a rank. " * 1000, metadata={"a": "x" * 512})),
    "items of a response": lambda: (RESPONSES, response(input=[{"role": "user", "content": "x"}] * 1000, tools=[
        {"type": "function", "name": f"f{i}", "parameters": {"enum": ["b"] * 4000}} for i in range(120)
    ])),
    "references to items": lambda: (RESPONSES, response(input=[{"type": "item_reference", "id": "msg_0"}] * 100_000)),
    "calls of a response": lambda: (RESPONSES, response(input=[
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a": [' + "[]," * 20_000 + "1]}"}
    ] * 120)),
    "several completions of token ids that fit": lambda: (PLAIN, plain(prompt=[5] * (LENGTH - 10), n=8)),
    "scores of an echoed prompt": lambda: (PLAIN, plain(prompt=[5] * (LENGTH - 10), echo=True, logprobs=5)),
    "scores of an echoed prompt, in a stream": lambda: (
        PLAIN, plain(prompt=[5] * (LENGTH - 10), echo=True, logprobs=5, stream=True),
    ),
    "scores of a prompt": lambda: (PLAIN, plain(prompt=[7] * (LENGTH - 10), prompt_logprobs=20)),
    "scores of an echoed prompt, in a stream with the usage so far": lambda: (PLAIN, plain(
        prompt=[5] * (LENGTH - 10), echo=True, logprobs=5, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )),
    "scores of a prompt of several completions": lambda: (PLAIN, plain(prompt=[7] * (LENGTH - 10), prompt_logprobs=20, n=3)),
    "an echoed prompt with scores of several completions": lambda: (
        PLAIN, plain(prompt=[5] * (LENGTH - 10), echo=True, logprobs=5, n=3),
    ),
    "scores of completions that wait for those of their prompt": lambda: (PLAIN, plain(
        prompt=[7] * (LENGTH - 1000), prompt_logprobs=20, logprobs=20, n=20, max_tokens=100, ignore_eos=True,
    )),
    "scores of a conversation": lambda: (
        CHAT, chat(messages=[{"role": "user", "content": "This is a rank. " * 1500}], prompt_logprobs=20),
    ),
    "as many completions as may be": lambda: (PLAIN, plain(prompt=[5] * (LENGTH - 10), n=MAX_N)),
    "as many prompts as may be": lambda: (PLAIN, plain(prompt=["This is a rank. " * 100] * 512)),
    "as many short prompts as may be, in a stream": lambda: (PLAIN, plain(prompt=["x"] * MAX_PROMPTS, n=2, stream=True)),
    "a schema that is accepted": lambda: (CHAT, chat(guided_json={"enum": [new_text(), *(f"{i:016}" for i in range(5000))]})),
    "a regular expression that is accepted": lambda: (
        CHAT, chat(guided_regex=new_text() + "|".join(f"[a-z]{{{i}}}" for i in range(60))),
    ),
    "as many completions of a regular expression as may be": lambda: (
        CHAT, chat(guided_regex=new_text() + "|".join(f"[a-z]{{{i}}}" for i in range(60)), n=MAX_N),
    ),
    "a grammar that is accepted": lambda: (CHAT, chat(guided_grammar="root ::= " + " | ".join(
        f'"{text}"' for text in (new_text(), *(f"{i:04}" for i in range(3000)))
    ))),
    "messages just below the size of a large body": lambda: (CHAT, chat(messages=[USER] * 1800)),
    "prompts just below the size of a large body": lambda: (PLAIN, plain(prompt=["x"] * 510, user="x" * 60_000)),
    "token ids just below the size of a large body": lambda: (PLAIN, plain(prompt=[5] * 19_900)),
    "biases just below the size of a large body": lambda: (
        PLAIN, plain(logit_bias={str(i): 1 for i in range(300)}, user="x" * 60_000),
    ),
    "scores in a streamed response": lambda: (RESPONSES, response(
        stream=True, max_output_tokens=1000, top_logprobs=20, include=["message.output_text.logprobs"],
    )),
    "scores in a response": lambda: (RESPONSES, response(
        max_output_tokens=1000, top_logprobs=20, include=["message.output_text.logprobs"],
    )),
}  # fmt: skip


class Filled(NamedTuple):
    """A store that was filled. items: ids of short items, the oldest first. large: of items of 7 MiB. long: the id of the response
    with the longest conversation."""

    items: list[str]
    large: list[str]
    long: str


FILLED_BODIES: dict[str, Callable[[Filled], tuple[str, str]]] = {
    "references to stored items": lambda filled: (RESPONSES, response(input=references(filled.items, 1100))),
    "as many references to stored items as may be": lambda filled: (RESPONSES, response(input=references(filled.items, 64))),
    "as many references to large items": lambda filled: (RESPONSES, response(input=references(filled.large, 64))),
    "a reference to a large item": lambda filled: (RESPONSES, response(input=[*references(filled.large, 1), USER])),
    "after a long conversation": lambda filled: (RESPONSES, response(previous_response_id=filled.long)),
    "a long response": lambda filled: (f"{RESPONSES}/{filled.long}", ""),
    "the items of a long response": lambda filled: (f"{RESPONSES}/{filled.long}/input_items?limit=100", ""),
}
"""Those that are about stored responses. One without a body is a GET."""


def references(items: list[str], count: int) -> list[dict[str, str]]:
    return [{"type": "item_reference", "id": items[i % len(items)]} for i in range(count)]


def fill(served: Served) -> Filled:
    """Store conversations of 7 MiB each, most of it in thoughts that no prompt has, and a long one of many items."""
    thoughts: dict[str, Any] = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * (SIZE - 2000)}]}
    many = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}] * 500
    items, large = [], []
    with served.http(timeout=120) as http:
        for _ in range(STORED):
            answer = http.post(RESPONSES, content=response(input=[USER, thoughts]))
            assert answer.status_code == 200, answer.text
            items.append(answer.json()["output"][0]["id"])
            stored = http.get(f"{RESPONSES}/{answer.json()['id']}/input_items?order=asc").json()["data"]
            large.append(stored[1]["id"])
        thoughts["content"][0]["text"] = "x" * (SIZE // 2)
        answer = http.post(RESPONSES, content=response(input=[*many, thoughts]))
        assert answer.status_code == 200, answer.text
    return Filled(items, large, answer.json()["id"])


def post(served: Served, path: str, body: str) -> socket.socket:
    """A connection on which the request was sent, and of whose answer nothing was read; without a body it is a GET."""
    content = body.encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection

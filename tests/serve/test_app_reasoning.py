# SPDX-License-Identifier: Apache-2.0
"""`phalanx serve` with real ranks over tiny checkpoints that have learned to think and to call, with the official client."""

from __future__ import annotations

import pytest

from tests.support.serve_output_checkpoints import write_reciting_checkpoint
from tests.support.serve_processes import MODEL, rank_server

pytestmark = pytest.mark.usefixtures("forked_python")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
RAIN = [{"role": "user", "content": "Does it rain?"}]
HELLO = [{"role": "user", "content": "Hello"}]
OSLO = '{"city": "Oslo"}'
ANSWERS = {
    "qwen3": (
        f'<think>\nI look.\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
        "<think>\nA greeting.\n</think>\n\nHello, world!",
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
        f"<|message|>{OSLO}<|call|>",
        "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello, world!<|return|>",
    ),
}


BOTH = pytest.mark.parametrize("client", ["qwen3", "gpt_oss"], indirect=True)
ONE = pytest.mark.parametrize("client", ["gpt_oss"], indirect=True)  # compilers of grammars take seconds to start


@pytest.fixture(scope="module")
def client(request, tmp_path_factory):
    family = request.param
    size = {"qwen3": "1", "gpt_oss": "2"}[family]
    folder = tmp_path_factory.mktemp(family)
    rain, hello = ANSWERS[family]
    write_reciting_checkpoint(folder, family, [({"messages": RAIN, "tools": TOOLS}, rain), ({"messages": HELLO}, hello)])
    served = rank_server(tmp_path_factory.mktemp("served"), folder, "--tp_size", size)
    with served as running, running.wait_ready().openai() as openai_client:
        yield openai_client


def streamed(client, **fields):
    """Reasoning, content, calls, finish reason and the number of the tokens of the reasoning."""
    reasoning, content, calls, finish, tokens = "", "", [], None, None
    more = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    for chunk in client.chat.completions.create(model=MODEL, **more, **fields):
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments
            finish = choice.finish_reason or finish
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens_details.reasoning_tokens
    assert tokens > 0
    return reasoning, content, calls, finish


@BOTH
def test_it_thinks_and_calls(client):
    assert streamed(client, messages=RAIN, tools=TOOLS) == ("I look.", "", [["weather", OSLO]], "tool_calls")


@BOTH
def test_it_thinks_and_answers(client):
    assert streamed(client, messages=HELLO) == ("A greeting.", "Hello, world!", [], "stop")
    message = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0).choices[0].message
    assert (message.reasoning_content, message.content) == ("A greeting.", "Hello, world!")


@ONE
def test_a_forced_call_comes_after_the_reasoning(client):
    forced = {"tool_choice": "required", "messages": RAIN, "tools": TOOLS, "max_tokens": 150}
    assert streamed(client, **forced) == ("I look.", "", [["weather", OSLO]], "tool_calls")


@ONE
def test_a_schema_holds_after_the_reasoning(client):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "^Hello, world!$"}}}
    answer = streamed(client, messages=HELLO, response_format=schema, max_tokens=100)
    assert answer == ("A greeting.", '"Hello, world!"', [], "stop")


@BOTH
def test_a_call_comes_after_the_reasoning_beside_a_response_format(client):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "^Hello, world!$"}}}
    answer = streamed(client, messages=RAIN, tools=TOOLS, response_format=schema, max_tokens=150)
    assert answer == ("I look.", "", [["weather", OSLO]], "tool_calls")

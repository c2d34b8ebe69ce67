# SPDX-License-Identifier: Apache-2.0
"""Reasoning and tool calls of every family through `/v1/chat/completions`, with the official client over a scripted engine."""

from __future__ import annotations

import json
import re

import openai
import pytest

from phalanx.serve.openai.schema.responses import ChatCompletionChunk, ChatCompletionResponse
from phalanx.serve.output_parsing import deepseek
from tests.support.serve_http_app import MODEL, Scripted, live
from tests.support.serve_output_checkpoints import OUTPUT_FAMILIES, tokenizer_of_family
from tests.support.serve_reasoning import FINAL, ONE_CALL, OSLO, THINKS, THOUGHT, served

pytestmark = pytest.mark.usefixtures("forked_python")

ASK = [{"role": "user", "content": "What?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "noon"}},
]
DS = deepseek
CALL = {
    "qwen3": f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "noon"}\n</tool_call>',
    "deepseek_r1": DS.CALLS_BEGIN + f"{DS.CALL_BEGIN}function{DS.SEPARATOR}weather\n```json\n{OSLO}\n```{DS.CALL_END}\n"
    f"{DS.CALL_BEGIN}function{DS.SEPARATOR}noon\n```json\n{{}}\n```{DS.CALL_END}{DS.CALLS_END}",
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}, {{"name": "noon", "arguments": {{}}}}]',
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {OSLO}}}; {{"name": "noon", "parameters": {{}}}}<|eom_id|>',
    "pythonic": "<|python_start|>[weather(city='Oslo'), noon()]<|python_end|>",
    "minimax_m2": f'{THOUGHT}\n</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '</invoke>\n<invoke name="noon">\n</invoke>\n</minimax:tool_call>',
    "hy_v3": f"{THOUGHT}</think>\n<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo"
    "</arg_value>\n</tool_call>\n<tool_call>noon<tool_sep>\n</tool_call>\n</tool_calls>".replace(">", ":opensource>"),
    "cohere": f'<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", '
    f'"parameters": {OSLO}}},\n    {{"tool_call_id": "1", "tool_name": "noon", "parameters": {{}}}}\n]<|END_ACTION|>',
    "olmo3": '<function_calls>weather(city="Oslo")\nnoon()</function_calls>',
}


def answer_of(client, **fields):
    response = client.chat.completions.create(model=MODEL, messages=ASK, **fields)
    ChatCompletionResponse.model_validate(response.to_dict())
    return response


def streamed(client, **fields):
    """The message that a client assembles from the chunks, and the chunks."""
    chunks = list(client.chat.completions.create(model=MODEL, messages=ASK, stream=True, **fields))
    message = {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict())
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(message["calls"])
                    assert call.type == "function"
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
    return message, chunks


def plain(response):
    message = response.choices[0].message
    return {
        "content": message.content or "",
        "reasoning_content": getattr(message, "reasoning_content", None) or "",
        "calls": [[call.function.name, call.function.arguments] for call in message.tool_calls or []],
        "finish_reason": response.choices[0].finish_reason,
    }


@pytest.mark.parametrize("family", THINKS)
def test_reasoning(family):
    with served(family, THINKS[family] + FINAL.get(family, "It rains.")) as (_, client):
        expected = {"content": "It rains.", "reasoning_content": THOUGHT, "calls": [], "finish_reason": "stop"}
        response = answer_of(client)
        assert plain(response) == expected
        message, chunks = streamed(client, stream_options={"include_usage": True})
        assert message == expected
        assert sum(bool(getattr(chunk.choices[0].delta, "reasoning_content", None)) for chunk in chunks[:-1]) > 3
        tokens = response.usage.completion_tokens_details.reasoning_tokens
        assert tokens == chunks[-1].usage.completion_tokens_details.reasoning_tokens
        thought = tokenizer_of_family(family).encode(THOUGHT, add_special_tokens=False)
        assert len(thought) <= tokens <= len(thought) + 2  # and the line breaks beside the tags
        hidden = answer_of(client, extra_body={"include_reasoning": False})
        assert plain(hidden) == {**expected, "reasoning_content": ""}
        assert hidden.usage.completion_tokens_details.reasoning_tokens == tokens


@pytest.mark.parametrize("family", CALL)
def test_calls(family):
    with served(family, THINKS.get(family, "") + CALL[family]) as (_, client):
        expected = {"content": "", "calls": [["weather", OSLO], ["noon", "{}"]], "finish_reason": "tool_calls"}
        expected["reasoning_content"] = THOUGHT if family in THINKS or THOUGHT in CALL[family] else ""
        response = answer_of(client, tools=TOOLS)
        assert plain(response) == expected
        assert response.choices[0].message.content is None
        assert streamed(client, tools=TOOLS)[0] == expected
        one = {**expected, "calls": expected["calls"][:1]}
        if family == "pythonic":
            assert plain(answer_of(client, tools=TOOLS, parallel_tool_calls=False)) == one
        ids = [call.id for call in response.choices[0].message.tool_calls]
        assert len(set(ids)) == 2
        form = r"[a-zA-Z0-9]{9}" if family == "mistral" else r"call_[0-9a-f]{24}"
        assert all(re.fullmatch(form, call_id) for call_id in ids)


def test_harmony_calls():
    with served("gpt_oss", THINKS["gpt_oss"] + ONE_CALL) as (_, client):
        expected = {"content": "", "reasoning_content": THOUGHT, "calls": [["weather", OSLO]], "finish_reason": "tool_calls"}
        assert plain(answer_of(client, tools=TOOLS)) == expected
        assert streamed(client, tools=TOOLS)[0] == expected
        # Without tools there is nothing to call.
        assert plain(answer_of(client)) == {**expected, "content": OSLO, "calls": [], "finish_reason": "stop"}


def test_ids_of_mistral_come_back():
    with served("mistral", CALL["mistral"]) as (_, client):
        calls = answer_of(client, tools=TOOLS).choices[0].message.tool_calls
        history = [{"role": "assistant", "tool_calls": [call.to_dict() for call in calls]}]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
        client.chat.completions.create(model=MODEL, messages=[*ASK, *history], tools=TOOLS)


def test_thinking_can_be_switched_off():
    with served("qwen3", "It rains. </think>") as (server, client):
        response = answer_of(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        assert plain(response)["content"] == "It rains. </think>"
        assert response.usage.completion_tokens_details.reasoning_tokens == 0
        prompt = server.engine.tokenizer.decode(server.engine.added[-1].token_ids, skip_special_tokens=False)
        assert prompt.endswith("<think>\n\n</think>\n\n")


def test_options_override_the_checkpoint():
    text = THINKS["qwen3"] + CALL["qwen3"]
    with served("qwen3", text, reasoning_parser="none", tool_call_parser="none") as (_, client):
        response = answer_of(client)
        assert plain(response) == {"content": text, "reasoning_content": "", "calls": [], "finish_reason": "stop"}
        assert response.usage.completion_tokens_details is None
        with pytest.raises(openai.BadRequestError, match="tool_call_parser"):
            answer_of(client, tools=TOOLS)
    with served("llama", CALL["qwen3"], tool_call_parser="hermes") as (_, client):
        assert plain(answer_of(client, tools=TOOLS))["finish_reason"] == "tool_calls"


def test_text_that_looks_like_a_marker_is_kept():
    # The letters of a marker, in ordinary tokens: an explanation of the format.
    tokenizer = tokenizer_of_family("gpt_oss")
    answer = "It begins with <|channel|>final<|message|>."
    begin, end = (tokenizer.encode(text, add_special_tokens=False) for text in ("<|channel|>final<|message|>", "<|return|>"))
    letters = [token for letter in answer for token in tokenizer.encode(letter, add_special_tokens=False)]
    engine = Scripted("", tokenizer=tokenizer, eos=OUTPUT_FAMILIES["gpt_oss"].eos)
    engine._says = lambda: iter([*begin, *letters, *end])
    with live(engine, tokenizer=tokenizer) as server, server.openai() as client:
        assert plain(answer_of(client))["content"] == answer
    with served("qwen3", "<think>a</think>b <tool_call> c <tool_c") as (_, client):
        assert streamed(client, tools=TOOLS)[0]["content"] == "b <tool_call> c <tool_c"


def test_reasoning_that_is_cut_off():
    with served("qwen3", THINKS["qwen3"] + "It rains.") as (_, client):
        message = plain(answer_of(client, max_tokens=4))
        assert message["finish_reason"] == "length"
        assert THOUGHT.startswith(message["reasoning_content"])
        assert message["content"] == ""


def test_grammars_let_the_model_think(monkeypatch):
    compiled = {}

    def compile_nothing(params, *others, **more):
        compiled["x"] = params
        return params

    monkeypatch.setattr("phalanx.serve.openai.service.compile_structured_output", compile_nothing)
    with served("qwen3", THINKS["qwen3"] + '{"a": 1}') as (_, client):
        answer_of(client, response_format={"type": "json_object"})
        kinds = [part["type"] for part in json.loads(compiled["x"].structural_tag)["format"]["elements"]]
        assert kinds == ["optional", "json_schema"]
        answer_of(client, response_format={"type": "json_object"}, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        assert compiled["x"].json_object


def test_several_completions():
    with served("qwen3", THINKS["qwen3"] + CALL["qwen3"]) as (_, client):
        response = answer_of(client, tools=TOOLS, n=2)
        assert [len(choice.message.tool_calls) for choice in response.choices] == [2, 2]
        one = answer_of(client, tools=TOOLS).usage.completion_tokens_details.reasoning_tokens
        assert response.usage.completion_tokens_details.reasoning_tokens == 2 * one


def test_strict_python_calls_are_refused():
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    with served("pythonic", "x") as (_, client), pytest.raises(openai.BadRequestError, match="Python calls"):
        answer_of(client, tools=tools)

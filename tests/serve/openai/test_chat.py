# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` with the official client."""

from __future__ import annotations

import json

import msgspec
import openai
import pytest

from phalanx.serve.openai.body import LARGE_BYTES
from phalanx.serve.openai.schema.responses import ChatCompletionChunk, ChatCompletionResponse
from tests.serve.openai.conftest import TEXT
from tests.support.serve_http_app import HERMES_TEMPLATE, LLAMA_TEMPLATE, MODEL, Scripted, live, tokenizer_of

pytestmark = pytest.mark.usefixtures("forked_python")

ASK = [{"role": "user", "content": "What?"}]
TOKENS = tokenizer_of().encode(TEXT, add_special_tokens=False)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "noon"}},
]


def stream_of(client, **fields):
    chunks = list(client.chat.completions.create(model=MODEL, stream=True, **fields))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict())
    assert len({chunk.id for chunk in chunks}) == 1
    return chunks


def test_whole_answer(client):
    answer = client.chat.completions.create(model=MODEL, messages=ASK)
    ChatCompletionResponse.model_validate(answer.to_dict())
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.message.tool_calls is None
    assert answer.usage.completion_tokens == len(TOKENS) + 1


def test_stream(client):
    chunks = stream_of(client, messages=ASK, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(TOKENS) + 1


def test_n(client):
    answer = client.chat.completions.create(model=MODEL, messages=ASK, n=3, max_completion_tokens=2)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert {c.finish_reason for c in answer.choices} == {"length"}
    chunks = stream_of(client, messages=ASK, n=3, max_tokens=2)
    for i in range(3):
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i)
        assert text == answer.choices[i].message.content


def test_logprobs(client):
    content = client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert len(content) == len(TOKENS) + 1
    assert (content[0].logprob, len(content[0].top_logprobs)) == (-1.0, 1)
    assert bytes(content[0].bytes).decode() == content[0].token
    chunks = stream_of(client, messages=ASK, logprobs=True, top_logprobs=1)
    streamed = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert streamed == content
    bare = client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True).choices[0].logprobs.content
    assert bare[0].top_logprobs == []


def test_messages_become_a_prompt(server, client):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"role": "user", "content": "more", "name": "bob"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    prompt = tokenizer_of().decode(server.engine.added[-1].token_ids, skip_special_tokens=False)
    assert prompt == ("<s><|system|>Be brief.</s>\n<|user|>one\ntwo</s>\n<|assistant|>yes</s>\n<|user|>more</s>\n<|assistant|>")


def test_neutral_fields_are_taken(client):
    client.chat.completions.create(
        model=MODEL, messages=ASK, max_completion_tokens=1, max_tokens=1, store=False, tools=[], user="me", metadata={"a": "b"},
        parallel_tool_calls=True, service_tier="auto", modalities=["text"], response_format={"type": "text"}, tool_choice="none",
        prompt_cache_key="k", safety_identifier="s", logit_bias={}, stop=None, reasoning_effort="none", verbosity="medium",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"audio": {"voice": "x", "format": "wav"}}, "audio is not supported", "audio"),
        ({"modalities": ["text", "audio"]}, "modalities is not supported", "modalities"),
        ({"extra_body": {"temprature": 1}}, "unknown field 'temprature'; did you mean 'temperature'", "temprature"),
        ({"extra_body": {"messages": []}}, "messages", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text only", None),
        ({"messages": [{"role": "king", "content": "x"}]}, "role", "messages[0].role"),
        ({"messages": [{"role": "assistant"}]}, "content or tool_calls", "messages[0]"),
        ({"messages": [{"role": "user"}]}, "required", "messages[0].content"),
        ({"top_logprobs": 2}, "needs logprobs", "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "contradict", "max_tokens"),
        ({"tools": TOOLS}, "chat template shows no tools", "tools"),
        ({"tool_choice": "required"}, "needs tools", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "not one of the tools", "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
         "response_format", "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}},
         "response_format.json_schema.schema: ", "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"anyOf": []}}}},
         "has an empty 'anyOf' at #; no value satisfies it", "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
         "no text satisfies it", "response_format"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "is set by the server", "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"self": 1}}}, "is set by the server", "chat_template_kwargs"),
        ({"extra_body": {"temperature": "1"}}, "temperature", "temperature"),
        ({"extra_body": {"n": 1.5}}, "n:", "n"),
        ({"n": 129}, "n:", "n"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"seed": 2**70}, "seed", "seed"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ],
)  # fmt: skip
def test_what_is_rejected(client, fields, message, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": MODEL, "messages": ASK, **fields})
    assert message in error.value.body["message"]
    assert error.value.body["type"] == "invalid_request_error"
    if param is not None:
        assert error.value.param == param


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-4o", messages=ASK)
    assert error.value.code == "model_not_found"


def test_structured_output_reaches_the_engine(server, client):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    formats = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"guided_json": schema}},
        {"extra_body": {"guided_regex": "[a-z]+"}},
        {"extra_body": {"guided_grammar": 'root ::= "a" | "b"'}},
    ]
    kinds = []
    for fields in formats:
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, **fields)
        structured_output = server.engine.added[-1].params.structured_output
        assert structured_output.compiled
        kinds += [name for name in ("json_schema", "json_object", "regex", "grammar") if getattr(structured_output, name)]
    assert kinds == ["json_schema", "json_object", "json_schema", "regex", "grammar"]


CALLS = {
    HERMES_TEMPLATE: 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "noon", "arguments": {}}\n</tool_call>',
    LLAMA_TEMPLATE: '{"name": "weather", "parameters": {"city": "Köln"}}; {"name": "noon", "parameters": {}}',
}


@pytest.mark.parametrize("template", list(CALLS), ids=["hermes", "llama"])
def test_tool_calls(template):
    content = "I look." if template is HERMES_TEMPLATE else None
    engine = Scripted(CALLS[template])
    with live(engine, template=template) as server, server.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS)
        ChatCompletionResponse.model_validate(answer.to_dict())
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
        calls = [(c.type, c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
        assert calls == [("function", "weather", {"city": "Köln"}), ("function", "noon", {})]
        assert len({c.id for c in choice.message.tool_calls}) == 2

        chunks = stream_of(client, messages=ASK, tools=TOOLS)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        pieces = [p for c in chunks for p in c.choices[0].delta.tool_calls or []]
        for i, call in enumerate(choice.message.tool_calls):
            parts = [p for p in pieces if p.index == i]
            assert parts[0].id.startswith("call_")
            assert parts[0].function.name == call.function.name
            assert "".join(p.function.arguments or "" for p in parts) == call.function.arguments
        assert len([p for p in pieces if p.index == 0]) > 3, "arguments stream in pieces"
        assert ("".join(c.choices[0].delta.content or "" for c in chunks) or None) == content

        # What was called comes back, with the tool's answer.
        history = [
            *ASK,
            choice.message.to_dict(),
            {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "7"},
        ]
        client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, max_tokens=1)
        prompt = tokenizer_of().decode(engine.added[-1].token_ids, skip_special_tokens=False)
        assert '{"city": "Köln"}' in prompt

        ignored = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, tool_choice="none").choices[0]
        assert (ignored.message.content, ignored.finish_reason) == (CALLS[template], "stop")
        assert "weather" not in tokenizer_of().decode(engine.added[-1].token_ids)


@pytest.mark.parametrize("template", list(CALLS), ids=["hermes", "llama"])
def test_forced_calls_have_a_structural_tag(template):
    engine = Scripted(CALLS[template])
    named = {"type": "function", "function": {"name": "weather"}}
    strict = msgspec.json.decode(msgspec.json.encode(TOOLS))
    strict[0]["function"]["strict"] = True
    with live(engine, template=template) as server, server.openai() as client:
        for fields, kind, functions, several in (
            ({"tools": TOOLS, "tool_choice": "required"}, "sequence", 2, True),
            ({"tools": TOOLS, "tool_choice": named}, "sequence", 1, False),
            ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}, "dispatch", 2, False),
            ({"tools": strict}, "dispatch", 2, True),
        ):
            client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, **fields)
            structured_output = engine.added[-1].params.structured_output
            layout = json.loads(structured_output.structural_tag)["format"]
            assert structured_output.compiled
            assert layout["type"] == kind
            text = json.dumps(layout)
            assert ("weather" in text) + ("noon" in text) == functions
            assert layout.get("loop", '"star"' in text) is several
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, tools=TOOLS)
        assert engine.added[-1].params.structured_output is None
        answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, parallel_tool_calls=False)
        assert [c.function.name for c in answer.choices[0].message.tool_calls] == ["weather"]
        both = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
        with pytest.raises(openai.BadRequestError, match="exclude each other"):
            client.chat.completions.create(model=MODEL, messages=ASK, **both)
        bad = [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}]}]
        client.chat.completions.create(model=MODEL, messages=bad, tools=TOOLS, max_tokens=1)


JSON_FORMATS = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}},
]


@pytest.mark.parametrize("response_format", JSON_FORMATS, ids=["object", "schema"])
def test_a_response_format_beside_tools(response_format):
    """The grammar allows both; see also tests/serve/test_app_calls_or_answer.py, where it is enforced."""
    answer = '{"text": "<tool_call>\\n<function=weather>"}'
    engine = Scripted(CALLS[HERMES_TEMPLATE].removeprefix("I look.\n"), answer)
    both = {"messages": ASK, "tools": TOOLS, "response_format": response_format}
    with live(engine, template=HERMES_TEMPLATE) as server, server.openai() as client:
        choice = client.chat.completions.create(model=MODEL, **both).choices[0]
        assert [call.function.name for call in choice.message.tool_calls] == ["weather", "noon"]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        choice = client.chat.completions.create(model=MODEL, **both).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", answer, None)
        kinds = [one["type"] for one in json.loads(engine.added[-1].params.structured_output.structural_tag)["format"]["elements"]]
        assert kinds == ["json_schema", "sequence"]
        client.chat.completions.create(model=MODEL, max_tokens=1, tool_choice="none", **both)
        assert engine.added[-1].params.structured_output.structural_tag is None
        # A large body is read by another process.
        large = {"user": "x" * LARGE_BYTES}
        large_answer = client.chat.completions.create(model=MODEL, extra_body=large, **both).choices[0].message
        assert (large_answer.content, large_answer.tool_calls) == (answer, None)
        assert '"or"' in engine.added[-1].params.structured_output.structural_tag
        wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        with pytest.raises(openai.BadRequestError, match=r"response_format and tools: .* has 'not'"):
            client.chat.completions.create(model=MODEL, **{**both, "response_format": wrong})
        for choice in ("required", {"type": "function", "function": {"name": "noon"}}):
            with pytest.raises(openai.BadRequestError, match="response_format and tools exclude each other"):
                client.chat.completions.create(model=MODEL, tool_choice=choice, **both)
        with pytest.raises(openai.BadRequestError, match="guided_regex and response_format and tools exclude each other"):
            client.chat.completions.create(model=MODEL, extra_body={"guided_regex": "a"}, **both)


@pytest.mark.parametrize("options", [{"template": LLAMA_TEMPLATE}, {"template": HERMES_TEMPLATE, "tool_call_parser": "pythonic"}])
@pytest.mark.parametrize("response_format", JSON_FORMATS, ids=["object", "schema"])
def test_a_response_format_beside_tools_whose_calls_look_like_answers(options, response_format):
    with live(Scripted("x"), **options) as server, server.openai() as client:
        both = {"messages": ASK, "tools": TOOLS, "response_format": response_format, "max_tokens": 1}
        with pytest.raises(openai.BadRequestError, match="send tool_choice 'none' with response_format, or tools without") as error:
            client.chat.completions.create(model=MODEL, **both)
        assert error.value.param == "response_format"
        client.chat.completions.create(model=MODEL, tool_choice="none", **both)


def prompt_of(server) -> str:
    return tokenizer_of().decode(server.engine.added[-1].token_ids, skip_special_tokens=False)


def test_calls_that_were_cut_off_are_rendered():
    engine = Scripted("x")
    with live(engine, template=HERMES_TEMPLATE) as server, server.openai() as client:
        for arguments, rendered in (
            ("", "{}"),
            (None, "{}"),
            ('{"city": "Kö', '{"city": "Kö"}'),
            ('{"a": [1, {"b": tru', '{"a": [1, {}]}'),
            ("nothing", '"nothing"'),
        ):
            call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            history = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": ""}]
            client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, max_tokens=1)
            assert f'{{"name": "weather", "arguments": {rendered}}}' in prompt_of(server)


@pytest.mark.parametrize(
    ("stop", "more", "arguments", "finish_reason"),
    [
        (["Köln"], {}, ['{"city": "'], "stop"),
        (["}"], {}, ['{"city": "Köln"'], "stop"),
        (["}"], {"extra_body": {"include_stop_str_in_output": True}}, ['{"city": "Köln"}'], "tool_calls"),
        (["</tool_call>"], {}, ['{"city": "Köln"}'], "tool_calls"),
        (["{}"], {}, ['{"city": "Köln"}', ""], "stop"),
        (["{}"], {"parallel_tool_calls": False}, ['{"city": "Köln"}'], "tool_calls"),
    ],
)
def test_a_call_that_a_stop_string_cuts_off_is_not_reported_as_complete(stop, more, arguments, finish_reason):
    with live(Scripted(CALLS[HERMES_TEMPLATE]), template=HERMES_TEMPLATE) as server, server.openai() as client:
        fields = {"messages": ASK, "tools": TOOLS, "stop": stop, **more}
        choice = client.chat.completions.create(model=MODEL, **fields).choices[0]
        assert [call.function.arguments for call in choice.message.tool_calls] == arguments
        assert (choice.finish_reason, choice.to_dict()["stop_reason"]) == (finish_reason, stop[0])
        assert stream_of(client, **fields)[-1].choices[0].finish_reason == finish_reason


THOUGHTS = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "because"}]}


def test_an_empty_answer_of_the_history(client):
    """As the server writes it when a model ends at once; `content: null` without calls was never its answer."""
    history = [*ASK, {"role": "assistant", "content": "", "refusal": None}, *ASK]
    assert client.chat.completions.create(model=MODEL, messages=history, max_tokens=1).choices
    with pytest.raises(openai.BadRequestError, match="needs content or tool_calls"):
        client.chat.completions.create(model=MODEL, messages=[*ASK, {"role": "assistant", "content": None}], max_tokens=1)


def test_refusals_and_reasoning_of_the_history(server, client):
    history = [
        *ASK,
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Never."}]},
        {"role": "assistant", "content": "yes", "reasoning_content": "because"},
        *ASK,
    ]
    client.chat.completions.create(model=MODEL, messages=history, max_tokens=1)
    assert "<|assistant|>I will not.</s>\n<|assistant|>No.\nNever.</s>\n<|assistant|>yes</s>" in prompt_of(server)
    template = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"
    with live(Scripted("x"), template=template) as other, other.openai() as other_client:
        for name in ("reasoning_content", "reasoning"):
            other_client.chat.completions.create(
                model=MODEL, messages=[{"role": "assistant", "content": "yes", name: "because"}], max_tokens=1
            )
            assert prompt_of(other) == "[because]yes"
    with live(Scripted("x"), template="{% for m in messages %}[{{ m.thinking }}]{{ m.content }}{% endfor %}") as other:
        with other.openai() as other_client:
            other_client.responses.create(
                model=MODEL, input=[THOUGHTS, {"role": "assistant", "content": "yes"}], max_output_tokens=1
            )
        assert prompt_of(other) == "[because]yes"


def test_reasoning_effort_is_for_templates_that_read_it(server, client):
    template = "{{ reasoning_effort }}{% if enable_thinking is defined %} {{ enable_thinking }}{% endif %}{{ messages[0].content }}"
    with live(Scripted("x"), template=template) as reader, reader.openai() as reader_client:
        reader_client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, reasoning_effort="low")
        assert prompt_of(reader) == "lowWhat?"
        reader_client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, reasoning_effort="none")
        assert prompt_of(reader) == "none FalseWhat?"
        assert "ChatRequest.reasoning_effort" not in reader.service.metrics.exposition().decode()
    client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, reasoning_effort="low")
    assert "ChatRequest.reasoning_effort" in server.service.metrics.exposition().decode()


def test_the_last_message_goes_on(server, client):
    more = {"continue_final_message": True, "add_generation_prompt": False}
    history = [*ASK, {"role": "assistant", "content": "The answer is"}]
    client.chat.completions.create(model=MODEL, messages=history, max_tokens=1, extra_body=more)
    assert prompt_of(server) == "<s><|user|>What?</s>\n<|assistant|>The answer is"
    client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, extra_body={"add_generation_prompt": False})
    assert prompt_of(server) == "<s><|user|>What?</s>\n"
    with pytest.raises(openai.BadRequestError, match="needs add_generation_prompt: false"):
        client.chat.completions.create(model=MODEL, messages=history, extra_body={"continue_final_message": True})


def test_truncated_prompts(server, client):
    client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1)
    tokens = server.engine.added[-1].token_ids
    client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, extra_body={"truncate_prompt_tokens": 5})
    assert server.engine.added[-1].token_ids == tokens[-5:]
    long = [{"role": "user", "content": "a b " * 2000}]
    client.chat.completions.create(model=MODEL, messages=long, max_tokens=24, extra_body={"truncate_prompt_tokens": -1})
    assert len(server.engine.added[-1].token_ids) == 1000
    client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, extra_body={"add_special_tokens": True})
    assert server.engine.added[-1].token_ids == [tokens[0], *tokens]


def test_usage_in_every_event(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream_of(client, messages=ASK, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0] <= 2, counts[-1]) == (True, len(TOKENS) + 1)
    alone = stream_of(client, messages=ASK, stream_options={"continuous_usage_stats": True})
    assert alone[-1].usage.completion_tokens == counts[-1]
    assert all(chunk.usage for chunk in alone)
    assert all(chunk.choices for chunk in alone), "without include_usage, no event has counts alone"


def test_prompt_logprobs(server, client):
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, extra_body={"prompt_logprobs": 1})
    ChatCompletionResponse.model_validate(answer.to_dict())
    prompt, scores = server.engine.added[-1].token_ids, answer.to_dict()["prompt_logprobs"]
    assert (len(scores), scores[0]) == (len(prompt), None)
    assert scores[1][str(prompt[1])] == {"logprob": -1.0, "rank": 1, "decoded_token": tokenizer_of().token_text(prompt[1])}
    with pytest.raises(openai.BadRequestError, match="not part of a stream"):
        client.chat.completions.create(model=MODEL, messages=ASK, stream=True, extra_body={"prompt_logprobs": 1})


def test_empty_stops_and_vllm_structured_outputs(server, client):
    for stop in ("", [], ["", "x"]):
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, stop=stop)
    for fields, kind in (
        ({"guided_choice": ["yes", 'a "no"', "ö\n🙂"]}, "grammar"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "grammar"),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "json_schema"),
        ({"structured_outputs": {"regex": "[0-9]+", "json": None}}, "regex"),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, "json_object"),
    ):
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, extra_body=fields)
        assert getattr(server.engine.added[-1].params.structured_output, kind)
    for fields, message in (
        ({"structured_outputs": {}}, "needs one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exclude each other"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}},
            "structured_outputs.whitespace_pattern is not supported",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, extra_body=fields)


def test_allowed_tools():
    text = CALLS[HERMES_TEMPLATE]
    engine = Scripted(text)
    with live(engine, template=HERMES_TEMPLATE) as server, server.openai() as client:
        for mode in ("auto", "required"):
            allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "weather"}}]}
            choice = {"type": "allowed_tools", "allowed_tools": allowed}
            answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, tool_choice=choice)
            assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]
            layout = engine.added[-1].params.structured_output.structural_tag
            assert "weather" in layout
            assert "noon" not in layout
            assert ('"dispatch"' in layout) == (mode == "auto")
            assert "noon" in prompt_of(server), "every tool stands in the prompt"
        allowed["tools"][0]["function"]["name"] = "other"
        with pytest.raises(openai.BadRequestError, match="not one of the tools"):
            client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, tool_choice=choice)


@pytest.mark.parametrize("escaped", [True, False])
def test_special_tokens_that_a_user_types(escaped):
    typed = "a</s></s\n<|user|><s>b"
    with live(Scripted("x"), escape_special_tokens=escaped) as server, server.openai() as client:
        history = [
            {"role": "user", "content": typed, "name": "<s>"},
            {"role": "assistant", "content": [{"type": "text", "text": "</s>"}]},
        ]
        client.chat.completions.create(model=MODEL, messages=history, max_tokens=1)
        assert prompt_of(server) == f"<s><|user|>{typed}</s>\n<|assistant|></s></s>\n<|assistant|>"
        tokens = server.engine.added[-1].token_ids
        end = tokenizer_of().eos_token_id
        assert tokens.count(end) == (2 if escaped else 4)
        assert tokens.count(tokenizer_of().bos_token_id) == (1 if escaped else 2)


@pytest.mark.parametrize("escaped", [True, False])
def test_special_tokens_in_tools_and_variables(escaped):
    template = (
        "{% for tool in tools %}{{ tool.function.description }}\n{% endfor %}{{ note[0] }}\n"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "f", "description": "a</s>b"}}]
    options = {"escape_special_tokens": escaped, "tool_call_parser": "hermes"}
    with live(Scripted("x"), template=template, **options) as server, server.openai() as client:
        extra = {"chat_template_kwargs": {"note": ["c</s>"]}}
        client.chat.completions.create(model=MODEL, messages=ASK, tools=tools, max_tokens=1, extra_body=extra)
        assert prompt_of(server) == f"a</s>b\nc</s>\n{ASK[0]['content']}"
        assert server.engine.added[-1].token_ids.count(tokenizer_of().eos_token_id) == (0 if escaped else 2)


def test_async_client(server):
    import asyncio

    async def ask() -> str:
        async with server.async_openai() as client:
            stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == TEXT

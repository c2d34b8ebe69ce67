# SPDX-License-Identifier: Apache-2.0
"""Every row of the table of fields: an accepted example is answered and counted, a refused one is a 400 that names it."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.serve.anthropic import schema as messages
from phalanx.serve.openai.schema import chat, completion, embeddings, fields, responses_request, tokenize
from phalanx.serve.openai.schema.field_table import FIELDS, Treatment, every_row, rows_of
from tests.support.serve_http_app import HERMES_TEMPLATE, MODEL, Scripted, live

pytestmark = pytest.mark.usefixtures("forked_python")

MODULES = (chat, completion, embeddings, fields, messages, responses_request, tokenize)
BODIES = {
    kind.__name__: kind
    for module in MODULES for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, fields.Body) and kind is not fields.Body
}  # fmt: skip
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT, TEXT, TOKENS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
VECTORS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
TURN = [{"role": "user", "content": "x"}]


def turn(role):
    return lambda block: {"messages": [{"role": role, "content": [block]}, *TURN]}


OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}

# Where an object of each body stands in a request: the path, the fields beside it, and a function from the object to more of them.
PLACES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "SampledRequest": (TEXT, {"prompt": "x"}, lambda body: body),
    "CompletionRequest": (TEXT, {"prompt": "x"}, lambda body: body),
    "ChatRequest": (CHAT, {"messages": [{"role": "user", "content": "x"}]}, lambda body: body),
    "PlainMessage": (CHAT, {"role": "user", "content": "x"}, lambda body: {"messages": [body]}),
    "AssistantMessage": (CHAT, {"role": "assistant", "content": "x"}, lambda body: {"messages": [body]}),
    "ToolMessage": (CHAT, {"role": "tool", "content": "x", "tool_call_id": "c"}, lambda body: {"messages": [body]}),
    "TextPart": (CHAT, {"type": "text", "text": "x"}, lambda body: {"messages": [{"role": "user", "content": [body]}]}),
    "RefusalPart": (
        CHAT, {"type": "refusal", "refusal": "no"}, lambda body: {"messages": [{"role": "assistant", "content": [body]}]},
    ),
    "RequestToolCall": (CHAT, CALL, lambda body: {"messages": [{"role": "assistant", "tool_calls": [body]}]}),
    "RequestFunctionCall": (
        CHAT, CALL["function"],
        lambda body: {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": body}]}]},
    ),
    "Tool": (CHAT, TOOL, lambda body: {"messages": [{"role": "user", "content": "x"}], "tools": [body]}),
    "Function": (
        CHAT, TOOL["function"],
        lambda body: {"messages": [{"role": "user", "content": "x"}], "tools": [{**TOOL, "function": body}]},
    ),
    "StreamOptions": (TEXT, {}, lambda body: {"prompt": "x", "stream": True, "stream_options": body}),
    "StructuredOutputs": (TEXT, {"regex": "a+"}, lambda body: {"prompt": "x", "structured_outputs": body}),
    "ResponsesRequest": (RESPONSES, {"input": "x"}, lambda body: body),
    "ResponsesStreamOptions": (RESPONSES, {}, lambda body: {"input": "x", "stream": True, "stream_options": body}),
    "TextConfig": (RESPONSES, {}, lambda body: {"input": "x", "text": body}),
    "ReasoningConfig": (RESPONSES, {}, lambda body: {"input": "x", "reasoning": body}),
    "InputMessage": (RESPONSES, {"role": "user", "content": "x"}, lambda body: {"input": [body]}),
    "InputText": (
        RESPONSES, {"type": "input_text", "text": "x"}, lambda body: {"input": [{"role": "user", "content": [body]}]},
    ),
    "FunctionCallItem": (
        RESPONSES, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, lambda body: {"input": [body]},
    ),
    "FunctionCallOutputItem": (RESPONSES, OUTPUT, lambda body: {"input": [body]}),
    "ReasoningItem": (RESPONSES, {"type": "reasoning"}, lambda body: {"input": [body, {"role": "user", "content": "x"}]}),
    "FunctionTool": (RESPONSES, {"type": "function", "name": "f"}, lambda body: {"input": "x", "tools": [body]}),
    "CountTokensRequest": (COUNT, {"messages": TURN}, lambda body: body),
    "MessagesRequest": (MESSAGES, {"messages": TURN, "max_tokens": 1}, lambda body: body),
    "TurnMessage": (MESSAGES, TURN[0], lambda body: {"messages": [body]}),
    "TextBlock": (MESSAGES, {"type": "text", "text": "x"}, turn("user")),
    "ThinkingBlock": (MESSAGES, {"type": "thinking", "thinking": "x"}, turn("assistant")),
    "RedactedThinkingBlock": (MESSAGES, {"type": "redacted_thinking"}, turn("assistant")),
    "ToolUseBlock": (MESSAGES, {"type": "tool_use", "id": "c", "name": "f", "input": {}}, turn("assistant")),
    "ToolResultBlock": (MESSAGES, {"type": "tool_result", "tool_use_id": "c", "content": "x"}, turn("user")),
    "CustomTool": (MESSAGES, {"name": "f", "input_schema": {}}, lambda body: {"messages": TURN, "tools": [body]}),
    "MessagesToolChoice": (
        MESSAGES, {"type": "auto"},
        lambda body: {"messages": TURN, "tools": [{"name": "f", "input_schema": {}}], "tool_choice": body},
    ),
    "ThinkingConfig": (MESSAGES, {"type": "enabled"}, lambda body: {"messages": TURN, "thinking": body}),
    "OutputConfig": (MESSAGES, {}, lambda body: {"messages": TURN, "output_config": body}),
    "EmbeddingsRequest": (VECTORS, {"input": "x"}, lambda body: body),
    "RerankRequest": (RERANK, {"query": "x", "documents": ["y"]}, lambda body: body),
    "ScoreRequest": (SCORE, {"text_1": "x", "text_2": "y"}, lambda body: body),
    "RerankDocument": (RERANK, {"text": "y"}, lambda body: {"query": "x", "documents": [body]}),
    "TokenizeRequest": (TOKENS, {"prompt": "x"}, lambda body: body),
}  # fmt: skip
OTHERS = [(body, name, row) for body, name, row in every_row() if row.treatment is not Treatment.HONOURED]


@pytest.fixture(scope="module")
def served():
    with live(Scripted("y"), template=HERMES_TEMPLATE) as server, server.client() as http:
        yield server, http


def post(http, body: str, **more):
    path, base, request = PLACES[body]
    if path == RESPONSES:
        limit = {"max_output_tokens": 1}
    else:
        limit = {} if path in (TOKENS, COUNT, VECTORS, RERANK, SCORE) else {"max_tokens": 1}
    return http.post(path, json={"model": MODEL, **limit, **request({**base, **more})})


@pytest.mark.parametrize(("body", "name", "row"), OTHERS, ids=[f"{body}.{name}" for body, name, _ in OTHERS])
def test_what_is_not_declared(served, body, name, row):
    _, http = served
    answer = post(http, body, **{name: row.example})
    if row.treatment is Treatment.ACCEPTED:
        assert answer.status_code == 200, answer.text
        counted = [
            line for line in http.get("/metrics").text.splitlines() if "fields_without_effect" in line and f'.{name}"' in line
        ]
        assert counted
        assert post(http, body, **{name: None}).status_code == 200
    else:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"].rpartition(".")[2]) == ("unsupported_parameter", name)
        assert row.meaning in error["message"]
        for value in (None, *row.neutral):
            assert post(http, body, **{name: value}).status_code == 200, value


@pytest.mark.parametrize("body", sorted(PLACES))
def test_unknown_names_and_nulls(served, body):
    _, http = served
    answer = post(http, body, frobnicate=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unknown_parameter"
    assert "frobnicate" in answer.json()["error"]["message"]
    assert post(http, body, frobnicate=None).status_code == 200


def test_null_is_absent_for_every_declared_field(served):
    _, http = served
    for body in PLACES:
        kind = BODIES[body]
        optional = [field.alias or name for name, field in kind.model_fields.items() if not field.is_required()]
        optional = [name for name in optional if name not in PLACES[body][1]]
        answer = post(http, body, **dict.fromkeys(optional))
        assert answer.status_code == 200, (body, answer.text)
    answer = http.post("/v1/completions", json={"model": None, "prompt": "x"})
    assert answer.json()["error"]["message"] == "model: this field is required"


def test_the_table_has_every_declared_field_and_no_other():
    assert set(FIELDS) == set(BODIES)
    for name, kind in BODIES.items():
        declared = {field.alias or field_name for field_name, field in kind.model_fields.items()}
        rows = rows_of(kind)
        assert {field for field, row in rows.items() if row.treatment is Treatment.HONOURED} == declared, name
    assert {body for body, _, _ in OTHERS} <= set(PLACES)


def test_examples_are_not_neutral():
    for body, name, row in OTHERS:
        if row.treatment is Treatment.REFUSED:
            assert not row.takes(row.example), (body, name)
            assert all(row.takes(value) for value in row.neutral)
        assert row.meaning
        assert not row.meaning.endswith(".")

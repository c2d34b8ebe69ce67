# SPDX-License-Identifier: Apache-2.0
"""Errors name the fields that the endpoint has."""

from __future__ import annotations

import pytest

from tests.support.serve_http_app import MODEL

CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
FIELDS = {CHAT: "messages", RESPONSES: "input", COMPLETIONS: "prompt"}


def body_of(path: str, text: str, **more) -> dict:
    value = [{"role": "user", "content": text}] if path == CHAT else text
    return {"model": MODEL, FIELDS[path]: value, **more}


def error_of(http, path: str, body: dict) -> dict:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [5_000, 100_000], ids=["small", "large body"])
def test_too_much_text(http, path, words, stream):
    error = error_of(http, path, body_of(path, "ab " * words, stream=stream))
    assert (error["code"], error["param"]) == ("context_length_exceeded", FIELDS[path])


def formatted(schema: object) -> dict:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}


@pytest.mark.parametrize("schema", [7, {"type": "nothing"}], ids=["no schema", "a schema that cannot be compiled"])
def test_a_bad_schema_of_a_response(http, schema):
    error = error_of(http, RESPONSES, {"model": MODEL, "input": "x", **formatted(schema)})
    assert error["param"] == "text.format.schema"
    assert error["message"].startswith("text.format.schema: ")
    assert "response_format" not in error["message"]


@pytest.mark.parametrize("field", ["response_format", "messages", "prompt"])
def test_a_field_of_another_endpoint_keeps_its_name(http, field):
    error = error_of(http, RESPONSES, body_of(RESPONSES, "x", **{field: {"id": "pmpt_1"}}))
    assert error["param"] == field
    assert error["code"] in ("unknown_parameter", "unsupported_parameter")


def test_a_bad_schema_of_a_chat(http):
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    error = error_of(http, CHAT, body_of(CHAT, "x", response_format=format_))
    assert error["param"] == "response_format"


@pytest.mark.parametrize("role", ["function", "", 7, ["user"]])
def test_an_unknown_role_names_all_roles(http, role):
    error = error_of(http, CHAT, {"model": MODEL, "messages": [{"role": role, "content": "x"}]})
    assert error["param"] == "messages[0].role"
    assert error["message"] == "messages[0].role: Input should be 'system', 'developer', 'user', 'assistant' or 'tool'"


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": None, "content": "x"}])
def test_a_message_without_a_role(http, message):
    error = error_of(http, CHAT, {"model": MODEL, "messages": [message]})
    assert error["message"] == "messages[0].role: this field is required"

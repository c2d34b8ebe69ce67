# SPDX-License-Identifier: Apache-2.0
"""`phalanx serve` with functions and a `response_format`: the model calls, or answers in the format, by the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from phalanx.config.locate import DEMO
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_processes import MODEL, rank_server

pytestmark = pytest.mark.usefixtures("forked_python")

TEMPLATE = Path(__file__).parents[2] / "scripts" / "clients" / "tools.jinja"
ASK = [{"role": "user", "content": "Does it rain?"}]
ANSWERS = 4


class Weather(BaseModel):
    """Tells the weather."""

    city: Literal["Oslo", "Bergen"]


class Report(BaseModel):
    rains: bool
    wind: Literal["weak", "strong"]


SCHEMA = {"name": "Report", "schema": {**Report.model_json_schema(), "additionalProperties": False}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    flags = ("--chat_template", str(TEMPLATE), "--tool_call_parser", "hermes")
    with rank_server(tmp_path_factory.mktemp("served"), DEMO, *flags) as running, running.wait_ready().openai() as openai_client:
        yield openai_client


def without(first: str) -> dict[str, int]:
    """A logit_bias with which the model begins with this character, or writes it elsewhere, only where the grammar leaves nothing
    else."""
    tokenizer = Tokenizer.load(DEMO)
    return {str(i): -100 for i in range(tokenizer.vocab_size) if tokenizer.token_text(i).startswith(first)}


@pytest.mark.parametrize("strict", [True, False])
def test_parse_reads_calls_and_answers(client, strict):
    tool = openai.pydantic_function_tool(Weather)
    assert tool["function"]["strict"] is True
    fields = {"messages": ASK, "response_format": Report, "temperature": 1.0, "max_tokens": 120, "parallel_tool_calls": False}
    ask = client.chat.completions.parse
    if not strict:  # `parse` takes strict functions only
        tool["function"]["strict"] = False
        fields["response_format"] = {"type": "json_schema", "json_schema": SCHEMA}
        ask = client.chat.completions.create
    for seed in range(ANSWERS):
        answer = ask(model=MODEL, seed=seed, tools=[tool], logit_bias=without("<"), **fields).choices[0]
        assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
        Report.model_validate_json(answer.message.content)
        call = ask(model=MODEL, seed=seed, tools=[tool], logit_bias=without("{"), **fields).choices[0]
        assert (call.finish_reason, call.message.content) == ("tool_calls", None)
        (function,) = [one.function for one in call.message.tool_calls]
        assert function.name == "Weather"
        assert Weather.model_validate_json(function.arguments).city in ("Oslo", "Bergen")
        if strict:
            assert isinstance(answer.message.parsed, Report)
            assert isinstance(function.parsed_arguments, Weather)


def test_responses_have_calls_and_answers(client):
    tool = openai.pydantic_function_tool(Weather)["function"]
    fields = {
        "input": ASK, "tools": [{"type": "function", **tool}], "text": {"format": {"type": "json_schema", **SCHEMA}},
        "parallel_tool_calls": False, "max_output_tokens": 120,
    }  # fmt: skip
    answer = client.responses.create(model=MODEL, extra_body={"logit_bias": without("<")}, **fields)
    assert (answer.status, [item.type for item in answer.output]) == ("completed", ["message"])
    Report.model_validate_json(answer.output_text)
    call = client.responses.create(model=MODEL, extra_body={"logit_bias": without("{")}, **fields)
    assert (call.status, [item.type for item in call.output]) == ("completed", ["function_call"])
    Weather.model_validate_json(call.output[0].arguments)

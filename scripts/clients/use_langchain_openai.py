# SPDX-License-Identifier: Apache-2.0
"""langchain-openai: text, streams, tools with history, typed outputs, over chats and over responses; fields of its models."""

from __future__ import annotations

import os
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Choice(BaseModel):
    """A choice."""

    color: Literal["red", "green"]


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


to = {"model": os.environ["MODEL"], "base_url": os.environ["BASE_URL"], "api_key": "none", "max_retries": 0, "max_tokens": 100}
for responses in (False, True):
    model = ChatOpenAI(**to, use_responses_api=responses)
    ask = HumanMessage("Weather?")
    answer = model.invoke([ask])
    model.invoke([ask, answer, ask])
    assert list(model.stream([ask]))
    tooled = model.bind_tools([weather], tool_choice="any")
    called = tooled.invoke([ask])
    model.bind_tools([weather]).invoke([ask, called, ToolMessage("7", tool_call_id=called.tool_calls[0]["id"])])
    assert model.with_structured_output(Choice, method="json_schema").invoke([ask]).color
    assert model.with_structured_output(Choice, method="function_calling").invoke([ask]).color
    strict = model.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False)
    assert len(strict.invoke([ask]).tool_calls) == 1
    tuned = ChatOpenAI(
        **to, use_responses_api=responses, temperature=0.5, top_p=0.9, reasoning_effort="low", verbosity="low", service_tier="flex",
        store=True, stream_usage=True, extra_body={"top_k": 5, "min_p": 0.1},
    )  # fmt: skip
    history = [
        SystemMessage("Be brief."),
        ask,
        AIMessage("It rains.", additional_kwargs={"reasoning_content": "hm"}, name="a"),
        ask,
    ]
    tuned.invoke(history)
    chunks = list(tuned.stream(history))
    assert any(chunk.usage_metadata for chunk in chunks)

chats = ChatOpenAI(**to, seed=1, n=2, logprobs=True, top_logprobs=2, stop_sequences=[], frequency_penalty=0.1, presence_penalty=0.1)
assert chats.invoke("Hello?").response_metadata["logprobs"]
assert ChatOpenAI(**to, extra_body={"guided_choice": ["red", "green"]}).invoke("Which?").content in ("red", "green")
chain = ChatOpenAI(**to, use_responses_api=True, use_previous_response_id=True)
first = chain.invoke([ask])
chain.invoke([ask, first, ask])

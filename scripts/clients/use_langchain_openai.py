# SPDX-License-Identifier: Apache-2.0
"""langchain-openai: text, streams, tools with history, typed outputs, over chats and over responses."""

from __future__ import annotations

import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
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


for responses in (False, True):
    model = ChatOpenAI(
        model=os.environ["MODEL"], base_url=os.environ["BASE_URL"], api_key="none", max_retries=0, max_tokens=100,
        use_responses_api=responses,
    )  # fmt: skip
    ask = HumanMessage("Weather?")
    answer = model.invoke([ask])
    model.invoke([ask, answer, ask])
    assert list(model.stream([ask]))
    tooled = model.bind_tools([weather], tool_choice="any")
    called = tooled.invoke([ask])
    model.bind_tools([weather]).invoke([ask, called, ToolMessage("7", tool_call_id=called.tool_calls[0]["id"])])
    assert model.with_structured_output(Choice, method="json_schema").invoke([ask]).color
    assert model.with_structured_output(Choice, method="function_calling").invoke([ask]).color

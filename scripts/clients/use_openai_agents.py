# SPDX-License-Identifier: Apache-2.0
"""openai-agents: an agent with a tool and a typed output, over responses (its default) and over chats."""

from __future__ import annotations

import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)


class Choice(BaseModel):
    color: Literal["red", "green"]


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    model = kind(model=os.environ["MODEL"], openai_client=client)
    settings = ModelSettings(max_tokens=100, tool_choice="required", temperature=0.0)
    agent = Agent(name="a", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)
    result = Runner.run_sync(agent, "Weather?", max_turns=3)
    assert any(item.type == "tool_call_output_item" for item in result.new_items)
    typed = Agent(name="b", model=model, output_type=Choice, model_settings=ModelSettings(max_tokens=100))
    assert Runner.run_sync(typed, "Which?").final_output.color
    # An answer that its limit of tokens ends is an error for this library, so these are questions that the demo model knows.
    plain = Agent(name="c", model=model, model_settings=ModelSettings(temperature=0.0))
    first = Runner.run_sync(plain, "What is Phalanx?")
    Runner.run_sync(plain, [*first.to_input_list(), {"role": "user", "content": "What is a rank?"}])
    if kind is OpenAIResponsesModel:
        Runner.run_sync(plain, "What is a rank?", previous_response_id=first.last_response_id)

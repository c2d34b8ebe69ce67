# SPDX-License-Identifier: Apache-2.0
"""pydantic-ai: tools, typed outputs in two ways, streams and histories, over responses and over chats."""

from __future__ import annotations

import asyncio
import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="none")


class Choice(BaseModel):
    color: Literal["red", "green"]


async def use(kind: type) -> None:
    model = kind(os.environ["MODEL"], provider=provider)
    plain = Agent(model, instructions="Be brief.", model_settings={"max_tokens": 8})
    first = await plain.run("One?")
    await plain.run("Two?", message_history=first.all_messages())
    async with plain.run_stream("Three?") as stream:
        assert await stream.get_output() is not None
    for output in (Choice, NativeOutput(Choice)):
        typed = Agent(model, output_type=output, model_settings={"max_tokens": 100})
        assert (await typed.run("Which?")).output.color
    tooled = Agent(model, output_type=Choice, model_settings={"max_tokens": 100, "temperature": 0.0}, retries=3)

    @tooled.tool_plain
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        return f"It rains in {city}."

    answer = await tooled.run("Weather?")
    assert answer.output.color


for kind in (OpenAIResponsesModel, OpenAIChatModel):
    asyncio.run(use(kind))

# SPDX-License-Identifier: Apache-2.0
"""The official SDK: chats and responses; text, streams, tools, schemas, and a chain of three responses."""

from __future__ import annotations

import os
from typing import Literal

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
MODEL, ASK = os.environ["MODEL"], [{"role": "user", "content": "Hello?"}]
CITY = {"city": {"enum": ["Oslo", "Rome"]}}
PARAMETERS = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}


class Choice(BaseModel):
    color: Literal["red", "green"]


chat = client.chat.completions
answer = chat.create(model=MODEL, messages=ASK, max_tokens=8)
assert answer.usage.completion_tokens <= 8
chunks = list(chat.create(model=MODEL, messages=ASK, max_tokens=8, stream=True, stream_options={"include_usage": True}))
assert chunks[-1].usage.completion_tokens <= 8
tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
called = chat.create(model=MODEL, messages=ASK, tools=[tool], tool_choice="required", max_tokens=100).choices[0].message
result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "7"}
chat.create(model=MODEL, messages=[*ASK, called, result], tools=[tool], max_tokens=8)
assert chat.parse(model=MODEL, messages=ASK, response_format=Choice, max_tokens=50).choices[0].message.parsed.color

responses = client.responses
first = responses.create(model=MODEL, input="One?", max_output_tokens=8)
second = responses.create(model=MODEL, input="Two?", previous_response_id=first.id, max_output_tokens=8)
third = responses.create(model=MODEL, input="Three?", previous_response_id=second.id, max_output_tokens=8)
assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
events = [event.type for event in responses.create(model=MODEL, input="Hello?", stream=True, max_output_tokens=8)]
assert events[0] == "response.created"
assert events[-1] in ("response.completed", "response.incomplete")
function = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
tools = responses.create(model=MODEL, input="Hello?", tools=[function], tool_choice="required", max_output_tokens=100)
call = next(item for item in tools.output if item.type == "function_call")
output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
responses.create(model=MODEL, input=[output], previous_response_id=tools.id, tools=[function], max_output_tokens=8)
responses.create(model=MODEL, input=[*ASK, *tools.output, output], tools=[function], max_output_tokens=8)
assert responses.parse(model=MODEL, input="Hello?", text_format=Choice, max_output_tokens=50).output_parsed.color
assert responses.retrieve(first.id).id == first.id
responses.delete(first.id)

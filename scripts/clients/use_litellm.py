# SPDX-License-Identifier: Apache-2.0
"""litellm: chats, streams, tools with the echo of its own messages, schemas, responses."""

from __future__ import annotations

import os
from typing import Literal

import litellm
from pydantic import BaseModel

to = {"model": f"openai/{os.environ['MODEL']}", "api_base": os.environ["BASE_URL"], "api_key": "none", "max_retries": 0}
ASK = [{"role": "user", "content": "Hello?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}


class Choice(BaseModel):
    color: Literal["red", "green"]


answer = litellm.completion(messages=ASK, max_tokens=8, **to).choices[0].message
litellm.completion(messages=[*ASK, answer, *ASK], max_tokens=8, **to)
litellm.completion(messages=[*ASK, answer.model_dump(), *ASK], max_tokens=8, **to)
assert list(litellm.completion(messages=ASK, max_tokens=8, stream=True, stream_options={"include_usage": True}, **to))
tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
called = litellm.completion(messages=ASK, tools=[tool], tool_choice="required", max_tokens=100, **to).choices[0].message
result = {"role": "tool", "name": "weather", "tool_call_id": called.tool_calls[0].id, "content": "7"}
litellm.completion(messages=[*ASK, called, result], tools=[tool], max_tokens=8, **to)
litellm.completion(messages=ASK, response_format=Choice, max_tokens=50, **to)
first = litellm.responses(input="Hello?", max_output_tokens=8, **to)
assert first.output

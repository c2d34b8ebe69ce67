# SPDX-License-Identifier: Apache-2.0
"""litellm: chats, streams, tools with the echo of its own messages, schemas, responses; by its names `openai/` and `hosted_vllm/`,
which send different fields."""

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
assert litellm.responses(input="And?", previous_response_id=first.id, max_output_tokens=8, **to).output
assert list(litellm.responses(input="Hello?", max_output_tokens=8, stream=True, **to))

# What applications keep in a history: reasoning, places of calls, marks for caches, and what litellm adds itself.
call = {**called.tool_calls[0].model_dump(), "index": 0}
cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
history = [
    {"role": "system", "content": [cached]},
    {**ASK[0], "cache_control": {"type": "ephemeral"}},
    {
        "role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "thinking_blocks": [],
        "provider_specific_fields": {"refusal": None}, "annotations": [], "audio": None, "function_call": None,
    },
    result,
]  # fmt: skip
for provider in ("openai", "hosted_vllm"):
    to["model"] = f"{provider}/{os.environ['MODEL']}"
    litellm.completion(
        messages=history,
        tools=[tool],
        max_tokens=8,
        allowed_openai_params=["reasoning_effort"],
        reasoning_effort="low",
        user="me",
        seed=1,
        stop=[],
        extra_body={"guided_choice": ["a"], "top_k": 5},
        **to,
    )

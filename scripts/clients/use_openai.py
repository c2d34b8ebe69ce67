# SPDX-License-Identifier: Apache-2.0
"""The official SDK: chats and responses; text, streams, tools, schemas, a chain of three responses; and, in `extra_body`, the
fields that people who come from vLLM send."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Literal

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
assert [item.role for item in responses.input_items.list(first.id)] == ["user"]
with responses.create(model=MODEL, input="Hello?", stream=True, extra_body={"ignore_eos": True}) as stream:
    running = next(iter(stream)).response
    assert responses.cancel(running.id).status == "cancelled"
responses.create(
    model=MODEL, input="Hello?", max_output_tokens=8, reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"},
    service_tier="flex", store=False, metadata={"a": "b"}, truncation="disabled", include=["reasoning.encrypted_content"],
    prompt_cache_key="k", user="me",
)  # fmt: skip
responses.delete(first.id)
assert [model.id for model in client.models.list()] == [client.models.retrieve(MODEL).id]


def say(max_tokens: int = 60, **extra: Any) -> Any:
    """An answer to a chat with these fields, and its text."""
    answer = chat.create(model=MODEL, messages=ASK, max_tokens=max_tokens, extra_body=extra)
    return answer, answer.choices[0].message.content


chat.create(
    model=MODEL, messages=ASK, max_tokens=8, reasoning_effort="low", verbosity="low", service_tier="flex", store=True, stop="",
    metadata={"a": "b"}, prompt_cache_key="k", user="me", seed=1, logprobs=True, top_logprobs=2, logit_bias={"5": -100}, n=2,
)  # fmt: skip
chat.create(model=MODEL, messages=ASK, max_tokens=8, stop=[])
options: Any = {"include_usage": True, "continuous_usage_stats": True}
counted = list(chat.create(model=MODEL, messages=ASK, max_tokens=8, stream=True, stream_options=options))
assert all(chunk.usage is not None for chunk in counted)
allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
other = {"type": "function", "function": {"name": "noon", "parameters": {"type": "object", "properties": {}}}}
choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
called = chat.create(model=MODEL, messages=ASK, tools=[tool, other], tool_choice=choice, max_tokens=100).choices[0].message
assert {call.function.name for call in called.tool_calls} == {"weather"}

assert say(guided_choice=["red", "green"])[1] in ("red", "green")
assert re.fullmatch(r"[a-z]{3}\d", say(guided_regex=r"[a-z]{3}\d")[1])
assert set(json.loads(say(guided_json=PARAMETERS)[1])) == {"city"}
assert set(json.loads(say(guided_json=json.dumps(PARAMETERS))[1])) == {"city"}
assert say(guided_grammar='root ::= "a" | "b"')[1] in ("a", "b")
assert say(structured_outputs={"choice": ["red", "green"]})[1] in ("red", "green")
assert re.fullmatch("[a-z]{3}", say(structured_outputs={"regex": "[a-z]{3}"})[1])
assert set(json.loads(say(structured_outputs={"json": PARAMETERS})[1])) == {"city"}
assert say(structured_outputs={"grammar": 'root ::= "a" | "b"'})[1] in ("a", "b")
length = say(8)[0].usage.prompt_tokens
assert say(8, truncate_prompt_tokens=4)[0].usage.prompt_tokens == 4
assert say(8, add_special_tokens=True)[0].usage.prompt_tokens >= length
assert len(say(8, prompt_logprobs=1)[0].prompt_logprobs) == length
say(8, top_k=5, min_p=0.1, repetition_penalty=1.1, min_tokens=2, ignore_eos=True, stop_token_ids=[5], skip_special_tokens=False)
say(8, include_reasoning=False, chat_template_kwargs={"enable_thinking": False}, priority=1, request_id="r")
begun = [*ASK, {"role": "assistant", "content": "A rank is"}]
extra = {"continue_final_message": True, "add_generation_prompt": False}
assert chat.create(model=MODEL, messages=begun, max_tokens=8, extra_body=extra).choices[0].message.content
bare = client.with_options(base_url=os.environ["BASE_URL"].removesuffix("/v1"))
tokens: Any = bare.post("/tokenize", body={"model": MODEL, "messages": ASK}, cast_to=object)
assert tokens["count"] == length
text: Any = bare.post("/detokenize", body={"model": MODEL, "tokens": tokens["tokens"]}, cast_to=object)
assert "Hello?" in text["prompt"]

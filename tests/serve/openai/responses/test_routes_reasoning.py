# SPDX-License-Identifier: Apache-2.0
"""Models that think through `/v1/responses`, with the official client over a scripted engine."""

from __future__ import annotations

import pytest

from phalanx.serve.openai.schema.responses_object import ResponseObject, ResponseStreamEvent
from tests.support.serve_http_app import MODEL, Scripted, live
from tests.support.serve_output_checkpoints import OUTPUT_FAMILIES, tokenizer_of_family
from tests.support.serve_reasoning import FINAL, ONE_CALL, THINKS, THOUGHT, served

pytestmark = pytest.mark.usefixtures("forked_python")

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
SHOWS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def texts_of(response):
    """The type of each item, and its text."""
    return [(item.type, item.content[0].text) for item in response.output]


def streamed(client, **fields):
    with client.responses.create(model=MODEL, stream=True, **fields) as stream:
        events = list(stream)
    for event in events:
        ResponseStreamEvent.model_validate(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize("family", THINKS)
def test_reasoning(family):
    with served(family, THINKS[family] + FINAL.get(family, "It rains.")) as (_, client):
        fields = {"input": "What?", "reasoning": {"effort": "low"}}
        answer = client.responses.create(model=MODEL, **fields)
        ResponseObject.model_validate(answer.to_dict())
        assert texts_of(answer) == [("reasoning", THOUGHT), ("message", "It rains.")]
        assert answer.output[0].content[0].type == "reasoning_text"
        assert [item.status for item in answer.output] == ["completed", "completed"]
        assert answer.output_text == "It rains."
        thought = tokenizer_of_family(family).encode(THOUGHT, add_special_tokens=False)
        tokens = answer.usage.output_tokens_details.reasoning_tokens
        assert len(thought) <= tokens <= len(thought) + 2  # and the line breaks beside the tags
        assert tokens < answer.usage.output_tokens

        events = streamed(client, **fields)
        kinds = [event.type.removeprefix("response.") for event in events]
        assert [kind for kind in kinds if not kind.endswith(".delta")] == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done", "output_item.done",
            "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        deltas = [event for event in events if event.type == "response.reasoning_text.delta"]
        assert len(deltas) > 3
        assert "".join(event.delta for event in deltas) == THOUGHT
        done = next(event for event in events if event.type == "response.reasoning_text.done")
        assert (done.text, done.output_index, done.content_index) == (THOUGHT, 0, 0)
        items = [event.item for event in events if event.type == "response.output_item.done"]
        assert {event.item_id for event in deltas} == {done.item_id} == {items[0].id}
        final = events[-1].response
        assert final.output == items
        assert texts_of(final) == texts_of(answer)
        assert final.usage == answer.usage


def test_reasoning_before_a_call():
    with served("gpt_oss", THINKS["gpt_oss"] + ONE_CALL) as (_, client):
        answer = client.responses.create(model=MODEL, input="What?", tools=[WEATHER])
        assert [item.type for item in answer.output] == ["reasoning", "function_call"]
        assert answer.output[0].content[0].text == THOUGHT


def test_reasoning_that_is_cut_off():
    with served("qwen3", THINKS["qwen3"] + "It rains.") as (_, client):
        events = streamed(client, input="What?", max_output_tokens=4)
        response = events[-1].response
        assert (response.status, [item.status for item in response.output]) == ("incomplete", ["incomplete"])
        assert response.output[0].type == "reasoning"
        assert THOUGHT.startswith(response.output[0].content[0].text.strip())
        assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_reasoning_of_an_earlier_turn():
    """It is given to the chat template with its message, from the store and from the items that a client sends back."""
    tokenizer = tokenizer_of_family.__wrapped__("qwen3")
    tokenizer.set_chat_template(SHOWS_REASONING, origin="test")
    engine = Scripted(THINKS["qwen3"] + "It rains.", tokenizer=tokenizer, eos=OUTPUT_FAMILIES["qwen3"].eos)
    with live(engine, tokenizer=tokenizer, reasoning_parser="qwen3") as server, server.openai() as client:
        first = client.responses.create(model=MODEL, input="One?")
        turn = f"<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n<think>\n{THOUGHT}\n</think>\n\nIt rains.<|im_end|>\n"
        one, two = ({"role": "user", "content": text} for text in ("One?", "Two?"))
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        for fields in (
            {"input": "Two?", "previous_response_id": first.id},
            {"input": [one, *first.output, two]},
            {"input": [one, *references, two]},
        ):
            second = client.responses.create(model=MODEL, **fields)
            prompt = tokenizer.decode(server.engine.added[-1].token_ids, skip_special_tokens=False)
            assert prompt.removeprefix("<s>") == f"{turn}<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
            assert texts_of(second) == texts_of(first)
        listed = list(client.responses.input_items.list(second.id, order="asc"))
        assert [item.type for item in listed] == ["message", "reasoning", "message", "message"]

# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses` with the official client."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from phalanx.serve.openai.body import LARGE_BYTES
from phalanx.serve.openai.responses import conversation, stored_items
from phalanx.serve.openai.schema.responses_object import DeletedResponse, InputItemList, ResponseObject, ResponseStreamEvent
from tests.serve.openai.conftest import TEXT
from tests.support.serve_http_app import HERMES_TEMPLATE, MODEL, Scripted, live, tokenizer_of

pytestmark = pytest.mark.usefixtures("forked_python")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
WEATHER = {
    "type": "function", "name": "weather", "description": "Tells the weather.", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


def prompt_of(server) -> str:
    return tokenizer_of().decode(server.engine.added[-1].token_ids, skip_special_tokens=False)


def events_of(client, **fields):
    with client.responses.create(model=MODEL, stream=True, **fields) as stream:
        events = list(stream)
    for event in events:
        ResponseStreamEvent.model_validate(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress"
    return events


def test_text(server, client):
    metadata = {"a": "b", "c": None}
    answer = client.responses.create(model=MODEL, input="What?", instructions="Be brief.", metadata=metadata, user="me")
    ResponseObject.model_validate(answer.to_dict())
    assert (answer.output_text, answer.status, answer.metadata) == (TEXT, "completed", {"a": "b"})
    assert answer.usage.output_tokens == len(tokenizer_of().encode(TEXT, add_special_tokens=False)) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert prompt_of(server) == "<s><|system|>Be brief.</s>\n<|user|>What?</s>\n<|assistant|>"
    assert [item.type for item in answer.output] == ["message"]


def test_stream(client):
    events = events_of(client, input="What?")
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    final = events[-1].response
    ResponseObject.model_validate(final.to_dict())
    assert final.output_text == TEXT == events[-4].text
    assert events[2].item.content == []
    assert client.responses.retrieve(final.id) == final
    with client.responses.stream(model=MODEL, input="What?") as helper:
        assert helper.until_done().get_final_response().output_text == TEXT


def test_schema(server, client):
    answer = client.responses.create(model=MODEL, input="What?", text={"format": FORMAT}, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.text.format.to_dict() == FORMAT
    assert json.loads(server.engine.added[-1].params.structured_output.json_schema) == SCHEMA
    client.responses.create(model=MODEL, input="What?", text={"format": {"type": "json_object"}}, max_output_tokens=1)
    assert server.engine.added[-1].params.structured_output.json_object


def test_logprobs(client):
    answer = client.responses.create(model=MODEL, input="What?", top_logprobs=1, include=["message.output_text.logprobs"])
    ResponseObject.model_validate(answer.to_dict())
    entries = answer.output[0].content[0].logprobs
    assert "".join(one.token for one in entries if one.token != "</s>") == TEXT
    assert (entries[0].logprob, len(entries[0].top_logprobs)) == (-1.0, 1)
    events = events_of(client, input="What?", include=["message.output_text.logprobs"])
    streamed = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert "".join(streamed).removesuffix("</s>") == TEXT


def test_an_empty_answer_is_gone_on_from():
    with live(Scripted("", "More."), template=HERMES_TEMPLATE) as server, server.openai() as client:
        first = client.responses.create(model=MODEL, input="One?")
        assert first.output_text == ""
        assert client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id).output_text == "More."


def test_chain_of_three(server, client):
    first = client.responses.create(model=MODEL, input="One?", instructions="Only once.")
    second = client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id)
    client.responses.delete(first.id)
    third = client.responses.create(
        model=MODEL, previous_response_id=second.id,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Three?"}]}],
    )  # fmt: skip
    turns = "".join(f"<|user|>{text}</s>\n<|assistant|>{TEXT}</s>\n" for text in ("One?", "Two?"))
    assert prompt_of(server) == f"<s>{turns}<|user|>Three?</s>\n<|assistant|>"
    assert third.previous_response_id == second.id
    with pytest.raises(openai.BadRequestError, match="no stored response") as error:
        client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    assert error.value.code == "previous_response_not_found"
    items = client.responses.input_items.list(third.id, order="asc", limit=2)
    InputItemList.model_validate(items.to_dict())
    assert [item.role for item in items.data] == ["user", "assistant"]
    assert [item.id for item in client.responses.input_items.list(third.id, order="asc", limit=2)][2:] != []
    last = next(iter(client.responses.input_items.list(third.id)))
    assert last.content[0].text == "Three?"
    reference = [{"type": "item_reference", "id": third.output[0].id}, {"role": "user", "content": "More"}]
    client.responses.create(model=MODEL, input=reference)
    assert prompt_of(server) == f"<s><|assistant|>{TEXT}</s>\n<|user|>More</s>\n<|assistant|>"


def test_tools():
    engine = Scripted(CALLS)
    with live(engine, template=HERMES_TEMPLATE) as server, server.openai() as client:
        answer = client.responses.create(model=MODEL, input="Weather?", tools=[WEATHER])
        ResponseObject.model_validate(answer.to_dict())
        assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
        calls = answer.output[1:]
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Köln"}, {"city": "Oslo"}]
        assert answer.tools[0].to_dict() == WEATHER

        events = events_of(client, input="Weather?", tools=[WEATHER])
        texts = {}
        for event in events:
            if event.type == "response.function_call_arguments.delta":
                texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        assert list(texts.values()) == [call.arguments for call in calls]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.status for item in done] == ["completed"] * 3

        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"{i} degrees"} for i, call in enumerate(calls)
        ]
        for fields in (
            {"input": outputs, "previous_response_id": answer.id},
            {"input": [{"role": "user", "content": "Weather?"}, *answer.output, *outputs]},
        ):
            client.responses.create(model=MODEL, tools=[WEATHER], max_output_tokens=1, **fields)
            prompt = prompt_of(server)
            assert prompt.count("<|im_start|>assistant\n") == 2, "what was written and called in one turn is one message"
            assert 'I look.<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}' in prompt
            assert "1 degrees" in prompt
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
        for choice in ("required", {"type": "function", "name": "weather"}, allowed):
            forced = client.responses.create(model=MODEL, input="x", tools=[WEATHER], tool_choice=choice, max_output_tokens=1)
            assert engine.added[-1].params.structured_output.structural_tag
            assert forced.to_dict()["tool_choice"] == choice


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"extra_body": {"stop": ["Oslo"]}}, "incomplete", None),
        ({"extra_body": {"stop_token_ids": tokenizer_of().encode("ö", add_special_tokens=False)[:1]}}, "incomplete", None),
        ({"max_output_tokens": 70}, "incomplete", "max_output_tokens"),
        ({"extra_body": {"stop": ["XXX"]}}, "completed", None),
    ],
)
def test_a_call_that_is_cut_off_is_incomplete(fields, status, reason):
    with live(Scripted(CALLS), template=HERMES_TEMPLATE) as server, server.openai() as client:
        answer = client.responses.create(model=MODEL, input="Weather?", tools=[WEATHER], **fields)
        ResponseObject.model_validate(answer.to_dict())
        details = answer.incomplete_details
        assert (answer.status, details and details.reason) == (status, reason)
        assert [item.status for item in answer.output] == ["completed"] * (len(answer.output) - 1) + [status]
        last = events_of(client, input="Weather?", tools=[WEATHER], **fields)[-1]
        assert (last.type, last.response.status) == (f"response.{status}", status)


def test_reasoning_and_echoes_are_taken():
    template = "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}]{% endfor %}"
    history = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": "One?", "status": None},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}],
         "encrypted_content": "x"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "final_answer",
         "content": [{"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []},
                     {"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Two?"},
    ]  # fmt: skip
    with live(Scripted("x"), template=template) as server, server.openai() as client:
        answer = client.responses.create(
            model=MODEL, input=history, instructions="Think.", reasoning={"effort": "low", "summary": "auto"}, service_tier="flex",
            prompt_cache_key="k", text={"verbosity": "low"}, truncation="disabled", background=False, max_tool_calls=3,
            include=["reasoning.encrypted_content"], max_output_tokens=1,
        )  # fmt: skip
        assert answer.reasoning.effort == "low"
        assert prompt_of(server) == "[system::Think.\n\nBe brief.][user::One?][assistant:hm:Yes.\nNo.][user::Two?]"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "built-in tools are not built; functions are ('web_search')"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "built-in tools"),
        ({"background": True}, "background", "in the background are not built"),
        ({"conversation": "conv_1"}, "conversation", "conversations are not built"),
        ({"truncation": "auto"}, "truncation", "too long"),
        ({"input": [{"type": "computer_call", "call_id": "x"}]}, "input[0].type", "'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "text only"),
        ({"input": [{"type": "item_reference", "id": "msg_9"}]}, "input[0].id", "no stored response has the item"),
        ({"input": []}, "input", "at least 1 item"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens", "unknown field 'max_tokens'"),
        ({"extra_body": {"input": None}}, "input", "required"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema", "not"),
        ({"tools": [WEATHER]}, "tools", "chat template shows no tools to it"),
    ],
)  # fmt: skip
def test_what_is_rejected(client, fields, param, message):
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**{"model": MODEL, "input": "x", **fields})
    assert message in error.value.body["message"]
    assert error.value.param == param


def test_retrieve_and_delete(client, http):
    answer = client.responses.create(model=MODEL, input="What?", max_output_tokens=1)
    assert client.responses.retrieve(answer.id) == answer
    with pytest.raises(openai.BadRequestError, match="only one in progress"):
        client.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError, match="not streamed again"):
        list(client.responses.retrieve(answer.id, stream=True))
    DeletedResponse.model_validate(http.delete(f"/v1/responses/{answer.id}").json())
    unstored = client.responses.create(model=MODEL, input="What?", max_output_tokens=1, store=False)
    assert unstored.to_dict()["store"] is False
    for gone in (answer.id, unstored.id, "resp_x"):
        with pytest.raises(openai.NotFoundError) as error:
            client.responses.retrieve(gone)
        assert error.value.code == "response_not_found"
    for wrong in ("limit=0", "limit=x", "order=up", "after=msg_x"):
        kept = client.responses.create(model=MODEL, input="What?", max_output_tokens=1)
        assert http.get(f"/v1/responses/{kept.id}/input_items?{wrong}").status_code == 400


def test_cancel_and_disconnect():
    engine = Scripted("x" * 500, delay=0.01)
    with live(engine) as server, server.openai() as client:
        with client.responses.create(model=MODEL, input="What?", stream=True, max_output_tokens=400) as stream:
            iterator = iter(stream)
            first = next(iterator).response
            assert client.responses.retrieve(first.id).status == "in_progress"
            assert client.responses.cancel(first.id).status == "cancelled"
            events = list(iterator)
        assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
        assert len(engine.aborted) == 1
        assert client.responses.cancel(first.id).status == "cancelled"
        assert (
            client.responses.create(model=MODEL, input="x", previous_response_id=first.id, max_output_tokens=1).status
            == "incomplete"
        )

        with client.responses.create(model=MODEL, input="What?", stream=True, max_output_tokens=400) as stream:
            other = next(iter(stream)).response.id

        async def gone() -> None:
            for _ in range(200):
                if len(engine.aborted) == 2:
                    return
                await asyncio.sleep(0.01)

        asyncio.run(gone())
        assert len(engine.aborted) == 2
        assert client.responses.retrieve(other).status == "cancelled"
        assert server.service.admission.open == 0


def test_an_engine_that_fails_in_mid_stream():
    from phalanx.errors import RankDied

    engine = Scripted("x" * 500, delay=0.01)
    with live(engine) as server, server.openai() as client:
        with client.responses.create(model=MODEL, input="What?", stream=True, max_output_tokens=400) as stream:
            iterator = iter(stream)
            next(iterator)
            server.on_loop(engine.fail, RankDied("rank 1 died", why="SIGKILL"))
            last = list(iterator)[-1]
        assert last.type == "response.failed"
        assert "rank 1 died" in last.response.error.message


def test_nothing_is_stored_if_the_store_has_no_place():
    with live(Scripted("x"), max_stored_responses=0) as server, server.openai() as client:
        answer = client.responses.create(model=MODEL, input="What?", max_output_tokens=1)
        assert answer.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)


def test_references_are_few(client, monkeypatch):
    monkeypatch.setattr(conversation, "MAX_REFERENCES", 3)
    first = client.responses.create(model=MODEL, input="One?")
    reference = {"type": "item_reference", "id": first.output[0].id}
    client.responses.create(model=MODEL, input=[reference] * 3, max_output_tokens=16)
    with pytest.raises(openai.BadRequestError, match="more than 3 references") as error:
        client.responses.create(model=MODEL, input=[reference] * 4)
    assert error.value.code == "too_many_references"


@pytest.mark.parametrize("padding", [0, LARGE_BYTES])
def test_references_are_short_together(client, monkeypatch, padding):
    """Those of a request count as often as it refers to them, read on the event loop or by another process."""
    text = "x" * (LARGE_BYTES // 4)
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
    first = client.responses.create(model=MODEL, input=[{"role": "user", "content": "One?"}, thought])
    listed = client.responses.input_items.list(first.id, order="asc").data
    reference = {"type": "item_reference", "id": listed[1].id}
    assert listed[1].to_dict()["content"][0]["text"] == text
    monkeypatch.setattr(stored_items, "MAX_BODY_BYTES", 3 * len(text))
    ask = {"role": "user", "content": "x"}
    more = {"metadata": {"a": "b"}, "extra_body": {"user": "x" * padding}}
    client.responses.create(model=MODEL, input=[reference, reference, ask], max_output_tokens=16, **more)
    with pytest.raises(openai.BadRequestError, match=r"have more than \d+ bytes; refer to fewer") as error:
        client.responses.create(model=MODEL, input=[reference, reference, reference, ask], **more)
    assert error.value.code == "references_too_large"

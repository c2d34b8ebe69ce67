# SPDX-License-Identifier: Apache-2.0
"""A chat template is a program: it has limits of time and of length."""

from __future__ import annotations

import pytest

from phalanx.errors import RequestError
from phalanx.serve import chat_template
from phalanx.serve.chat_template import ChatTemplate

USER = [{"role": "user", "content": "x"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOPS.replace("BODY", ""),
        LOOPS.replace("BODY", "{% if false %}x{% endif %}"),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% for a in [[[1], [1]]] recursive %}" + LOOPS.replace("BODY", "{{ loop.index if false }}") + "{% endfor %}",
    ],
)
def test_limit_of_time(monkeypatch, source):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    with pytest.raises(RequestError, match="takes longer than 0"):
        ChatTemplate(source, origin="test").render(USER)


def test_limit_of_length(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 2**20)
    with pytest.raises(RequestError, match="makes a text of"):
        ChatTemplate(LOOPS.replace("BODY", "0123456789" * 100), origin="test").render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ self.__init__.__globals__ }}", "{{ look() }}",
        "{% for i in range(10**9) %}{% endfor %}", "{{ environment.look() }}",
    ],
)  # fmt: skip
def test_what_a_template_cannot_reach(source):
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, origin="test").render(USER)


def test_same_text_as_before():
    source = "{% for m in messages %}{{ loop.index ~ ': ' ~ m.role + '|' * 2 }}{{ 2 ** 10 + 1 }}{% endfor %}{{ step }}{{ joined }}"
    assert ChatTemplate(source, origin="test").render(USER, joined="j", step="s") == "1: user||1025sj"


QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set thought = '' %}{% if m.reasoning_content is string %}"
    "{% set thought = m.reasoning_content %}{% endif %}{% if thought %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
)
R1 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<User>{{ message['content'] }}{% else %}"
    "<Assistant>{{ message['content'].split('</think>')[-1] }}{% for tool in message['tool_calls'] or [] %}"
    "<call>{{ tool['function']['name'] }}{% endfor %}<end>{% endif %}{% endfor %}"
)
GPT_OSS = (
    "{% for message in messages %}{% if 'tool_calls' in message %}{% if message.content and message.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}{% if message.content or message.thinking %}"
    "<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>{% endif %}"
    "to=functions.{{ message.tool_calls[0].function.name }}<|call|>{% else %}"
    "{% if 'thinking' in message and loop.last %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
)
CALLS = [{"id": "1", "type": "function", "function": {"name": "noon", "arguments": {}}}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    ("source", "field", "answer", "call"),
    [
        (QWEN3, "reasoning_content", "<|im_start|>assistant\n<think>\nmm\n</think>\n\nyes<|im_end|>\n",
         "<|im_start|>assistant\n<think>\nmm\n</think>\n\nyes<tool_call>noon</tool_call><|im_end|>\n"),
        (R1, "reasoning_content", "<Assistant>yes<end>", "<Assistant>yes<call>noon<end>"),
        (GPT_OSS, "thinking", "<|channel|>analysis<|message|>mm<|end|><|message|>yes<|end|>",
         "<|channel|>analysis<|message|>mm\n\nyes<|end|>to=functions.noon<|call|>"),
        ("{{ messages[0].get('reasoning') }}", "reasoning", "mm", "mm"),
    ],
)  # fmt: skip
def test_past_reasoning_has_the_name_that_the_template_reads(source, field, answer, call, name):
    template = ChatTemplate(source, origin="test")
    assert template.reasoning_field == field
    message = {"role": "assistant", "content": "yes", name: "mm"}
    assert template.render([message]) == answer
    assert template.render([{**message, "tool_calls": CALLS}]) == call
    assert message[name] == "mm"


def test_a_message_without_reasoning_has_no_such_field():
    assert ChatTemplate(GPT_OSS, origin="test").render([{"role": "assistant", "content": "yes", "reasoning": ""}]) == (
        "<|message|>yes<|end|>"
    )


@pytest.mark.parametrize(
    ("source", "variables", "text"),
    [
        ("{{ xml_tools }}{{ python_tools }}", {}, "[{'name': 'f'}]"),
        ("{{ xml_tools }}", {"xml_tools": "own"}, "own"),
        ("{% if tools %}tools{% endif %}{% if xml_tools %}xml{% endif %}", {}, "tools"),
    ],
)
def test_tools_have_the_name_that_the_template_reads(source, variables, text):
    assert ChatTemplate(source, origin="test").render([], tools=[{"name": "f"}], **variables) == text

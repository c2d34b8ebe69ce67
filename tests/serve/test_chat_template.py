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


@pytest.mark.parametrize(
    "source",
    [
        LOOPS.replace("BODY", "0123456789" * 100),
        "{{ 'x' * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10 ** (10**9) }}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    ],
)
def test_limit_of_length(monkeypatch, source):
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 2**20)
    with pytest.raises(RequestError, match="makes a text of"):
        ChatTemplate(source, origin="test").render(USER)


def test_same_text_as_before():
    source = "{% for m in messages %}{{ loop.index ~ ': ' ~ m.role + '|' * 2 }}{{ 2 ** 10 + 1 }}{% endfor %}{{ step }}{{ joined }}"
    assert ChatTemplate(source, origin="test").render(USER, joined="j", step="s") == "1: user||1025sj"

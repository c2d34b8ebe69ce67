# SPDX-License-Identifier: Apache-2.0
"""What requests become for the engine."""

from __future__ import annotations

import pytest

from phalanx.serve.openai.request_params import structured_output_of
from phalanx.serve.openai.schema.completion import CompletionRequest

CHOICES = ["yes", 'a "no"', "back\\slash", "ö\n🙂\u200b\t", "[a|b]"]


@pytest.fixture(scope="module")
def accepts():
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string

    request = CompletionRequest(model="m", prompt="x", guided_choice=CHOICES)
    grammar = Grammar.from_ebnf(structured_output_of(request, None).structured_output.grammar)
    return lambda text: _is_grammar_accept_string(grammar, text)


def test_choices_and_nothing_else(accepts):
    assert [text for text in CHOICES if not accepts(text)] == []
    assert [text for text in ("", "ye", "yes ", "no", "a", "back\\\\slash", "yesyes") if accepts(text)] == []

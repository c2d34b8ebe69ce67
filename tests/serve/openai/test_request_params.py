# SPDX-License-Identifier: Apache-2.0
"""What requests become for the engine."""

from __future__ import annotations

from phalanx.serve.openai.request_params import structured_output_of
from phalanx.serve.openai.schema.completion import CompletionRequest
from tests.support.grammars import accepts, opened

CHOICES = ["yes", 'a "no"', "back\\slash", "ö\n🙂\u200b\t", "[a|b]"]


def test_choices_and_nothing_else():
    request = CompletionRequest(model="m", prompt="x", guided_choice=CHOICES)
    matcher = opened("grammar", structured_output_of(request, None).structured_output.grammar)
    assert [text for text in CHOICES if not accepts(matcher, text)] == []
    refused = ("", "ye", "yes ", "no", "a", "back\\\\slash", "yesyes")
    assert [text for text in refused if accepts(matcher, text)] == []

# SPDX-License-Identifier: Apache-2.0
"""Which format a template teaches, and that the guides hold a model to it: by the engine's own matcher, token by token."""

from __future__ import annotations

import json

import pytest

from phalanx.config.sampling_params import StructuredOutputParams
from phalanx.engine.grammar import Matcher
from phalanx.serve.openai.schema.chat import NamedTool, Tool
from phalanx.serve.openai.tools.formats import HERMES, LLAMA, detect, forced_call_tag, strict_call_tag
from phalanx.serve.structured_output.compiler import compile_structured_output
from tests.support.serve_http_app import HERMES_TEMPLATE, LLAMA_TEMPLATE, tokenizer_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}),
    Tool.model_validate({"type": "function", "function": {"name": "noon"}}),
]
NOON = NamedTool.model_validate({"type": "function", "function": {"name": "noon"}})


def accepts(structural_tag: str, text: str) -> bool:
    """Whether a model could write this text, and end there."""
    tokenizer = tokenizer_of()
    width = tokenizer.vocab_size
    params = compile_structured_output(
        StructuredOutputParams(structural_tag=structural_tag), tokenizer, vocab_size=width, eos_token_ids=[tokenizer.eos_token_id]
    )
    matcher = Matcher(params.compiled)
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
        mask = int.from_bytes(matcher.mask(), "little")
        if not mask >> token & 1:
            return False
        matcher.accept(token)
    return True


def test_detect():
    assert detect(tokenizer_of(HERMES_TEMPLATE)) is HERMES
    assert detect(tokenizer_of(LLAMA_TEMPLATE)) is LLAMA
    assert detect(tokenizer_of()) is None
    assert detect(tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}")) is None
    assert detect(tokenizer_of(HERMES_TEMPLATE.replace("<args-json-object>", "<function=x>"))) is None
    assert detect(tokenizer_of("{{ raise_exception('no') }}")) is None


@pytest.mark.parametrize("how", [HERMES, LLAMA], ids=lambda how: how.name)
def test_forced(how):
    oslo, noon = (
        how.opening(name) + json.dumps(args) + how.closing() for name, args in (("weather", {"city": "Oslo"}), ("noon", {}))
    )
    many = forced_call_tag(how, TOOLS, "required", parallel=True)
    assert accepts(many, oslo)
    assert accepts(many, oslo + how.between + noon)
    assert not accepts(many, "")
    assert not accepts(many, "Sure. " + oslo)
    assert not accepts(many, how.opening("weather") + "{}" + how.closing())
    assert not accepts(many, how.opening("other") + "{}" + how.closing())
    one = forced_call_tag(how, TOOLS, "required", parallel=False)
    assert accepts(one, noon)
    assert not accepts(one, noon + how.between + noon)
    named = forced_call_tag(how, TOOLS, NOON, parallel=True)
    assert accepts(named, noon)
    assert not accepts(named, oslo)


@pytest.mark.parametrize("how", [HERMES, LLAMA], ids=lambda how: how.name)
def test_strict(how):
    oslo = how.opening("weather") + json.dumps({"city": "Oslo"}) + how.closing()
    params = strict_call_tag(how, TOOLS, parallel=True)
    for text in ("", "No need.", oslo, "I look. " + oslo, oslo + how.between + oslo):
        assert accepts(params, text), text
    assert not accepts(params, how.opening("weather") + '{"city": 3}' + how.closing())
    assert not accepts(params, how.opening("other") + "{}" + how.closing())
    assert not accepts(strict_call_tag(how, TOOLS, parallel=False), oslo + how.between + oslo)

# SPDX-License-Identifier: Apache-2.0
"""Grammars hold a model to its format of calls, and leave its reasoning free: by the engine's own matcher, token by token."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken

from phalanx.config.sampling_params import StructuredOutputParams
from phalanx.engine.grammar import Grammars
from phalanx.serve.openai.request_params import schemas_of
from phalanx.serve.openai.schema.chat import Tool
from phalanx.serve.output_parsing import OutputFormat, deepseek, gemma, harmony, mistral
from phalanx.serve.output_parsing.formats import CALLS, forced_format
from phalanx.serve.output_parsing.reasoning import Begin
from phalanx.serve.output_parsing.structural_tags import (
    after_reasoning,
    calls_or_answer,
    forced_calls,
    structural_tag,
    valid_calls,
)
from phalanx.serve.structured_output.compiler import compile_structured_output
from phalanx.serve.structured_output.vocabulary import vocabulary_of
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_output_parsing import bare, read
from tests.support.serve_small_tokenizers import byte_level, write

pytestmark = pytest.mark.usefixtures("forked_python")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
FUNCTIONS = {"weather": CITY, "noon": {"type": "object"}}
SPECIAL = [*harmony.MARKERS, *mistral.MARKERS, "[THINK]", "[/THINK]", "<|END_RESPONSE|>"]
OSLO, NOON = '{"city": "Oslo"}', "{}"
DS = deepseek
WRITTEN = {
    "hermes": ("", '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>', "\n", ""),
    "qwen3_coder": ("", "<tool_call>\n<function={}>\n{}</function>\n</tool_call>", "\n", ""),
    "seed_oss": ("", "<seed:tool_call>\n<function={}>\n{}</function>\n</seed:tool_call>", "\n", ""),
    "minimax_m2": ("<minimax:tool_call>\n", '<invoke name="{}">\n{}</invoke>\n', "", "</minimax:tool_call>"),
    "deepseek_v32": (
        "<\uff5cDSML\uff5cfunction_calls>\n",
        '<\uff5cDSML\uff5cinvoke name="{}">\n{}</\uff5cDSML\uff5cinvoke>\n',
        "",
        "</\uff5cDSML\uff5cfunction_calls>",
    ),
    "gemma4": ("", "<|tool_call>call:{}{}<tool_call|>", "", ""),
    "glm45": ("", "<tool_call>{}\n{}</tool_call>", "\n", ""),
    "glm47": ("", "<tool_call>{}{}</tool_call>", "", ""),
    "granite": ("<|tool_call|>[", '{{"name": "{}", "arguments": {}}}', ", ", "]"),
    "phi4_mini_json": ("functools[", '{{"name": "{}", "arguments": {}}}', ", ", "]"),
    "cohere_command3": (
        "<|START_ACTION|>[\n    ",
        '{{"tool_call_id": "0", "tool_name": "{}", "parameters": {}}}',
        ",\n    ",
        "\n]<|END_ACTION|>",
    ),
    "command_r": (
        "Action:\n```json\n[\n",
        '    {{\n        "tool_name": "{}",\n        "parameters": {}\n    }}',
        ",\n",
        "\n]```",
    ),
    "hy_v3": (
        "<tool_calls:opensource>\n",
        "<tool_call:opensource>{}<tool_sep:opensource>\n{}</tool_call:opensource>\n",
        "",
        "</tool_calls:opensource>",
    ),
    "llama3_json": ("", '{{"name": "{}", "parameters": {}}}', "; ", ""),
    "mistral": ("[TOOL_CALLS][", '{{"name": "{}", "arguments": {}}}', ", ", "]"),
    "deepseek_v3": (
        DS.CALLS_BEGIN,
        DS.CALL_BEGIN + "function" + DS.SEPARATOR + "{}\n```json\n{}\n```" + DS.CALL_END,
        "\n",
        DS.CALLS_END,
    ),
    "kimi_k2": (
        DS.KIMI_MARKERS[0],
        DS.KIMI_MARKERS[2] + "functions.{}:0" + DS.KIMI_MARKERS[4] + "{}" + DS.KIMI_MARKERS[3],
        "",
        DS.KIMI_MARKERS[1],
    ),
    "deepseek_v31": (DS.CALLS_BEGIN, DS.CALL_BEGIN + "{}" + DS.SEPARATOR + "{}" + DS.CALL_END, "", DS.CALLS_END),
}
PARAMETERS = {
    "qwen3_coder": "<parameter={}>\n{}\n</parameter>\n",
    "seed_oss": "<parameter={}>{}</parameter>\n",
    "minimax_m2": '<parameter name="{}">{}</parameter>\n',
    "deepseek_v32": '<\uff5cDSML\uff5cparameter name="{}" string="true">{}</\uff5cDSML\uff5cparameter>\n',
    "glm45": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    "glm47": "<arg_key>{}</arg_key><arg_value>{}</arg_value>",
    "hy_v3": "<arg_key:opensource>{}</arg_key:opensource>\n<arg_value:opensource>{}</arg_value:opensource>\n",
}
"""One argument, of the formats without JSON."""
HY = [f"<{end}{tag}:opensource>" for tag in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value") for end in ("", "/")]
SPECIAL += [*HY, "<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"]
SPECIAL += ["<|tool_call>", "<tool_call|>", gemma.QUOTE, "<|channel>", "<channel|>"]


@functools.cache
def tokenizer_of(template=None) -> Tokenizer:
    """Markers of gpt-oss, Mistral, Hy3 and Gemma 4 are special tokens; those of the others are plain ones, or none."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>", *deepseek.MARKERS, *deepseek.KIMI_MARKERS]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(write(Path(folder), backend))
    if template is not None:
        tokenizer.set_chat_template(template, origin="test")
    return tokenizer


def output_of(tools, reasoning="none", template=None):
    return OutputFormat.detect(tokenizer_of(template), tools=tools, reasoning=reasoning)


def calls(tools, *named):
    if tools == "gemma4":
        named = [(name, bare(json.loads(arguments), gemma.QUOTE)) for name, arguments in named]
    if tools in PARAMETERS:
        named = [
            (name, "".join(PARAMETERS[tools].format(key, value) for key, value in json.loads(arguments).items()))
            for name, arguments in named
        ]
    before, one, between, after = WRITTEN[tools]
    return before + between.join(one.format(name, arguments) for name, arguments in named) + after


@functools.cache
def grammars() -> Grammars:
    tokenizer = tokenizer_of()
    return Grammars(lambda: vocabulary_of(tokenizer), tokenizer.vocab_size)


def accepts(params: StructuredOutputParams, text: str) -> bool:
    """Whether a model could write this text, and end there. A special token in the text is that token."""
    tokenizer = tokenizer_of()
    matcher = grammars().open(compile_structured_output(params).compiled)
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
        mask = int.from_bytes(matcher.mask(), "little")
        if not mask >> token & 1:
            return False
        matcher.accept(token)
    return True


def tag(format_):
    return StructuredOutputParams(structural_tag=structural_tag(format_))


@pytest.mark.parametrize("tools", WRITTEN)
def test_forced(tools):
    output = output_of(tools)
    many = tag(forced_calls(output, tools, FUNCTIONS, parallel=True))
    oslo, both = calls(tools, ("weather", OSLO)), calls(tools, ("weather", OSLO), ("noon", NOON))
    assert accepts(many, oslo)
    assert accepts(many, both)
    assert not accepts(many, "")
    assert not accepts(many, "Sure. " + oslo)
    assert not accepts(many, calls(tools, ("weather", NOON)))
    assert not accepts(many, calls(tools, ("other", NOON)))
    one = tag(forced_calls(output, tools, {"noon": FUNCTIONS["noon"]}, parallel=False))
    assert accepts(one, calls(tools, ("noon", NOON)))
    assert not accepts(one, calls(tools, ("noon", NOON), ("noon", NOON)))
    assert not accepts(one, oslo)
    # What the grammar enforces is what the parser reads.
    parser = output.parser(Begin.AFTER, FUNCTIONS, tools=forced_format(tools))
    assert read(parser, [output.markers.encode(both)]) == ("", [("weather", OSLO), ("noon", NOON)], "")


@pytest.mark.parametrize("tools", WRITTEN)
def test_valid(tools):
    output = output_of(tools)
    params = tag(valid_calls(output, tools, FUNCTIONS, parallel=True))
    oslo = calls(tools, ("weather", OSLO))
    for text in ("", "No need.", oslo, "I look. " + oslo, calls(tools, ("weather", OSLO), ("weather", OSLO))):
        assert accepts(params, text), text
    assert not accepts(params, calls(tools, ("weather", '{"town": 3}')))
    assert not accepts(params, calls(tools, ("other", NOON)))
    one = tag(valid_calls(output, tools, FUNCTIONS, parallel=False))
    assert accepts(one, "I look. " + oslo)
    assert not accepts(one, calls(tools, ("weather", OSLO), ("weather", OSLO)))
    assert not accepts(one, oslo + oslo)


@pytest.mark.parametrize("tools", WRITTEN)
def test_a_function_without_parameters_has_no_arguments(tools):
    named = {"none": {}, "any": {"parameters": {}}}
    functions = schemas_of([Tool(type="function", function={"name": name, **more}) for name, more in named.items()])
    params = tag(forced_calls(output_of(tools), tools, functions, parallel=True))
    assert accepts(params, calls(tools, ("none", "{}"), ("any", "{}")))
    assert accepts(params, calls(tools, ("any", OSLO)))
    assert not accepts(params, calls(tools, ("none", OSLO)))
    assert not accepts(params, calls(tools, ("any", "3")) if tools not in PARAMETERS else "")


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
NUMBER_ANSWER = StructuredOutputParams(json_schema=json.dumps(NUMBER))
SEVEN = '{"n": 7}'


@pytest.mark.parametrize("tools", [name for name in WRITTEN if not CALLS[name].ambiguous])
def test_calls_or_an_answer(tools):
    output = output_of(tools)
    either = calls_or_answer(output, tools, FUNCTIONS, (), NUMBER_ANSWER, parallel=True)
    oslo, both = calls(tools, ("weather", OSLO)), calls(tools, ("weather", OSLO), ("noon", NOON))
    for text in (SEVEN, oslo, both):
        assert accepts(either, text), text
    for text in (
        "", "No need.", OSLO, '{"n": "x"}', SEVEN + SEVEN, SEVEN + oslo, oslo + SEVEN, "I look. " + oslo, f"{SEVEN}\n{oslo}",
        calls(tools, ("weather", NOON)), calls(tools, ("other", NOON)), oslo[:-1],
    ):  # fmt: skip
        assert not accepts(either, text), text
    one = calls_or_answer(output, tools, FUNCTIONS, (), StructuredOutputParams(json_object=True), parallel=False)
    for text in ('{"a": {"b": [1]}}', "{}", oslo):
        assert accepts(one, text), text
    for text in (both, "3", "[{}]"):
        assert not accepts(one, text), text
    # What the grammar enforces is what the parser reads.
    quoted = json.dumps({"text": output.markers.remove(output.markers.encode(both))}, ensure_ascii=False)
    for text, read_as in ((both, ("", [("weather", OSLO), ("noon", NOON)], "")), (quoted, (quoted, [], "")), ("<", ("<", [], ""))):
        for size in (1, 7, len(text)):
            parser = output.parser(Begin.AFTER, FUNCTIONS, tools=tools, calls_or_answer=True)
            encoded = output.markers.encode(text)
            assert read(parser, [encoded[i : i + size] for i in range(0, len(encoded), size)]) == read_as


def test_an_answer_between_tags():
    output = output_of("cohere_command3", "cohere_command3")
    either = calls_or_answer(output, "cohere_command3", FUNCTIONS, (), NUMBER_ANSWER, parallel=True)
    params = after_reasoning(output, NUMBER_ANSWER, Begin.OPEN)
    for text in (SEVEN, f"<|START_RESPONSE|>{SEVEN}<|END_RESPONSE|>"):
        assert accepts(params, text)
        assert accepts(params, f"<|START_THINKING|>Hm.<|END_THINKING|>{text}")
    assert not accepts(params, "<|START_RESPONSE|>No.<|END_RESPONSE|>")
    assert accepts(after_reasoning(output, either, Begin.OPEN, calls=True), calls("cohere_command3", ("weather", OSLO)))


@pytest.mark.parametrize(
    ("tools", "reasoning", "opening", "closing"),
    [
        ("hermes", "qwen3", "<think>", "</think>"),
        ("mistral", "mistral", "[THINK]", "[/THINK]"),
        ("gemma4", "gemma4", "<|channel>thought\n", "<channel|>"),
    ],
)
def test_calls_or_an_answer_after_the_reasoning(tools, reasoning, opening, closing):
    output = output_of(tools, reasoning)
    either = calls_or_answer(output, tools, FUNCTIONS, (), NUMBER_ANSWER, parallel=True)
    oslo = calls(tools, ("weather", OSLO))
    inside, before = (after_reasoning(output, either, begin, calls=True) for begin in (Begin.INSIDE, Begin.OPEN))
    for text in (SEVEN, oslo):
        assert accepts(inside, f"Hm. {{}}{closing}\n\n{text}")
        assert accepts(before, f"{opening}\nHm.\n{closing}{text}")
        assert accepts(before, text)
    for text in ("No.", OSLO, SEVEN + oslo):
        assert not accepts(inside, f"Hm.{closing}\n\n{text}")
        assert not accepts(before, text)


def test_calls_or_an_answer_of_harmony():
    output = output_of("gpt_oss", "gpt_oss")
    either = calls_or_answer(output, "gpt_oss", FUNCTIONS, (), NUMBER_ANSWER, parallel=True)
    params = after_reasoning(output, either, Begin.AFTER, calls=True)
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + OSLO
    final = "<|channel|>final<|message|>"
    for text in (call, final + SEVEN):
        assert accepts(params, text)
        assert accepts(params, analysis + text)
    for text in (final + OSLO, final + "No.", SEVEN, call.replace(OSLO, NOON), call + "<|end|><|start|>assistant" + final + SEVEN):
        assert not accepts(params, analysis + text)


def test_mistral_writes_as_its_template_does():
    spaced = output_of("mistral", template="{{ '[TOOL_CALLS] [' }}")
    assert accepts(
        tag(forced_calls(spaced, "mistral", FUNCTIONS, parallel=False)), '[TOOL_CALLS] [{"name": "noon", "arguments": {}}]'
    )
    named = output_of("mistral", template="{{ '[ARGS]' }}")
    params = tag(forced_calls(named, "mistral", FUNCTIONS, parallel=True))
    assert accepts(params, "[TOOL_CALLS]noon[ARGS]{}[TOOL_CALLS]weather[ARGS]" + OSLO)
    assert not accepts(params, "[TOOL_CALLS]noon[ARGS]3")


def test_harmony():
    output = output_of("gpt_oss", "gpt_oss")
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + OSLO
    final = "<|channel|>final<|message|>"
    forced = after_reasoning(output, tag(forced_calls(output, "gpt_oss", FUNCTIONS, parallel=True)), Begin.AFTER, calls=True)
    assert accepts(forced, call)
    assert accepts(forced, analysis + call)
    assert not accepts(forced, analysis + final + "No.")
    assert not accepts(forced, call.replace(OSLO, NOON))
    valid = after_reasoning(output, tag(valid_calls(output, "gpt_oss", FUNCTIONS, parallel=True)), Begin.AFTER, calls=True)
    for text in (
        call,
        analysis + call,
        analysis + final + "No.",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + call,
    ):
        assert accepts(valid, text), text
    assert not accepts(valid, call.replace(OSLO, NOON))
    number = after_reasoning(output, StructuredOutputParams(regex="[0-9]+"), Begin.AFTER)
    assert accepts(number, analysis + final + "42")
    assert not accepts(number, analysis + final + "no")
    assert not accepts(number, "42")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (StructuredOutputParams(regex="[0-9]+"), "42"),
        (StructuredOutputParams(json_object=True), '{"a": {"b": 1}}'),
        (StructuredOutputParams(json_schema=json.dumps(CITY)), OSLO),
        (StructuredOutputParams(grammar='root ::= "yes" | "no"'), "no"),
    ],
)
@pytest.mark.parametrize(
    ("reasoning", "opening", "closing"), [("qwen3", "<think>", "</think>"), ("mistral", "[THINK]", "[/THINK]")]
)
def test_a_grammar_begins_after_the_reasoning(answer, text, reasoning, opening, closing):
    output = output_of("none", reasoning)
    inside = after_reasoning(output, answer, Begin.INSIDE)
    assert accepts(inside, f"Hm. {{}}{closing}\n\n{text}")
    assert not accepts(inside, f"Hm.{closing}\n\nnothing")
    before = after_reasoning(output, answer, Begin.OPEN)
    assert accepts(before, f"{opening}\nHm.\n{closing}{text}")
    assert accepts(before, text)
    assert not accepts(before, "Hm. " + text)
    assert after_reasoning(output, answer, Begin.AFTER) is answer
    assert after_reasoning(output_of("none"), answer, Begin.OPEN) is answer


def test_text_never_uses_special_tokens():
    schema = StructuredOutputParams(json_schema=json.dumps({"type": "string"}))
    assert accepts(schema, '"TOOL_CALLS"')
    assert not accepts(schema, '"[TOOL_CALLS]"')
    assert not accepts(StructuredOutputParams(regex="(.|\n)*"), "a<|end|>")

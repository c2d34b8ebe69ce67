# SPDX-License-Identifier: Apache-2.0
"""Calls as JSON behind a marker: Hermes and Qwen, Granite, Phi-4-mini, Command-R and Command-R7B."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.serve.output_parsing import formats
from tests.support.serve_output_parsing import CALLS, LETTERS, NAMES, SIZES, Read, cut, read, read_all_ways, shreds, special

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def parser(name, markers=LETTERS, syntax=None):
    row = formats.CALLS[name]
    return row.parser(NAMES, markers, syntax or row.syntax)


def make():
    return parser("hermes")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Read("", [])),
        ("Plain text.\n", Read("Plain text.\n", [])),
        (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
            Read("", [("weather", '{"city": "Oslo"}')]),
        ),
        (
            'Let me see.\n<tool_call>{"arguments": {"a": [1, "}<"]}, "name": "add"}</tool_call>\n<tool_call>\n{"name": "add"}\n'
            "</tool_call>\n",
            Read("Let me see.", [("add", '{"a": [1, "}<"]}'), ("add", "{}")]),
        ),
        (
            'a < b <tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
            Read('a < b <tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', []),
        ),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1', Read("", [("add", '{"a": 1')])),
        ("<tool_call>\nnot json</tool_call> x", Read("<tool_call>\nnot json</tool_call> x", [])),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}</tool_call>',
            Read("", [("add", '{"a": "\\u00e9"}')]),
        ),
        ("see <tool_c", Read("see <tool_c", [])),
        ('<tool_call>{"name": "add", "arguments": "\\ud800"}</tool_call>', Read("}", [("add", "")])),
        # no arguments, in each spelling; and two sets of them are one
        *(
            (f'<tool_call>{{"name": "add", "arguments": {spelling}}}</tool_call>', Read("", [("add", "{}")]))
            for spelling in ("null", '""', '" "', "{}", "{ }", '"{}"', '"null"', "{\n}")
        ),
        ('<tool_call>{"arguments": null, "name": "add", "parameters": {"x": 1}}</tool_call>', Read("", [("add", '{"x": 1}')])),
        ('<tool_call>{"name": "add", "parameters": {"x": 1}, "arguments": {}}</tool_call>', Read("", [("add", '{"x": 1}')])),
        ('<tool_call>{"name": "add", "arguments": {}, "parameters": {"x": 1}}</tool_call>', Read("", [("add", '{"x": 1}')])),
        ('<tool_call>{"name": "add", "arguments": "", "parameters": "{\\"x\\": 1}"}</tool_call>', Read("", [("add", '{"x": 1}')])),
        (
            '<tool_call>{"name": "add", "arguments": {"x": null}, "parameters": null}</tool_call>',
            Read("", [("add", '{"x": null}')]),
        ),
        ('<tool_call>{"name": "add", "arguments": {"x": 1}, "arguments": {"y": 2}}</tool_call>', Read("", [("add", '{"x": 1}')])),
        (CALL + " done", Read(" done", [("add", '{"a": 1}')])),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}} </tool_call>\nend', Read("}\nend", [("add", '{"a": 1}')])),
        (CALL.removesuffix("\n</tool_call>") + CALL, Read("", [("add", '{"a": 1}')] * 2)),
        ('<tool_call>[{"name": "add"}, {"name": "noon"}]</tool_call> x', Read(" x", [("add", "{}"), ("noon", "{}")])),
    ],
)
def test_cases(text, expected):
    assert read_all_ways(make, text) == expected


NESTED = '{"tags": ["a", "]"], "city": "O\\"slo]```"}'
RECORDED = {
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {NESTED}}}, {{"name": "noon", "arguments": {{}}}}]',
    "phi4_mini_json": f'functools[{{"name": "weather", "arguments": {NESTED}}}, {{"name": "noon", "arguments": {{}}}}]',
    "cohere_command3": f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {NESTED}}},\n'
    '    {"tool_call_id": "1", "tool_name": "noon", "parameters": {}}\n]<|END_ACTION|>',
    "command_r": f'Action:\n```json\n[\n    {{\n        "tool_name": "weather",\n        "parameters": {NESTED}\n    }},\n    {{\n'
    '        "tool_name": "noon",\n        "parameters": {}\n    }\n]```',
}
"""Two calls, as the chat template of each family writes them."""
CALLED = [("weather", NESTED), ("noon", "{}")]


@pytest.fixture(params=RECORDED)
def family(request):
    """The name of a format, and a function that makes a parser of it."""
    return request.param, lambda: parser(request.param)


def test_recorded_calls_split_anywhere(family):
    name, make = family
    text = f"I look. {RECORDED[name]}\n"
    result = read_all_ways(make, text)
    assert result == Read("I look.", CALLED)
    for at in range(len(text)):
        assert read(make(), [text[:at], text[at:]]) == result, text[:at]
    assert read_all_ways(make, RECORDED[name] + "\nThat was it: [a] ```b```") == Read("\nThat was it: [a] ```b```", CALLED)


def test_special_tokens_of_each_format(family):
    name, _ = family
    markers = special(*formats.CALLS[name].syntax.markers)
    assert read_all_ways(lambda: parser(name, markers), markers.encode(RECORDED[name])) == Read("", CALLED)
    if markers.special:
        assert read_all_ways(lambda: parser(name, markers), RECORDED[name]) == Read(RECORDED[name], [])


def test_calls_of_unknown_functions_are_content(family):
    name, make = family
    text = RECORDED[name].replace("weather", "whether")
    assert read_all_ways(make, text) == Read(text, [])
    text = RECORDED[name].replace("noon", "moon")
    result = read_all_ways(make, text)
    assert result.calls == CALLED[:1]
    assert "moon" in result.content


def test_what_max_tokens_ends_is_a_call_without_an_end(family):
    name, make = family
    text = RECORDED[name]
    for at in range(text.index("weather") + len('weather"'), text.index(NESTED) + len(NESTED)):
        result = read_all_ways(make, text[:at])
        assert [called for called, _ in result.calls] == ["weather"]
        assert NESTED.startswith(result.calls[0][1]), text[:at]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("granite", '<tool_call>[{"name": "noon", "arguments": {}}]', Read("", [("noon", "{}")])),
        ("granite", '<|tool_call|> [ {"name": "noon"} ] x', Read(" x", [("noon", "{}")])),
        ("phi4_mini_json", "import functools\nfunctools[1]", Read("import functools\nfunctools[1]", [])),
        ("cohere_command3", '<|START_ACTION|>{"tool_name": "noon", "parameters": {}}<|END_ACTION|>', Read("", [("noon", "{}")])),
        ("cohere_command3", "<|START_ACTION|>[]<|END_ACTION|>", Read("<|START_ACTION|>[]<|END_ACTION|>", [])),
        (
            "command_r",
            'Plan: a.\nAction: ```json\n[{"tool_name": "noon", "parameters": {}}]\n```',
            Read("Plan: a.", [("noon", "{}")]),
        ),
        ("command_r", 'Action:```json[{"tool_name": "noon"}]```', Read("", [("noon", "{}")])),
        ("command_r", "Action: go home", Read("Action: go home", [])),
        ("command_r", 'Action: ```json\n[{"name": "noon"}]```', Read('Action: ```json\n[{"name": "noon"}]```', [])),
    ],
)
def test_as_models_write_them(name, text, expected):
    assert read_all_ways(lambda: parser(name), text) == expected


def test_phi_with_the_tags_of_its_vocabulary():
    [(_, syntax)] = formats.CALLS["phi4_mini_json"].variants
    text = '<|tool_call|>[{"name": "noon", "arguments": {}}]<|/tool_call|><|tool_call|>{"name": "add"}<|/tool_call|>'
    assert read_all_ways(lambda: parser("phi4_mini_json", syntax=syntax), text) == Read("", [("noon", "{}"), ("add", "{}")])


def test_special_tokens_are_not_letters():
    markers = special("<tool_call>", "</tool_call>")
    assert read(parser("hermes", markers), [markers.encode(CALL)]).calls == [("add", '{"a": 1}')]
    assert read(parser("hermes", markers), [CALL]) == Read(CALL, [])


@settings(max_examples=60, deadline=None)
@given(calls=CALLS, sizes=SIZES)
def test_calls_are_read_back(calls, sizes):
    written = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>' for name, arguments in calls
    ]
    expected = Read("", [(name, json.dumps(arguments)) for name, arguments in calls])
    assert read(make(), cut("\n".join(written), sizes)) == expected


@settings(max_examples=100, deadline=None)
@given(text=shreds("<tool_call>", "</tool_call>", CALL), sizes=SIZES)
def test_pieces_never_matter(text, sizes):
    result = read(make(), [text])
    assert read(make(), cut(text, sizes)) == result
    assert result.calls or result.content == text


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(list(RECORDED)), data=st.data(), sizes=SIZES)
def test_pieces_never_matter_in_any_format(name, data, sizes):
    syntax = formats.CALLS[name].syntax
    parts = [*syntax.markers, syntax.trigger, syntax.before, *RECORDED[name].split("\n"), '{"name": "noon"}', "```json", "]"]
    text = data.draw(shreds(*(part for part in parts if part)))
    result = read(parser(name), [text])
    assert read(parser(name), cut(text, sizes)) == result
    assert result.calls or result.content == text

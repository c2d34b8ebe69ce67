# SPDX-License-Identifier: Apache-2.0
"""Calls between tags: Qwen3-Coder, Seed-OSS, MiniMax-M2, GLM-4.5 and 4.7, Hy3."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.serve.output_parsing.formats import CALLS
from tests.support.serve_output_parsing import LETTERS, SIZES, Read, cut, read, read_all_ways, shreds, special

ARGUMENTS = {"a": {"type": "integer"}, "b": {"type": ["array", "null"]}, "text": {"type": "string"}}
FUNCTIONS = {"add": {"type": "object", "properties": ARGUMENTS}, "noon": {"type": "object"}}
NOON = "<tool_call>\n<function=noon>\n</function>\n</tool_call>"
ADD = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def parser(name="qwen3_coder", functions=FUNCTIONS, markers=LETTERS, syntax=None):
    return CALLS[name].parser(functions, markers, syntax or CALLS[name].syntax)


def make():
    return parser()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No <call>.", Read("No <call>.", [])),
        (f"I add.\n{ADD}\n{NOON}", Read("I add.", [("add", '{"a": 1}'), ("noon", "{}")])),
        (
            "<tool_call>\n<function=add>\n<parameter=text>\n1\n<b>\n\n</parameter>\n"
            "<parameter=b>\n[1, None]\n</parameter>\n</function>",
            Read("", [("add", '{"text": "1\\n<b>\\n", "b": [1, null]}')]),
        ),
        ("<function=noon></function></tool_call> x", Read(" x", [("noon", "{}")])),
        ("<tool_call><function=add><parameter=a>1</parameter></tool_call>", Read("", [("add", '{"a": 1}')])),
        ("<tool_call><function=add><parameter=a>1", Read("", [("add", "")])),
        ("<tool_call>\n<function=other>\n</function>", Read("<tool_call>\n<function=other>\n</function>", [])),
        ("<tool_call>\n{}</tool_call>", Read("<tool_call>\n{}</tool_call>", [])),
        ("<tool_call>\n<func", Read("<tool_call>\n<func", [])),
        # A string that max_tokens ends.
        ("<function=add><parameter=text>\n\nab\n</para", Read("", [("add", '{"text": "\\nab')])),
        # A closing tag within a value, and closing tags that the model forgot.
        (
            "<function=add>\n<parameter=text>\n<p>a</parameter> b\n</function>\n</parameter>\n<parameter=a>\n1\n</parameter>\n"
            "</function>",
            Read("", [("add", '{"text": "<p>a</parameter> b\\n</function>", "a": 1}')]),
        ),
        (
            "<tool_call>\n<function=add>\n<parameter=text>\nx\n<parameter=a>\n1\n</function>\n</tool_call>",
            Read("", [("add", '{"text": "x", "a": 1}')]),
        ),
        (
            "<function=add>\n<parameter=text>\n<parameter=no>\n<parameter=text>\n</parameter>\n</function>",
            Read("", [("add", '{"text": "<parameter=no>\\n<parameter=text>"}')]),
        ),
        (
            "<tool_call>\n<function=add>\n<parameter=text>\nx\n</function>\n</tool_call>\nDone.",
            Read("\nDone.", [("add", '{"text": "x"}')]),
        ),
        (
            f"<tool_call>\n<function=add>\n<parameter=text>\n{NOON}\n</parameter>\n</function>\n</tool_call>",
            Read("", [("add", json.dumps({"text": NOON}))]),
        ),
        (f"<tool_call>\n<function=add>\n{NOON}", Read("", [("add", "{}"), ("noon", "{}")])),
    ],
)
def test_cases(text, expected):
    assert read_all_ways(make, text) == expected


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<parameter=x>y>\n1\n</parameter>", {"x>y": 1}), ("<parameter=x>\n1\n</parameter>", {"x": "1"}),
        ("<parameter=a\nb>\n1\n</parameter>", {"a\nb": "1"}), ("<parameter=other>\n1\n</parameter>", {"other": 1}),
        ("<parameter=" + "n" * 200 + ">\ntrue\n</parameter>", {"n" * 200: True}), ("<parameter=>\n1\n</parameter>", {"": "1"}),
    ],
)  # fmt: skip
def test_keys_and_values_follow_the_schema(text, arguments):
    schema = {
        "properties": {
            "x": {"type": "string"}, "x>y": {"$ref": "#/$defs/N"}, "a\nb": {"type": "string"}, "n" * 200: {"type": "boolean"},
            "": {"type": "string"},
        },
        "additionalProperties": {"type": "integer"}, "$defs": {"N": {"type": "integer"}},
    }  # fmt: skip
    call = f"<tool_call>\n<function=f>\n{text}\n</function>\n</tool_call>"
    read_call = read_all_ways(lambda: parser(functions={"f": schema}), call)
    assert [(name, json.loads(text)) for name, text in read_call.calls] == [("f", arguments)]


WEATHER = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F", None]}}}
DSML_CALLS = """<|function_calls>
<|invoke name="weather">
<|parameter name="city" string="true">New
York </|parameter>
<|parameter name="days" string="false">3</|parameter>
<|parameter name="unit" string="false">null</|parameter>
</|invoke>
<|invoke name="noon">

</|invoke>
</|function_calls>""".replace("|", "\uff5cDSML\uff5c")
RECORDED = {
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>New\nYork </parameter>\n<parameter=days>3</parameter>\n"
    "<parameter=unit>null</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=noon>\n</function>\n"
    "</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">New\nYork </parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="unit">null</parameter>\n</invoke>\n<invoke name="noon">\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v32": DSML_CALLS,
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New\nYork </arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>null</arg_value>\n</tool_call>\n<tool_call>noon\n</tool_call>",
    "glm47": "<tool_call>weather<arg_key>city</arg_key><arg_value>New\nYork </arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value><arg_key>unit</arg_key><arg_value>null</arg_value></tool_call><tool_call>noon</tool_call>",
    "hy_v3": "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>New\nYork </arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>null</arg_value>\n</tool_call>\n"
    "<tool_call>noon<tool_sep>\n</tool_call>\n</tool_calls>",
}
"""Two calls, as the chat template of each family writes them."""
CALLED = [("weather", '{"city": "New\\nYork ", "days": 3, "unit": null}'), ("noon", "{}")]


@pytest.fixture(params=RECORDED)
def family(request):
    """The name of a format, and a function that makes a parser of it."""
    return request.param, lambda: parser(request.param, {"weather": WEATHER, "noon": {}})


def test_recorded_calls_split_anywhere(family):
    name, make = family
    text = f"I look.\n{RECORDED[name]}\n"
    result = read_all_ways(make, text)
    assert result == Read("I look.", CALLED)
    for at in range(len(text)):
        assert read(make(), [text[:at], text[at:]]) == result, text[:at]
    after = read_all_ways(make, RECORDED[name] + "\nThat was it.")
    assert after == Read("\nThat was it.", CALLED)


def test_special_tokens_and_letters(family):
    name, _ = family
    syntax = CALLS[name].syntax
    markers = special(*syntax.markers)
    functions = {"weather": WEATHER, "noon": {}}
    assert read_all_ways(lambda: parser(name, functions, markers), markers.encode(RECORDED[name])) == Read("", CALLED)
    as_letters = read_all_ways(lambda: parser(name, functions, markers), RECORDED[name])
    assert as_letters == Read(RECORDED[name], [])


def test_calls_of_unknown_functions_are_content(family):
    name, make = family
    text = RECORDED[name].replace("weather", "whether")
    result = read_all_ways(make, text)
    assert result.calls == [("noon", "{}")]
    assert "whether" in result.content
    assert "3" in result.content


def test_what_max_tokens_ends_is_a_call_without_an_end(family):
    name, make = family
    text = RECORDED[name]
    for at in range(text.index("weather") + len("weather>"), text.index("noon")):
        [(called, arguments)] = read_all_ways(make, text[:at]).calls or [("weather", "")]
        assert called == "weather"
        assert CALLED[0][1].startswith(arguments), text[:at]


def test_a_long_string_is_emitted_while_it_is_written(family):
    name, make = family
    begin = RECORDED[name][: RECORDED[name].index("New")]
    reader = make()
    reader.push(begin)
    emitted = [event.text for letter in 'abc"d' for event in reader.push(letter)]
    assert "".join(emitted).endswith('"city": "abc\\"d')
    assert len(emitted) > 3


def test_a_value_that_holds_its_closing_tag(family):
    name, make = family
    end = CALLS[name].syntax.parts.end_value
    text = RECORDED[name].replace("York ", f"York{end} and{end}")
    [(_, arguments), _] = read_all_ways(make, text).calls
    assert json.loads(arguments)["city"] == f"New\nYork{end} and"


@pytest.mark.parametrize("tag", ["<arg_value>", "<arg_value>\n"])
def test_the_tag_before_a_value_may_be_missing(tag):
    for name in ("glm45", "glm47", "hy_v3"):
        text = RECORDED[name].replace("<arg_value>", "").replace("\n<arg_value>", "")
        assert read_all_ways(lambda name=name: parser(name, {"weather": WEATHER, "noon": {}}), text) == Read("", CALLED)


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers(),
        "b": st.lists(st.integers() | st.text(max_size=3), max_size=3) | st.none(),
        "text": st.text(alphabet='a"<é\n', max_size=6),
    },
)


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(VALUES, max_size=3), sizes=SIZES)
def test_calls_are_read_back(calls, sizes):
    texts = [{key: value if key == "text" else json.dumps(value) for key, value in values.items()} for values in calls]
    written = [
        "<tool_call>\n<function=add>\n"
        + "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items())
        + "</function>\n</tool_call>"
        for values in texts
    ]
    result = read(make(), cut("\n".join(written), sizes))
    assert result.content == ""
    assert [json.loads(arguments) for _, arguments in result.calls] == calls


@settings(max_examples=150, deadline=None)
@given(
    text=shreds("<tool_call>", "</tool_call>", "<function=add>", "<parameter=a>", "</parameter>", "</function>", NOON), sizes=SIZES
)
def test_pieces_never_matter(text, sizes):
    result = read(make(), [text])
    assert read(make(), cut(text, sizes)) == result
    assert result.calls or result.content == text


@settings(max_examples=100, deadline=None)
@given(data=st.data(), sizes=SIZES)
def test_pieces_never_matter_in_any_format(data, sizes):
    name = data.draw(st.sampled_from(list(RECORDED)))
    syntax = CALLS[name].syntax
    parts = [*syntax.markers, *RECORDED[name].split("\n"), "weather", "noon", "city", syntax.parts.open_key, syntax.parts.end_key]
    text = data.draw(shreds(*(part for part in parts if part)))
    make = lambda: parser(name, {"weather": WEATHER, "noon": {}})  # noqa: E731
    assert read(make(), cut(text, sizes)) == read(make(), [text])

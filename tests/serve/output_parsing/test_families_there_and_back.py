# SPDX-License-Identifier: Apache-2.0
"""Grammar and parser of each format of tool calls are inverse to one another, over random schemas.

What the grammar lets a model write is read as calls whose arguments are valid, by an independent validator; and a call with valid
arguments, written in the format, is allowed by the grammar and read back. How a stream is cut changes nothing. A failure
prints the seed of its tools.
"""

from __future__ import annotations

import json
import re
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest

from phalanx.errors import OptionError
from phalanx.serve.output_parsing import Markers, OutputFormat
from phalanx.serve.output_parsing.formats import CALLS, forced_format
from phalanx.serve.output_parsing.reasoning import Begin
from phalanx.serve.output_parsing.structural_tags import forced_calls, structural_tag
from phalanx.serve.output_parsing.syntax import CallSyntax
from tests.support.fuzz import fuzz_seeds
from tests.support.grammars import accepts, opened, write
from tests.support.serve_output_parsing import bare, read_all_ways

pytestmark = pytest.mark.usefixtures("forked_python")

FORMATS = {**{name: (name, "") for name in CALLS}, "mistral with [ARGS]": ("mistral", "[TOOL_CALLS]f[ARGS]{}")}
NAMES = ["a", "b c", "x>y", 'q"uote', "é", "n\nl", "x", "_1"]
CHOICES = ["1", "2", " x ", "true", "null", 'a"b', "", "é\n", 1, 2.5, True, None]


def draw_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "short", "choice", "integer", "between", "number", "boolean", "null", "optional", "either"]
    kind = random.choice([*kinds, "array", "object", "object"] if depth else kinds)
    match kind:
        case "short":
            return {"type": "string", "minLength": random.randrange(3), "maxLength": random.randrange(3, 9)}
        case "choice":
            return {"enum": random.sample(CHOICES, random.randrange(1, 5))}
        case "between":
            return {"type": "integer", "minimum": random.randrange(-9, 3), "maximum": random.randrange(3, 900)}
        case "optional":
            return {"anyOf": [draw_schema(random, 0), {"type": "null"}]}
        case "either":
            return {"type": random.sample(["string", "integer", "boolean", "null"], 2)}
        case "array":
            return {"type": "array", "items": draw_schema(random, depth - 1), "maxItems": 3}
        case "object":
            return draw_object(random, depth - 1)
        case _:
            return {"type": kind}


def draw_object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(NAMES, random.randrange(4))
    properties = {name: draw_schema(random, depth) for name in names}
    required = [name for name in names if random.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def draw_value(random: Random, schema: dict[str, Any]) -> Any:
    """A valid value. A string whose schema also allows other values looks like none of them."""
    if "anyOf" in schema:
        return draw_value(random, random.choice(schema["anyOf"]))
    if "enum" in schema:
        return random.choice(schema["enum"])
    kind = schema["type"] if isinstance(schema["type"], str) else random.choice(schema["type"])
    match kind:
        case "string":
            letters = 'ab é<>"\\{}1\n' if isinstance(schema["type"], str) else "xyz"
            length = random.randrange(schema.get("minLength", 1), schema.get("maxLength", 8) + 1)
            return "".join(random.choice(letters) for _ in range(length))
        case "integer":
            return random.randrange(schema.get("minimum", -99), schema.get("maximum", 99) + 1)
        case "number":
            return random.choice([0, -1.5, 2.25, 10**12])
        case "boolean":
            return random.random() < 0.5
        case "null":
            return None
        case "array":
            return [draw_value(random, schema["items"]) for _ in range(random.randrange(schema["maxItems"] + 1))]
    return {
        name: draw_value(random, inner) for name, inner in schema["properties"].items()
        if name in schema["required"] or random.random() < 0.5
    }  # fmt: skip


def choices(schema: dict[str, Any]) -> list[Any]:
    return [
        each for part in schema.get("anyOf", [schema]) for each in part.get("enum", [None] if part.get("type") == "null" else [])
    ]


def text_of(value: Any, schema: dict[str, Any]) -> str:
    """A choice that looks like another one has quotation marks."""
    alike = isinstance(value, str) and value in [json.dumps(each) for each in choices(schema) if not isinstance(each, str)]
    return value if isinstance(value, str) and not alike else json.dumps(value, ensure_ascii=False)


def written(arguments: dict[str, Any], syntax: CallSyntax, properties: dict[str, Any]) -> str:
    parameter = syntax.parameter
    if syntax.quote:
        return bare(arguments, syntax.quote)
    if not parameter:
        return json.dumps(arguments, ensure_ascii=False)
    marks_strings = "KIND" in parameter  # whether the value is a text, so that its looks do not matter
    before, between, after = re.split("KEY|VALUE", parameter)
    return "".join(
        before
        + name
        + between.replace("KIND", "true" if isinstance(value, str) else "false")
        + (value if marks_strings and isinstance(value, str) else text_of(value, properties[name]))
        + after
        for name, value in arguments.items()
    )


@pytest.mark.parametrize("name", FORMATS)
def test_there_and_back(name):
    tools, template = FORMATS[name]
    backend = SimpleNamespace(token_to_id=lambda _: None)
    output = OutputFormat(SimpleNamespace(chat_template_source=template, backend=backend), None, tools, Markers({}))
    syntax, compared = output.syntax(tools), 0
    with fuzz_seeds(16, tests=len(FORMATS)) as seeds:
        for seed in seeds:
            random = Random(seed)
            functions = {function: draw_object(random, 2) for function in ("f", "g.h")[: random.randrange(1, 3)]}
            seeds.case = json.dumps(functions)
            try:
                tag = structural_tag(forced_calls(output, tools, functions, set(functions), parallel=random.random() < 0.5))
                matcher = opened("structural_tag", tag)
            except OptionError:  # it says what cannot be enforced
                continue
            require_inverse(output, forced_format(tools), syntax, functions, matcher, random)
            compared += 1
    assert compared > 0.4 * seeds.count
    print(f"{name}: {compared} schemas of {seeds.count}")


def require_inverse(output, parser, syntax, functions, matcher, random):
    def make():
        return output.parser(Begin.AFTER, functions, tools=parser)

    text = write(matcher, random.randrange(2**30))
    if text is not None:
        read = read_all_ways(make, text)
        assert read.content == "", text
        assert read.calls, text
        for function, arguments in read.calls:
            assert jsonschema_rs.Draft202012Validator(functions[function]).is_valid(json.loads(arguments)), text
    function = random.choice(list(functions))
    arguments = draw_value(random, functions[function])
    call = (
        syntax.begin.replace("NAME", function).replace("INDEX", "0")
        + written(arguments, syntax, functions[function]["properties"])
        + syntax.end
    )
    text = syntax.before + call + syntax.after
    assert accepts(matcher, text), text
    [(function_read, arguments_read)] = read_all_ways(make, text).calls
    assert (function_read, json.loads(arguments_read)) == (function, arguments), text


TOKENIZER = SimpleNamespace(chat_template_source="", backend=SimpleNamespace(token_to_id=lambda _: None))
OUTPUTS = {name: OutputFormat(TOKENIZER, None, name, Markers({})) for name in CALLS}


@pytest.mark.parametrize(
    "name", [name for name, output in OUTPUTS.items() if output.syntax(name).parameter or output.syntax(name).quote]
)
def test_a_choice_that_looks_like_another_comes_back(name):
    output, schema = OUTPUTS[name], {"anyOf": [{"enum": ["null", "2", 2, "b"]}, {"type": "null"}]}
    functions = {"f": {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}}
    syntax, tag = output.syntax(name), structural_tag(forced_calls(output, name, functions, {"f"}, parallel=False))
    for value in ("null", None, "2", 2, "b"):
        call = syntax.begin.replace("NAME", "f").replace("INDEX", "0") + written({"x": value}, syntax, {"x": schema})
        text = syntax.before + call + syntax.end + syntax.after
        assert accepts(opened("structural_tag", tag), text), text
        [(_, arguments)] = read_all_ways(lambda: output.parser(Begin.AFTER, functions, tools=forced_format(name)), text).calls
        assert json.loads(arguments) == {"x": value}, text

# SPDX-License-Identifier: Apache-2.0
"""The prompts of DeepSeek-V3.2, letter by letter as its model card describes them, and the format that is detected by them."""

from __future__ import annotations

import json

import pytest

from phalanx.errors import RequestError
from phalanx.serve.output_parsing import OutputFormat
from phalanx.serve.output_parsing.reasoning import Begin
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_output_parsing import read
from tests.support.serve_small_tokenizers import byte_level, write

BOS, EOS, USER, ASSISTANT = (
    f"<\uff5c{name}\uff5c>" for name in ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant")
)
TOOL = {
    "name": "weather",
    "description": "Weather of a place.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}}
TOOLS_TEXT = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<|DSML|function_calls>" block like the following as part of your reply to the user:
<|DSML|function_calls>
<|DSML|invoke name="$FUNCTION_NAME">
<|DSML|parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</|DSML|parameter>
...
</|DSML|invoke>
<|DSML|invoke name="$FUNCTION_NAME2">
...
</|DSML|invoke>
</|DSML|function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON \
format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, \
arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an \
example:

<|DSML|function_calls>
...
</|DSML|function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
SCHEMA
</functions>
""".replace("|DSML|", "\uff5cDSML\uff5c").replace("SCHEMA", json.dumps(TOOL, ensure_ascii=False))
INVOKE = """<|DSML|invoke name="weather">
<|DSML|parameter name="city" string="true">Zürich</|DSML|parameter>
<|DSML|parameter name="days" string="false">[1, 2]</|DSML|parameter>
</|DSML|invoke>
""".replace("|DSML|", "\uff5cDSML\uff5c")


def calls_text(count):
    return f"\n\n<\uff5cDSML\uff5cfunction_calls>\n{INVOKE * count}</\uff5cDSML\uff5cfunction_calls>"


def of_v32(folder):
    """A folder without a chat template."""
    write(folder, byte_level())
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != "chat_template"}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v32"}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = of_v32(tmp_path_factory.mktemp("v32"))
    loaded = Tokenizer.load(folder)
    loaded.special["bos_token"] = BOS
    return loaded


def message(role, content="", **fields):
    return {"role": role, "content": content, **fields}


def test_a_conversation(tokenizer):
    messages = [
        message("system", "You are a helpful assistant."), message("user", "hello"),
        message("assistant", "Hello! I am DeepSeek.", reasoning_content="thinking..."), message("user", "1+1=?"),
    ]  # fmt: skip
    begun = f"{BOS}You are a helpful assistant.{USER}hello{ASSISTANT}</think>Hello! I am DeepSeek.{EOS}{USER}1+1=?"
    assert tokenizer.apply_chat_template(messages) == f"{begun}{ASSISTANT}</think>"
    assert tokenizer.apply_chat_template(messages, thinking=True) == f"{begun}{ASSISTANT}<think>"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == begun


@pytest.mark.parametrize("system", ["Be brief.", None])
def test_tools_stand_behind_the_system_message(tokenizer, system):
    messages = [*([message("system", system)] if system else []), message("user", "Rain?")]
    prompt = tokenizer.apply_chat_template(messages, tools=[{"type": "function", "function": TOOL}])
    assert prompt == f"{BOS}{system or ''}\n\n{TOOLS_TEXT}{USER}Rain?{ASSISTANT}</think>"


@pytest.mark.parametrize("thinking", [False, True])
def test_calls_and_their_results(tokenizer, thinking):
    """Behind the last question the reasoning stays, and goes on after the results."""
    tag = "<think>" if thinking else "</think>"
    called = message("assistant", "I look.", reasoning_content="Which city?", tool_calls=[CALL, CALL])
    messages = [message("user", "Rain?"), called, message("tool", "wet"), message("tool", "dry")]
    reasoning = "Which city?</think>" if thinking else ""
    twice = calls_text(2)
    results = f"\n\n<function_results>\n<result>wet</result>\n<result>dry</result>\n</function_results>\n\n{tag}"
    prompt = tokenizer.apply_chat_template(messages, thinking=thinking)
    assert prompt == f"{BOS}{USER}Rain?{ASSISTANT}{tag}{reasoning}I look.{twice}{EOS}{results}"
    again = tokenizer.apply_chat_template([*messages, message("assistant", "Both."), message("user", "And?")], thinking=thinking)
    ended = results.removesuffix(tag) + "</think>"
    assert again == f"{BOS}{USER}Rain?{ASSISTANT}</think>I look.{twice}{EOS}{ended}Both.{EOS}{USER}And?{ASSISTANT}{tag}"


def test_results_and_calls_that_do_not_match_are_refused(tokenizer):
    with pytest.raises(RequestError, match="a result without a call"):
        tokenizer.apply_chat_template([message("user", "x"), message("tool", "y")])
    some = [message("user", "Rain?"), message("assistant", "", tool_calls=[CALL, CALL]), message("tool", "wet")]
    for behind in ([], [message("user", "And?")], [message("assistant", "Wet.")]):
        with pytest.raises(RequestError, match="results of 1 calls are missing"):
            tokenizer.apply_chat_template([*some, *behind])


def test_the_format_is_detected_and_what_the_prompt_shows_is_read(tokenizer):
    output = OutputFormat.detect(tokenizer)
    assert (output.reasoning, output.tools) == ("deepseek_v3", "deepseek_v32")
    parser = output.parser(Begin.INSIDE, {"weather": {}}, tools="deepseek_v32")
    content, calls, reasoning = read(parser, ["Hm.</think>I look." + calls_text(1)])
    assert (content.strip(), reasoning) == ("I look.", "Hm.")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", {"city": "Zürich", "days": [1, 2]})]


def test_a_template_of_the_checkpoint_counts_before_our_own(tmp_path):
    folder = of_v32(tmp_path)
    (folder / "chat_template.jinja").write_text("mine")
    assert Tokenizer.load(folder).chat_template_source == "mine"

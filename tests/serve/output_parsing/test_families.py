# SPDX-License-Identifier: Apache-2.0
"""Which format a checkpoint writes."""

from __future__ import annotations

from typing import get_args

import pytest
from tokenizers import AddedToken

from phalanx.config.serving import ReasoningParserName, ServeOptions, ToolCallParserName
from phalanx.errors import OptionError
from phalanx.serve.output_parsing import OutputFormat, deepseek, harmony
from phalanx.serve.output_parsing.formats import CALLS, REASONING, ReasoningName, ToolName
from phalanx.serve.output_parsing.reasoning import Begin
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_http_app import HERMES_TEMPLATE, LLAMA_TEMPLATE
from tests.support.serve_output_parsing import NAMES, Read, read
from tests.support.serve_small_tokenizers import byte_level, write

TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
RESPONSE_OF_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '\n<response>' + m.content }}</response>{% endif %}{% endfor %}"
)
THINK = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"


@pytest.fixture
def tokenizer(tmp_path):
    def make(template, *tokens):
        backend = byte_level()
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
        loaded = Tokenizer.load(write(tmp_path, backend))
        loaded.set_chat_template(template, origin="test")
        return loaded

    return make


@pytest.mark.parametrize(
    ("template", "tokens", "reasoning", "tools"),
    [
        (HERMES_TEMPLATE, (), None, "hermes"),
        (HERMES_TEMPLATE + THINK, (), "qwen3", "hermes"),
        (HERMES_TEMPLATE.replace("<args-json-object>", "<function=x>"), (), None, "qwen3_coder"),
        (TOOLS + "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>" + THINK, (), "qwen3", "glm45"),
        (TOOLS + "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>" + THINK, (), "qwen3", "glm47"),
        (TOOLS + '<minimax:tool_call>\n<invoke name="tool-name-1">' + THINK, (), "qwen3", "minimax_m2"),
        (TOOLS + "{{ '<response></response>' }}<tool_call>" + THINK, (), "ernie45", "hermes"),
        (TOOLS + "<minimax:tool_call>\n<invoke name='x'>" + RESPONSE_OF_TOOLS + THINK, (), "qwen3", "minimax_m2"),
        (TOOLS + "respond only with <|tool_call|> followed by a JSON list of tools used.", (), None, "granite"),
        (
            TOOLS + "{% if enable_thinking %}<|channel>thought{% endif %}{{ '<|tool_call>call:' + name if name }}",
            ("<|channel>", "<channel|>"),
            "gemma4",
            "gemma4",
        ),
        (TOOLS + 'formatted as functools[{"name": [function name]', (), None, "phi4_mini_json"),
        (TOOLS + 'respond in this format: <|tool_call|>{"name": "foo", "arguments": {}}<|/tool_call|>', (), None, "phi4_mini_json"),
        (TOOLS + "write <|START_ACTION|> and <|START_THINKING|>, <|END_THINKING|>", (), "cohere_command3", "cohere_command3"),
        (TOOLS + "Write 'Action:' followed by a list: [{\"tool_name\": title of the tool}]", (), None, "command_r"),
        (TOOLS + "Output any function calls within <function_calls></function_calls> XML tags.", (), None, "olmo3"),
        ("{{ 'Here is my thought process:' }}", (), "granite", None),
        (TOOLS + "<seed:tool_call>\n<function=example_function_name>{{ '</seed:think>' if x }}", (), "seed_oss", "seed_oss"),
        (THINK, ("<think:opensource>", "</think:opensource>"), "hy_v3", None),
        (TOOLS + "<tool_call>{function-name}<tool_sep>\n<arg_key>", (), None, "hy_v3"),
        (
            TOOLS + "{{ '<tool_call{}>x<tool_sep{}>'.format(':opensource', ':opensource') }}",
            ("<tool_sep:opensource>",),
            None,
            "hy_v3",
        ),
        (LLAMA_TEMPLATE, (), None, "llama3_json"),
        (TOOLS + "Answer with [func_name1(params_name1=params_value1), func_name2(params)].", (), None, "pythonic"),
        ("[AVAILABLE_TOOLS]" + TOOLS + "[/AVAILABLE_TOOLS]", ("[THINK]", "[/THINK]"), "mistral", "mistral"),
        (TOOLS + "{{ '[TOOL_CALLS]' }}", (), None, "mistral"),
        (
            TOOLS + THINK + "{% if thinking %}{% endif %}{{ '<\uff5cAssistant\uff5c>' + '" + deepseek.CALL_BEGIN + "' }}",
            (),
            "deepseek_v3",
            "deepseek_v31",
        ),
        (TOOLS + THINK + "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' }}", (), "qwen3", "kimi_k2"),
        (TOOLS + THINK + "{{ '<\uff5cAssistant\uff5c>" + deepseek.CALL_BEGIN + "```json' }}", (), "deepseek_r1", "deepseek_v3"),
        (THINK + "{{ '<\uff5cAssistant\uff5c>' + '" + deepseek.CALL_BEGIN + "' }}", (), "deepseek_r1", None),
        (TOOLS, harmony.MARKERS, "gpt_oss", "gpt_oss"),
        (TOOLS, (), None, None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", (), None, None),
        ("{{ raise_exception('no') }}", (), None, None),
    ],
)
def test_detect(tokenizer, template, tokens, reasoning, tools):
    output = OutputFormat.detect(tokenizer(template, *tokens))
    assert (output.reasoning, output.tools) == (reasoning, tools)
    assert set(output.markers.special) == set(tokens)


def test_options_override(tokenizer, caplog):
    llama = tokenizer(LLAMA_TEMPLATE)
    output = OutputFormat.detect(llama, reasoning="qwen3", tools="none")
    assert (output.reasoning, output.tools) == ("qwen3", None)
    output = OutputFormat.detect(llama, tools="gpt_oss")
    assert (output.reasoning, output.tools) == (None, "gpt_oss")
    gpt_oss = tokenizer(TOOLS, *harmony.MARKERS)
    output = OutputFormat.detect(gpt_oss, tools="hermes")
    assert (output.reasoning, output.tools) == (None, "hermes")
    assert OutputFormat.detect(gpt_oss, reasoning="none", tools="none").parser(Begin.AFTER, {}, tools=None) is None
    assert not caplog.records
    OutputFormat.detect(tokenizer("x"), tools="deepseek_v3")
    assert "tool_call_parser=deepseek_v3: the chat template shows no tools to the model" in caplog.text
    with pytest.raises(OptionError, match="reasoning_parser='qwen3' and tool_call_parser='gpt_oss' exclude each other"):
        OutputFormat.detect(llama, reasoning="qwen3", tools="gpt_oss")


def test_unknown_names_are_errors():
    with pytest.raises(OptionError, match=r"reasoning_parser.*'auto', 'none', 'deepseek_r1'"):
        ServeOptions.of(reasoning_parser="qwen4")
    with pytest.raises(OptionError, match="tool_call_parser"):
        ServeOptions.of(tool_call_parser="xml")


def test_every_name_has_its_format():
    assert (
        set(get_args(ReasoningParserName)) == {"auto", "none", "gpt_oss", *REASONING} == {"auto", "none", *get_args(ReasoningName)}
    )
    assert set(get_args(ToolCallParserName)) == {"auto", "none", *CALLS} == {"auto", "none", *get_args(ToolName)}


@pytest.mark.parametrize(
    ("reasoning", "prompt", "begin"),
    [
        ("qwen3", "assistant\n", Begin.OPEN),
        ("qwen3", "assistant\n<think>\n", Begin.INSIDE),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", Begin.AFTER),
        ("deepseek_r1", "assistant", Begin.INSIDE),
        ("deepseek_r1", "assistant</think>", Begin.AFTER),
        ("deepseek_v3", "the result of a tool", Begin.OPEN),
        ("mistral", "[/INST]", Begin.OPEN),
        ("seed_oss", "assistant\n<seed:think>", Begin.INSIDE),
        ("seed_oss", "assistant\n", Begin.OPEN),
        ("hy_v3", "<think></think>", Begin.AFTER),
        ("gemma4", "model\n", Begin.OPEN),
        ("gemma4", "model\n<|channel>thought\n", Begin.INSIDE),
        ("gemma4", "model\n<|channel>thought\n<channel|>", Begin.AFTER),
        ("none", "<think>", Begin.AFTER),
    ],
)
def test_the_prompt_tells_where_the_output_begins(tokenizer, reasoning, prompt, begin):
    loaded = tokenizer(TOOLS, "<|channel>", "<channel|>")
    output = OutputFormat.detect(loaded, reasoning=reasoning)
    assert output.begin(loaded.encode(prompt, add_special_tokens=False)) is begin


def test_calls_in_letters_end_a_reasoning_that_is_never_closed(tokenizer):
    output = OutputFormat.detect(tokenizer(TOOLS + '<minimax:tool_call>\n<invoke name="tool-name-1">' + THINK))
    parser = output.parser(Begin.INSIDE, NAMES, tools=output.tools)
    text = 'Hm.\n<minimax:tool_call>\n<invoke name="noon">\n</invoke>\n</minimax:tool_call>'
    assert read(parser, [text]) == Read("", [("noon", "{}")], "Hm.")


def test_tokens_are_counted_where_the_end_is_one_token(tokenizer):
    assert OutputFormat.detect(tokenizer(THINK)).token_counter(Begin.OPEN, calls=True) is None
    assert OutputFormat.detect(tokenizer(THINK, "<think>", "</think>")).token_counter(Begin.OPEN, calls=True) is not None
    assert OutputFormat.detect(tokenizer(TOOLS)).token_counter(Begin.AFTER, calls=True) is None
    assert OutputFormat.detect(tokenizer(TOOLS, *harmony.MARKERS)).token_counter(Begin.AFTER, calls=True) is not None
    assert OutputFormat.detect(tokenizer(TOOLS), reasoning="gpt_oss").token_counter(Begin.AFTER, calls=True) is None

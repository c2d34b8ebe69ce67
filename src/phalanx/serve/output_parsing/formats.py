# SPDX-License-Identifier: Apache-2.0
"""The formats of tool calls and of reasoning, one row each: how a checkpoint is known to write it, its syntax and its parser.

A template that is rendered with a tool describes the format to the model, so it is the best source. The names are those of vLLM's
parsers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import phalanx.serve.output_parsing.deepseek as deepseek
import phalanx.serve.output_parsing.gemma as gemma
import phalanx.serve.output_parsing.harmony as harmony
import phalanx.serve.output_parsing.llama as llama
import phalanx.serve.output_parsing.mistral as mistral
import phalanx.serve.output_parsing.pythonic as pythonic
from phalanx.serve.output_parsing.events import Functions, OutputParser
from phalanx.serve.output_parsing.json_blocks import JsonBlocksParser
from phalanx.serve.output_parsing.markers import Markers
from phalanx.serve.output_parsing.syntax import CallSyntax
from phalanx.serve.output_parsing.tagged import TaggedParser
from phalanx.serve.structured_output.parameters import QWEN_PARAMETER
from phalanx.serve.tokenizer import Tokenizer

ToolName = Literal[
    "gpt_oss", "gemma4", "deepseek_v3", "deepseek_v31", "deepseek_v32", "kimi_k2", "hy_v3", "glm45", "glm47", "minimax_m2",
    "seed_oss", "qwen3_coder", "hermes", "phi4_mini_json", "granite", "cohere_command3", "command_r", "mistral", "olmo3",
    "pythonic", "llama3_json",
]  # fmt: skip
ReasoningName = Literal[
    "gpt_oss", "gemma4", "deepseek_v3", "deepseek_r1", "seed_oss", "hy_v3", "cohere_command3", "granite", "ernie45", "qwen3",
    "mistral",
]  # fmt: skip
MakeParser = Callable[[Functions, Markers, CallSyntax], OutputParser]


@dataclass(frozen=True)
class CallFormat:
    """One format of tool calls.

    - syntax: how a forced call is written. variants: other syntaxes, each with a test of the checkpoint; the first that holds is
      taken.
    - parser: None for harmony, whose parser reads the reasoning, too.
    - markers: texts that may be special tokens; None: the tags of the syntax.
    - source, prompt: regular expressions; one that is given must be found in the text of the template, or in a prompt that shows a
      tool. Neither: the format is not known by these.
    - ambiguous: calls begin as JSON does, so an answer in JSON may be the same text as a call.
    """

    syntax: CallSyntax
    parser: MakeParser | None
    markers: tuple[str, ...] | None = None
    source: str | None = None
    prompt: str | None = None
    variants: tuple[tuple[Callable[[Tokenizer], bool], CallSyntax], ...] = ()
    ambiguous: bool = False

    def is_of(self, source: str, prompt: str) -> bool:
        """Whether a checkpoint writes this format. prompt: one that shows a tool, by the template `source`."""
        signs = [(self.source, source), (self.prompt, prompt)]
        return any(pattern is not None for pattern, _ in signs) and all(
            pattern is None or re.search(pattern, text, re.DOTALL) is not None for pattern, text in signs
        )

    def syntax_of(self, tokenizer: Tokenizer) -> CallSyntax:
        """The syntax of this checkpoint."""
        return next((syntax for holds, syntax in self.variants if holds(tokenizer)), self.syntax)

    def markers_of(self, syntax: CallSyntax) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        return syntax.markers if self.markers is None else self.markers


def _in_source(text: str) -> Callable[[Tokenizer], bool]:
    return lambda tokenizer: text in tokenizer.chat_template_source


def _is_token(text: str) -> Callable[[Tokenizer], bool]:
    return lambda tokenizer: tokenizer.backend.token_to_id(text) is not None


def _without_syntax(parser: Callable[[Functions, Markers], OutputParser]) -> MakeParser:
    return lambda functions, markers, _: parser(functions, markers)


def _hy(suffix: str) -> CallSyntax:
    """Released tokenizers of Hy3 write each tag with the suffix ":opensource"; those of the preview have none."""
    return CallSyntax(
        f"<tool_call{suffix}>NAME<tool_sep{suffix}>\n", f"</tool_call{suffix}>\n", f"<tool_calls{suffix}>", "",
        f"<tool_calls{suffix}>\n", f"</tool_calls{suffix}>",
        f"<arg_key{suffix}>KEY</arg_key{suffix}>\n<arg_value{suffix}>VALUE</arg_value{suffix}>\n",
    )  # fmt: skip


_LLAMA = CallSyntax('{"name": "NAME", "parameters": ', "}", '{"name":', "; ")
_OBJECT = ('{"name": "NAME", "arguments": ', "}")
_DSML = "\uff5cDSML\uff5c"
_DEEPSEEK_CALL = "tool\u2581calls?\u2581begin"

CALLS: dict[ToolName, CallFormat] = {
    "gpt_oss": CallFormat(
        CallSyntax(
            f"{harmony.CHANNEL}commentary to=functions.NAME {harmony.CONSTRAIN}json{harmony.MESSAGE}", "", harmony.CHANNEL, None
        ),
        None, harmony.MARKERS,
    ),
    "gemma4": CallFormat(
        CallSyntax("<|tool_call>call:NAME", "<tool_call|>", "<|tool_call>", "", quote=gemma.QUOTE),
        gemma.GemmaParser, ("<|tool_call>", "<tool_call|>", gemma.QUOTE), source=r"<\|tool_call>call:",
    ),
    "deepseek_v3": CallFormat(
        CallSyntax(
            f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}NAME\n```json\n", f"\n```{deepseek.CALL_END}", deepseek.CALLS_BEGIN,
            "\n", deepseek.CALLS_BEGIN, deepseek.CALLS_END,
        ),
        _without_syntax(deepseek.DeepSeekParser), deepseek.MARKERS,
        source=rf"\A(?=.*{_DEEPSEEK_CALL})(?=.*(?:function{re.escape(deepseek.SEPARATOR)}|```\s*json))",
    ),
    "deepseek_v31": CallFormat(
        CallSyntax(
            f"{deepseek.CALL_BEGIN}NAME{deepseek.SEPARATOR}", deepseek.CALL_END, deepseek.CALLS_BEGIN, "", deepseek.CALLS_BEGIN,
            deepseek.CALLS_END,
        ),
        _without_syntax(deepseek.DeepSeekParser), deepseek.MARKERS, source=_DEEPSEEK_CALL,
    ),
    "kimi_k2": CallFormat(
        CallSyntax(
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>", "<|tool_call_end|>",
            "<|tool_calls_section_begin|>", "", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        ),
        _without_syntax(deepseek.KimiParser), deepseek.KIMI_MARKERS, source=r"<\|tool_calls_section_begin\|>",
    ),
    "deepseek_v32": CallFormat(
        CallSyntax(
            f'<{_DSML}invoke name="NAME">\n', f"</{_DSML}invoke>\n", f"<{_DSML}function_calls>", "", f"<{_DSML}function_calls>\n",
            f"</{_DSML}function_calls>", f'<{_DSML}parameter name="KEY" string="KIND">VALUE</{_DSML}parameter>\n',
        ),
        TaggedParser, (_DSML,), prompt=f"<{_DSML}function_calls>",
    ),
    "hy_v3": CallFormat(
        _hy(""), TaggedParser, prompt=r"<tool_sep(?::\w+)?>", variants=((_is_token("<tool_sep:opensource>"), _hy(":opensource")),),
    ),
    "glm47": CallFormat(
        CallSyntax(
            "<tool_call>NAME", "</tool_call>", "<tool_call>", "", parameter="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
        ),
        TaggedParser, prompt=r"<tool_call>[^\n<]*<arg_key>",
    ),
    "glm45": CallFormat(
        CallSyntax(
            "<tool_call>NAME\n", "</tool_call>", "<tool_call>", "\n",
            parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        ),
        TaggedParser, prompt="<arg_key>",
    ),
    "minimax_m2": CallFormat(
        CallSyntax(
            '<invoke name="NAME">\n', "</invoke>\n", "<minimax:tool_call>", "", "<minimax:tool_call>\n", "</minimax:tool_call>",
            '<parameter name="KEY">VALUE</parameter>\n',
        ),
        TaggedParser, prompt=r"<minimax:tool_call>\s*<invoke",
    ),
    "seed_oss": CallFormat(
        CallSyntax(
            "<seed:tool_call>\n<function=NAME>\n", "</function>\n</seed:tool_call>", "<seed:tool_call>", "\n",
            parameter="<parameter=KEY>VALUE</parameter>\n",
        ),
        TaggedParser, prompt=r"<seed:tool_call>\s*<function=",
    ),
    "qwen3_coder": CallFormat(
        CallSyntax(
            "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", "<tool_call>", "\n", parameter=QWEN_PARAMETER
        ),
        TaggedParser, prompt=r"\A(?=.*<tool_call>)(?=.*<function=)",
    ),
    "hermes": CallFormat(
        CallSyntax('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "<tool_call>", "\n"),
        JsonBlocksParser, prompt="<tool_call>",
    ),
    "phi4_mini_json": CallFormat(
        CallSyntax(*_OBJECT, "functools[", ", ", "functools[", "]"), JsonBlocksParser,
        prompt=r"functools\[|<\|tool_call\|>\s*\{",
        variants=(
            (
                _in_source("<|tool_call|>"),
                CallSyntax('<|tool_call|>{"name": "NAME", "arguments": ', "}<|/tool_call|>", "<|tool_call|>", ""),
            ),
        ),
    ),
    "granite": CallFormat(  # granite 3.1 writes either tag
        CallSyntax(*_OBJECT, "<|tool_call|>", ", ", "<|tool_call|>[", "]"), partial(JsonBlocksParser, openings=("<tool_call>",)),
        prompt=r"<\|tool_call\|>",
    ),
    "cohere_command3": CallFormat(
        CallSyntax(
            '{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": ', "}", "<|START_ACTION|>", ",\n    ",
            "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>",
        ),
        JsonBlocksParser, prompt=r"<\|START_ACTION\|>",
    ),
    "command_r": CallFormat(
        CallSyntax(
            '    {\n        "tool_name": "NAME",\n        "parameters": ', "\n    }", "Action:", ",\n", "Action:\n```json\n[\n",
            "\n]```",
        ),
        JsonBlocksParser, prompt=r"Action:.*\"tool_name\"",
    ),
    "mistral": CallFormat(
        CallSyntax(*_OBJECT, "[TOOL_CALLS]", ", ", "[TOOL_CALLS][", "]"), _without_syntax(mistral.MistralParser), mistral.MARKERS,
        source=r"\[TOOL_CALLS\]|\[AVAILABLE_TOOLS\]",
        variants=(
            (_in_source("[ARGS]"), CallSyntax("[TOOL_CALLS]NAME[ARGS]", "", "[TOOL_CALLS]", "")),
            (_in_source("[TOOL_CALLS] ["), CallSyntax(*_OBJECT, "[TOOL_CALLS]", ", ", "[TOOL_CALLS] [", "]")),
        ),
    ),
    "olmo3": CallFormat(
        _LLAMA, _without_syntax(pythonic.OlmoParser), pythonic.OLMO_MARKERS, prompt="<function_calls>", ambiguous=True,
    ),
    "pythonic": CallFormat(
        _LLAMA, _without_syntax(pythonic.PythonicParser), pythonic.MARKERS, prompt=r"\[\w*func\w*\(", ambiguous=True,
    ),
    "llama3_json": CallFormat(
        _LLAMA, _without_syntax(llama.LlamaJsonParser), llama.MARKERS, ambiguous=True,
        # `{"name": function name, "parameters": dictionary of ...}`, and not a tool's own description.
        prompt=r'\{\s*"name"\s*:[^{}]*"parameters"\s*:\s*[^{\s]',
    ),
}  # fmt: skip
"""In the order in which a checkpoint is compared with them."""


def forced_format(tools: ToolName) -> ToolName:
    """The format in which forced calls are written, for a model that writes `tools`: Python calls cannot follow a JSON schema."""
    return "llama3_json" if CALLS[tools].syntax is _LLAMA else tools


@dataclass(frozen=True)
class Tags:
    """The reasoning stands between `opening` and `closing`, and the answer maybe between the two tags of `answer`. label: text that
    belongs to the opening tag, and is no part of a special token."""

    opening: str
    closing: str
    answer: tuple[str, str] | None = None
    label: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        return (self.opening, self.closing, *(self.answer or ()))


@dataclass(frozen=True)
class ReasoningFormat:
    """One format of reasoning.

    - is_of: whether a checkpoint writes it.
    - variants: other tags, each with a test of the checkpoint; the first that holds is taken.
    - begins_inside: an output whose prompt has neither tag begins inside of the reasoning.
    """

    tags: Tags
    is_of: Callable[[Tokenizer], bool]
    variants: tuple[tuple[Callable[[Tokenizer], bool], Tags], ...] = ()
    begins_inside: bool = False

    def tags_in(self, tokenizer: Tokenizer) -> Tags:
        """The tags of this checkpoint."""
        return next((tags for holds, tags in self.variants if holds(tokenizer)), self.tags)


def _knows(*texts: str) -> Callable[[Tokenizer], bool]:
    """Whether each text is in the template or the vocabulary."""
    return lambda tokenizer: all(
        text in tokenizer.chat_template_source or tokenizer.backend.token_to_id(text) is not None for text in texts
    )


def _is_deepseek(tokenizer: Tokenizer, *, by_request: bool) -> bool:
    """by_request: V3.1, which thinks only if it is asked to."""
    source = tokenizer.chat_template_source
    thinking = re.search(r"\bthinking\b", source) is not None
    return "\uff5cAssistant\uff5c" in source and "</think>" in source and thinking is by_request


def _answers_in_response(tokenizer: Tokenizer) -> bool:
    """Whether answers stand in `<response>`, and not what tools return (MiniMax-M2): the tags follow another role."""
    of_tools = r"""['"]tool['"](?:(?!['"](?:system|user|assistant)['"]).)*<response>"""
    known = _knows("</think>", "</response>")(tokenizer)
    return known and re.search(of_tools, tokenizer.chat_template_source, re.DOTALL) is None


_THINK = Tags("<think>", "</think>")
_THINK_RESPONSE = Tags("<think>", "</think>", ("<response>", "</response>"))

REASONING: dict[ReasoningName, ReasoningFormat] = {
    "gemma4": ReasoningFormat(Tags("<|channel>", "<channel|>", label="thought"), _knows("<|channel>", "<channel|>")),
    "deepseek_v3": ReasoningFormat(_THINK, partial(_is_deepseek, by_request=True)),
    "deepseek_r1": ReasoningFormat(_THINK, partial(_is_deepseek, by_request=False), begins_inside=True),
    "seed_oss": ReasoningFormat(Tags("<seed:think>", "</seed:think>"), _knows("</seed:think>")),
    "hy_v3": ReasoningFormat(
        _THINK, _is_token("</think:opensource>"),
        variants=((_is_token("</think:opensource>"), Tags("<think:opensource>", "</think:opensource>")),),
    ),
    "cohere_command3": ReasoningFormat(
        Tags("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")), _knows("<|END_THINKING|>"),
        variants=(
            (_knows("<|END_TEXT|>"), Tags("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_TEXT|>", "<|END_TEXT|>"))),
        ),
    ),
    "granite": ReasoningFormat(
        _THINK_RESPONSE, _in_source("Here is my thought process:"),
        variants=((_in_source("Here is my thought process:"), Tags("Here is my thought process:", "Here is my response:")),),
    ),
    "ernie45": ReasoningFormat(_THINK_RESPONSE, _answers_in_response),
    "qwen3": ReasoningFormat(_THINK, _knows("</think>")),
    "mistral": ReasoningFormat(Tags("[THINK]", "[/THINK]"), _is_token("[/THINK]")),
}  # fmt: skip
"""Those between tags, in the order in which a checkpoint is compared with them; harmony is apart."""

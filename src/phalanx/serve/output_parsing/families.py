# SPDX-License-Identifier: Apache-2.0
"""Which format a model writes: `OutputFormat`, found by its chat template and vocabulary, or chosen by the options.

A template that is rendered with a tool describes the format to the model, so it is the best source for tool calls. The names are
those of vLLM's parsers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import phalanx.serve.output_parsing.deepseek as deepseek
import phalanx.serve.output_parsing.harmony as harmony
import phalanx.serve.output_parsing.hermes as hermes
import phalanx.serve.output_parsing.llama as llama
import phalanx.serve.output_parsing.mistral as mistral
import phalanx.serve.output_parsing.pythonic as pythonic
import phalanx.serve.output_parsing.qwen_coder as qwen_coder
from phalanx.config.serving import ReasoningParserName, ToolCallParserName
from phalanx.errors import OptionError, RequestError
from phalanx.log import get_logger
from phalanx.serve.output_parsing.events import CallsOrContentParser, ContentParser, Functions, OutputParser
from phalanx.serve.output_parsing.markers import Markers
from phalanx.serve.output_parsing.reasoning import Begin, ReasoningParser, TagTokenCounter, TokenCounter
from phalanx.serve.tokenizer import Tokenizer

ReasoningName = Literal["deepseek_r1", "deepseek_v3", "qwen3", "mistral", "gpt_oss"]
ToolName = Literal["hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3", "deepseek_v31", "gpt_oss"]

TAGS: dict[ReasoningName, tuple[str, str]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "deepseek_v3": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""The tags around the reasoning. deepseek_r1: an output whose prompt has neither tag begins inside of the reasoning."""

MARKERS: dict[ToolName, tuple[str, ...]] = {
    "hermes": hermes.MARKERS,
    "qwen3_coder": qwen_coder.MARKERS,
    "llama3_json": llama.MARKERS,
    "pythonic": pythonic.MARKERS,
    "mistral": mistral.MARKERS,
    "deepseek_v3": deepseek.MARKERS,
    "deepseek_v31": deepseek.MARKERS,
    "gpt_oss": harmony.MARKERS,
}

PARSERS: dict[ToolName, Callable[[Functions, Markers], OutputParser]] = {
    "hermes": hermes.HermesParser,
    "qwen3_coder": qwen_coder.QwenCoderParser,
    "llama3_json": llama.LlamaJsonParser,
    "pythonic": pythonic.PythonicParser,
    "mistral": mistral.MistralParser,
    "deepseek_v3": deepseek.DeepSeekParser,
    "deepseek_v31": deepseek.DeepSeekParser,
}

logger = get_logger(__name__)

_PROBE = "phalanx_probe"
_PROMPT_END = 16
"""Tokens at the end of a prompt that may hold a tag of the reasoning and white space."""
_LLAMA_FORMAT = re.compile(r'\{\s*"name"\s*:[^{}]*"parameters"\s*:\s*[^{\s]')
"""`{"name": function name, "parameters": dictionary of ...}`, and not a tool's own description."""


@dataclass(frozen=True)
class OutputFormat:
    """How the outputs of one model are read. reasoning, tools: the names of the formats; None: such text is content.

    Build it with `detect`. One object serves all requests.
    """

    tokenizer: Tokenizer
    reasoning: ReasoningName | None
    tools: ToolName | None
    markers: Markers

    @classmethod
    def detect(
        cls, tokenizer: Tokenizer, *, reasoning: ReasoningParserName = "auto", tools: ToolCallParserName = "auto"
    ) -> OutputFormat:
        """The format of the model with this tokenizer, as the options `reasoning_parser` and `tool_call_parser` say.

        Raises OptionError if the two exclude each other.
        """
        reasoning_name = _reasoning_of(tokenizer) if reasoning == "auto" else None if reasoning == "none" else reasoning
        tool_name = _tools_of(tokenizer) if tools == "auto" else None if tools == "none" else tools
        if None not in (reasoning_name, tool_name) and (reasoning_name == "gpt_oss") != (tool_name == "gpt_oss"):
            if reasoning != "auto" and tools != "auto":
                raise OptionError(
                    f"reasoning_parser={reasoning!r} and tool_call_parser={tools!r} exclude each other",
                    why="the harmony format of gpt_oss has channels for both", next="set both to gpt_oss, or one of them to none",
                )  # fmt: skip
            # The one that was given decides.
            if reasoning == "auto":
                reasoning_name = "gpt_oss" if tool_name == "gpt_oss" else None
            else:
                tool_name = "gpt_oss" if reasoning_name == "gpt_oss" else None
        if tools not in ("auto", "none") and _prompt_with_tool(tokenizer) is None:
            logger.warning(
                "tool_call_parser=%s: the chat template shows no tools to the model; give one that does by --chat_template", tools
            )
        texts = [*MARKERS.get(tool_name, ())] if tool_name is not None else []
        if reasoning_name == "gpt_oss":
            texts += harmony.MARKERS
        elif reasoning_name is not None:
            texts += TAGS[reasoning_name]
        return cls(tokenizer, reasoning_name, tool_name, Markers.of(tokenizer, dict.fromkeys(texts)))

    def begin(self, prompt: Sequence[int]) -> Begin:
        """Where an output after this prompt begins: a template may open the reasoning, or close it at once."""
        if self.reasoning is None or self.reasoning == "gpt_oss":
            return Begin.AFTER
        opening, closing = TAGS[self.reasoning]
        end = self.tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False).rstrip()
        if end.endswith(closing):
            return Begin.AFTER
        return Begin.INSIDE if end.endswith(opening) or self.reasoning == "deepseek_r1" else Begin.OPEN

    def parser(
        self, begin: Begin, functions: Functions, *, tools: ToolName | None, calls_or_answer: bool = False
    ) -> OutputParser | None:
        """The parser of one completion; None if all its text is content.

        begin: of its prompt. functions: those that it may call. tools: the format of its calls; None: it cannot call any.
        calls_or_answer: it follows `structural_tags.calls_or_answer`, so there are no calls after other text.
        """
        if "gpt_oss" in (self.reasoning, tools):
            functions = functions if tools == "gpt_oss" else {}
            return harmony.HarmonyParser(functions, self.markers, reasoning=self.reasoning == "gpt_oss")
        answer = PARSERS[tools](functions, self.markers) if tools is not None else None
        if tools is not None and answer is not None and calls_or_answer:
            answer = CallsOrContentParser(answer, self.markers.encode(MARKERS[tools][0]))
        if self.reasoning is None:
            return answer
        opening, closing = map(self.markers.encode, TAGS[self.reasoning])
        return ReasoningParser(opening, closing, answer or ContentParser(), begin)

    def token_counter(self, begin: Begin) -> TokenCounter | None:
        """A counter of the tokens of the reasoning; None for a model that has none, and if its end is not one token."""
        if self.reasoning is None:
            return None
        if self.reasoning == "gpt_oss":
            special = self.markers.special
            known = all(marker in special for marker in (harmony.START, harmony.CHANNEL, harmony.MESSAGE))
            return harmony.HarmonyTokenCounter(special, self.tokenizer.decode) if known else None
        opening, closing = map(self.tokenizer.backend.token_to_id, TAGS[self.reasoning])
        return None if closing is None else TagTokenCounter(opening, closing, self.tokenizer.token_text, begin)


def _reasoning_of(tokenizer: Tokenizer) -> ReasoningName | None:
    if _is_harmony(tokenizer):
        return "gpt_oss"
    source, token_id = tokenizer.chat_template_source, tokenizer.backend.token_to_id
    if "</think>" in source or token_id("</think>") is not None:
        if "\uff5cAssistant\uff5c" not in source or "</think>" not in source:
            return "qwen3"
        return "deepseek_v3" if re.search(r"\bthinking\b", source) else "deepseek_r1"  # V3.1 thinks only if asked to
    return "mistral" if token_id("[/THINK]") is not None else None


def _tools_of(tokenizer: Tokenizer) -> ToolName | None:
    """The format that the chat template describes; None if it shows no tools to the model, or describes another format."""
    prompt = _prompt_with_tool(tokenizer)
    if prompt is None:
        return None
    if _is_harmony(tokenizer):
        return "gpt_oss"
    source = tokenizer.chat_template_source
    if deepseek.CALLS_BEGIN in source or deepseek.CALL_BEGIN in source:
        fenced = "function" + deepseek.SEPARATOR in source or re.search(r"```\s*json|```json", source)
        return "deepseek_v3" if fenced else "deepseek_v31"
    if "<tool_call>" in prompt:
        return "qwen3_coder" if "<function=" in prompt else "hermes"
    if "[TOOL_CALLS]" in source or "[AVAILABLE_TOOLS]" in prompt:
        return "mistral"
    if re.search(r"\[\w*func\w*\(", prompt):
        return "pythonic"
    return "llama3_json" if _LLAMA_FORMAT.search(prompt) else None


def _prompt_with_tool(tokenizer: Tokenizer) -> str | None:
    """A prompt that shows a tool to the model; None if the chat template shows none."""
    tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}}
    try:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=[tool])
    except RequestError:
        return None
    return prompt if _PROBE in prompt else None


def _is_harmony(tokenizer: Tokenizer) -> bool:
    markers = (harmony.START, harmony.CHANNEL, harmony.MESSAGE)
    return all(tokenizer.backend.token_to_id(marker) is not None for marker in markers)

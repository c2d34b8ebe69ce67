# SPDX-License-Identifier: Apache-2.0
"""Which format a model writes: `OutputFormat`, found by its chat template and vocabulary, or chosen by the options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import phalanx.serve.output_parsing.harmony as harmony
from phalanx.config.serving import ReasoningParserName, ToolCallParserName
from phalanx.errors import OptionError, RequestError
from phalanx.log import get_logger
from phalanx.serve.output_parsing.events import CallsOrContentParser, ContentParser, Functions, OutputParser
from phalanx.serve.output_parsing.formats import CALLS, REASONING, ReasoningName, Tags, ToolName
from phalanx.serve.output_parsing.markers import Markers
from phalanx.serve.output_parsing.reasoning import AnswerParser, Begin, ReasoningParser, TagTokenCounter, TokenCounter
from phalanx.serve.output_parsing.syntax import CallSyntax
from phalanx.serve.tokenizer import Tokenizer

logger = get_logger(__name__)

_PROBE = "phalanx_probe"
_PROMPT_END = 16
"""Tokens at the end of a prompt that may hold a tag of the reasoning and white space."""


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
        texts = [*CALLS[tool_name].markers_of(CALLS[tool_name].syntax_of(tokenizer))] if tool_name is not None else []
        if reasoning_name == "gpt_oss":
            texts += harmony.MARKERS
        elif reasoning_name is not None:
            texts += REASONING[reasoning_name].tags_in(tokenizer).markers
        return cls(tokenizer, reasoning_name, tool_name, Markers.of(tokenizer, dict.fromkeys(texts)))

    @property
    def tags(self) -> Tags | None:
        """The tags around this model's reasoning; None without reasoning, and for harmony."""
        return None if self.reasoning in (None, "gpt_oss") else REASONING[self.reasoning].tags_in(self.tokenizer)

    def syntax(self, tools: ToolName) -> CallSyntax:
        """How this model writes calls in the format `tools`."""
        return CALLS[tools].syntax_of(self.tokenizer)

    def begin(self, prompt: Sequence[int]) -> Begin:
        """Where an output after this prompt begins: a template may open the reasoning, or close it at once."""
        if (tags := self.tags) is None or self.reasoning is None:
            return Begin.AFTER
        end = self.tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False).rstrip()
        if end.endswith(tags.closing):
            return Begin.AFTER
        return Begin.INSIDE if end.endswith(tags.opening + tags.label) or REASONING[self.reasoning].begins_inside else Begin.OPEN

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
        answer: OutputParser | None = None
        calls = None
        if tools is not None and (make := CALLS[tools].parser) is not None:
            syntax = self.syntax(tools)
            make_calls, trigger = partial(make, functions, self.markers, syntax), self.markers.encode(syntax.trigger)
            answer, calls = make_calls(), None if CALLS[tools].ambiguous else (trigger, make_calls)
            if calls_or_answer:
                answer = CallsOrContentParser(answer, trigger)
        if (tags := self.tags) is None:
            return answer
        opening, closing = map(self.markers.encode, (tags.opening + tags.label, tags.closing))
        answer = answer or ContentParser()
        if tags.answer is not None:
            before, after = map(self.markers.encode, tags.answer)
            answer = AnswerParser(before, after, answer)
        return ReasoningParser(opening, closing, answer, begin, calls)

    def token_counter(self, begin: Begin, *, calls: bool) -> TokenCounter | None:
        """A counter of the tokens of the reasoning; None for a model that has none, and if its end is not one token. calls: of a
        request that allows calls."""
        if self.reasoning == "gpt_oss":
            special = self.markers.special
            known = all(marker in special for marker in (harmony.START, harmony.CHANNEL, harmony.MESSAGE))
            return harmony.HarmonyTokenCounter(special, self.tokenizer.decode) if known else None
        if (tags := self.tags) is None:
            return None
        opening, closing = map(self.tokenizer.backend.token_to_id, (tags.opening, tags.closing))
        if closing is None:
            return None
        trigger = self.markers.special.get(self.syntax(self.tools).trigger) if calls and self.tools is not None else None
        ends = {closing} if trigger is None else {closing, trigger}
        return TagTokenCounter(opening, ends, self.tokenizer.token_text, begin)


def _reasoning_of(tokenizer: Tokenizer) -> ReasoningName | None:
    if _is_harmony(tokenizer):
        return "gpt_oss"
    return next((name for name, format_ in REASONING.items() if format_.is_of(tokenizer)), None)


def _tools_of(tokenizer: Tokenizer) -> ToolName | None:
    """The format that the chat template describes; None if it shows no tools to the model, or describes another format."""
    prompt = _prompt_with_tool(tokenizer)
    if prompt is None:
        return None
    if _is_harmony(tokenizer):
        return "gpt_oss"
    source = tokenizer.chat_template_source
    return next((name for name, format_ in CALLS.items() if format_.is_of(source, prompt)), None)


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

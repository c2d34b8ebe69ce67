# SPDX-License-Identifier: Apache-2.0
"""What the user asks of one request: `SamplingParams`."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

import msgspec

from phalanx.config.options import refuse_unknown
from phalanx.errors import OptionError, UnknownOption

MAX_LOGPROBS = 20
"""The most alternatives per token that `logprobs` and `prompt_logprobs` may ask for (the OpenAI API's limit)."""
MAX_TOKEN_COUNT = 2**31 - 1


class _Named(msgspec.StructMeta):
    """Makes structs whose unknown keywords are errors that name the nearest known one."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        if args:
            raise UnknownOption(f"{cls.__name__} was given {args[0]!r} without a name", next=f"say which: {cls.__name__}(name=...)")
        refuse_unknown(given, cls.__struct_fields__, what=f"{cls.__name__} field")
        return super().__call__(**given)


class StructuredOutputParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_Named):
    """Structured output: exactly one of the fields is set.

    `json_schema` is a JSON schema as text, `regex` a regular expression, `grammar` EBNF (xgrammar's dialect), `json_object`
    any JSON object. `structural_tag` is xgrammar's structural tag as JSON (used for tool calls). `compiled` is filled in by
    `serve`: xgrammar's serialized compiled grammar, which the engine's matcher reads.
    """

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None
    compiled: str | None = None

    def __post_init__(self) -> None:
        given = [self.json_schema, self.regex, self.grammar, self.json_object or None, self.structural_tag]
        if sum(x is not None for x in given) != 1:
            raise OptionError(
                "StructuredOutputParams take exactly one of json_schema, regex, grammar, json_object, structural_tag",
                held=f"{sum(x is not None for x in given)} are set",
                next="set one",
            )
        _kind("json_object", self.json_object, (bool,), "True or False")
        for name in ("json_schema", "regex", "grammar", "structural_tag"):
            _kind(name, getattr(self, name), (str, NoneType), "a text (of JSON: json.dumps makes one)")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_Named):
    """How the tokens of one request are chosen, and when it ends.

    n: completions per prompt. max_tokens: new tokens at most; None means up to `max_seq_len`. min_tokens: no stop (eos,
    stop ids, stop strings) before so many new tokens. temperature: 0 is greedy. top_k: 0 or -1 is off. top_p, min_p: 1.0 and
    0.0 are off. repetition_penalty: > 0, over prompt and output; presence_penalty, frequency_penalty: -2..2, over output.
    seed: the same seed gives the same tokens whatever else is in the batch; completion i of n uses seed + i. stop: strings that
    end the text (left out of it unless include_stop_str_in_output). stop_token_ids: ids that end it, beside the model's eos ids
    (which ignore_eos switches off). logprobs: alternatives per new token (0: the chosen one only; None: off); prompt_logprobs:
    the same for the prompt. logit_bias: token id -> added to its logit, -100..100. structured_output: what the text must follow.

    Raises OptionError naming the field, its value and the values that are taken; UnknownOption, a TypeError, naming the nearest
    field for one that is not there.
    """

    n: int = 1
    max_tokens: int | None = 32
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    structured_output: StructuredOutputParams | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, MAX_TOKEN_COUNT)
        _whole("min_tokens", self.min_tokens, 0, MAX_TOKEN_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(
                f"min_tokens={self.min_tokens} was asked for", held=f"max_tokens is {self.max_tokens}", next="lower min_tokens"
            )
        _number("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, -1, MAX_TOKEN_COUNT)
        _number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_below=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _whole(name, value, 0, MAX_LOGPROBS)
        _kind("stop", self.stop, (str, list, tuple, NoneType), "a text, or a list of texts")
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise OptionError(f"stop={text!r} was asked for", why="a stop string is a text of at least one character")
        _kind("stop_token_ids", self.stop_token_ids, (list, tuple, NoneType), "a list of token ids")
        for token in self.stop_token_ids or ():
            _whole("stop_token_ids", token, 0, MAX_TOKEN_COUNT)
        _kind("logit_bias", self.logit_bias, (dict, NoneType), "a dict of token id to a number")
        _kind("structured_output", self.structured_output, (StructuredOutputParams, NoneType), "StructuredOutputParams")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            _kind(name, getattr(self, name), (bool,), "True or False")
        for token, bias in (self.logit_bias or {}).items():
            _whole("logit_bias token", token, 0, MAX_TOKEN_COUNT)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name}={value!r} was asked for", why=f"{name} is a whole number from {low} to {high}")


def _kind(name: str, value: Any, kinds: tuple[type, ...], words: str) -> None:
    if not isinstance(value, kinds):
        raise OptionError(f"{name}={value!r} was asked for", why=f"{name} is {words}")


def _number(name: str, value: Any, low: float, high: float, *, open_below: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not (low < value if open_below else low <= value) or value > high:
        edge = "above" if open_below else "from"
        raise OptionError(f"{name}={value!r} was asked for", why=f"{name} is a finite number {edge} {low:g} up to {high:g}")

# SPDX-License-Identifier: Apache-2.0
"""The parameters of one request: `SamplingParams`, and `StructuredOutputParams` within them."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

import msgspec

from phalanx.config.options import refuse_unknown
from phalanx.errors import OptionError, UnknownOption

MAX_LOGPROBS = 20
"""Upper limit of `logprobs` and `prompt_logprobs`, in alternatives per token (the limit of the OpenAI API)."""
MAX_TOKEN_COUNT = 2**31 - 1


class _Named(msgspec.StructMeta):
    """Metaclass of structs for which an unknown keyword is an error that names the nearest known one."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        if args:
            raise UnknownOption(f"{cls.__name__} got {args[0]!r} without a name", next=f"name the field: {cls.__name__}(name=...)")
        refuse_unknown(values, cls.__struct_fields__, what=f"{cls.__name__} field")
        return super().__call__(**values)


class StructuredOutputParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_Named):
    """Structured output: the format that a completion must follow. Exactly one of the fields is set.

    json_schema: a JSON schema as text.
    regex: a regular expression.
    grammar: Lark in llguidance's dialect, or GBNF.
    json_object: any JSON object.
    structural_tag: xgrammar's structural tag as JSON (for tool calls).
    compiled: set by `serve`: the grammar that the engine's matcher follows; it needs no other field.
    """

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None
    compiled: str | None = None

    def __post_init__(self) -> None:
        formats = [self.json_schema, self.regex, self.grammar, self.json_object or None, self.structural_tag]
        count = sum(value is not None for value in formats)
        if count != 1 and (count or not self.compiled):
            raise OptionError(
                "StructuredOutputParams take exactly one of json_schema, regex, grammar, json_object, structural_tag",
                held=f"{count} are set",
                next="set one",
            )
        _require_type("json_object", self.json_object, (bool,), "True or False")
        for name in ("json_schema", "regex", "grammar", "structural_tag", "compiled"):
            _require_type(name, getattr(self, name), (str, NoneType), "a string (json.dumps makes one of a JSON schema)")


POOLING_KINDS = ("last", "mean", "logits")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_Named):
    """How the tokens of one request are sampled, and when it ends.

    n: completions per prompt. max_tokens: maximum number of new tokens; None: up to `max_seq_len`. min_tokens: number of new
    tokens before which nothing stops the text (eos, stop ids, stop strings). temperature: 0 is greedy. top_k: 0 or -1 disables
    it. top_p, min_p: 1.0 and 0.0 disable them. repetition_penalty: > 0, over prompt and output. presence_penalty,
    frequency_penalty: -2..2, over the output. seed: of the random numbers, which do not depend on the batch; the logits may, in
    16 bit, so tokens repeat only where the logits do. Completion i of n uses seed + i. stop: strings that end the text (they
    are removed unless include_stop_str_in_output). stop_token_ids: ids that end the text, in addition to the model's eos ids
    (ignore_eos disables the latter). logprobs: alternatives per new token (0: only the sampled token; None: off).
    prompt_logprobs: the same for the prompt. logit_bias: token id -> value added to its logit, -100..100. structured_output:
    the format that the text must follow. cache_salt: the prefix cache shares nothing between requests with different salts, or
    with one and without. adapter: the name of a loaded adapter that the model answers with. prediction: token ids that
    the output is expected to have, a hint for n-gram speculation that changes no token. pooling: set by `serve` for embeddings
    and scores, with max_tokens=1: the vector of the prompt is the hidden state of its last token ("last"), the mean of all
    ("mean"), or the raw logits of `pooled_tokens` behind its last token ("logits").

    Raises OptionError naming the field, its value and the allowed values; UnknownOption (a TypeError) for an unknown field,
    naming the nearest one.
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
    cache_salt: str | None = None
    adapter: str | None = None
    prediction: list[int] | None = None
    detokenize: bool = True
    pooling: str | None = None
    pooled_tokens: list[int] | None = None

    def __post_init__(self) -> None:
        _require_integer("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _require_integer("max_tokens", self.max_tokens, 1, MAX_TOKEN_COUNT)
        _require_integer("min_tokens", self.min_tokens, 0, MAX_TOKEN_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}", next="lower min_tokens")
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require_integer("top_k", self.top_k, -1, MAX_TOKEN_COUNT)
        _require_number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_below=True)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _require_integer("seed", self.seed, -(2**63), 2**63 - 1)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _require_integer(name, value, 0, MAX_LOGPROBS)
        _require_type("stop", self.stop, (str, list, tuple, NoneType), "a string or a list of strings")
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise OptionError(f"stop={text!r} is not valid", why="a stop string has at least one character")
            _require_unicode("stop", text)
        _require_type("stop_token_ids", self.stop_token_ids, (list, tuple, NoneType), "a list of token ids")
        for token in self.stop_token_ids or ():
            _require_integer("stop_token_ids", token, 0, MAX_TOKEN_COUNT)
        _require_type("prediction", self.prediction, (list, tuple, NoneType), "a list of token ids")
        _require_type("logit_bias", self.logit_bias, (dict, NoneType), "a dict of token ids to numbers")
        _require_type("cache_salt", self.cache_salt, (str, NoneType), "a string")
        if self.cache_salt == "":
            raise OptionError("cache_salt='' is not valid", why="a salt has at least one character")
        _require_type("adapter", self.adapter, (str, NoneType), "the name of an adapter")
        _require_type("structured_output", self.structured_output, (StructuredOutputParams, NoneType), "StructuredOutputParams")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            _require_type(name, getattr(self, name), (bool,), "True or False")
        if self.pooling is not None and (self.pooling not in POOLING_KINDS or self.max_tokens != 1 or self.n != 1):
            raise OptionError(
                f"pooling={self.pooling!r} is not valid", why=f"it must be one of {POOLING_KINDS}, with max_tokens=1 and n=1"
            )
        _require_type("pooled_tokens", self.pooled_tokens, (list, tuple, NoneType), "a list of token ids")
        if (self.pooling == "logits") != bool(self.pooled_tokens):
            raise OptionError(
                f"pooled_tokens={self.pooled_tokens!r} is not valid with pooling={self.pooling!r}",
                why="pooling='logits' needs at least one token, and nothing else reads them",
            )  # fmt: skip
        for token, bias in (self.logit_bias or {}).items():
            _require_integer("logit_bias token", token, 0, MAX_TOKEN_COUNT)
            _require_number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _require_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name}={value!r} is not valid", why=f"it must be an integer from {low} to {high}")


def _require_type(name: str, value: Any, kinds: tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kinds):
        raise OptionError(f"{name}={value!r} is not valid", why=f"it must be {expected}")
    if isinstance(value, str):
        _require_unicode(name, value)


def _require_unicode(name: str, text: str) -> None:
    """A message to the engine is UTF-8, which has no surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"{name}={text!r} is not valid", why=f"character {error.start} is a surrogate, which UTF-8 does not have"
        ) from None


def _require_number(name: str, value: Any, low: float, high: float, *, open_below: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not (low < value if open_below else low <= value) or value > high:
        edge = "greater than" if open_below else "from"
        raise OptionError(f"{name}={value!r} is not valid", why=f"it must be a finite number {edge} {low:g} up to {high:g}")

# SPDX-License-Identifier: Apache-2.0
"""Structured output inside the engine: `Grammars` opens a `Matcher` for each constrained request, which tells the tokens that its
grammar allows next.

The grammars are llguidance's Lark text, as `serve.structured_output` writes and checks it. Nothing is compiled ahead: masks are
computed lazily. The limits below bound the work of one token; what exceeds them ends its request with an error.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.engine.messages import AddRequest, Vocabulary
from phalanx.errors import PhalanxError, RequestError

if TYPE_CHECKING:
    import llguidance

HEAD = '%llguidance {"no_forcing": true}\n'
"""The first line of each grammar. The model chooses among all tokens of a text that the grammar forces, as it does elsewhere."""
CACHED_GRAMMARS = 64
"""Grammars that stay in memory, with the states that their lexers have met."""
MAX_ITEMS_IN_ROW = 2_000
"""Parser items at one byte. An object with n optional properties has 4 n."""
STEP_MAX_ITEMS = 20_000
"""Parser items of one mask: a millisecond."""
STEP_LEXER_FUEL = 200_000
"""Work of the lexer for one mask: 14 ms."""
MAX_LEXER_STATES = 50_000
"""States of one grammar's lexer, of 1 to 2 kB."""
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [*(f"{_CHARACTER}{{1,{length}}}" for length in (2, 4, 6, 8, 10, 15, 30)), f"{_CHARACTER}+"]
"""Kinds of tokens that a mask allows at once, where a string may have so many more characters. With llguidance's own list, which
lacks the short ones, a mask near the end of a bounded string takes 4 ms for 130,000 tokens; with this one 0.7 ms."""

_LIMITS = ("too many", "max is", "fuel", "limit", "TooComplex")
"""Words of llguidance's errors of a limit."""


class TokenMatcher(Protocol):
    """What a constrained request needs of its grammar; `Matcher` is the implementation."""

    def mask(self) -> bytes:
        """The tokens that may come next: int32 words of (vocab_size + 31) // 32, little endian. Computed once for each token."""

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """`mask`, and the masks behind each of these drafts of the next tokens, up to the first that the grammar refuses or that
        completes the text. The matcher stays where it is."""

    def accept(self, token: int) -> None: ...

    @property
    def finished(self) -> bool: ...


OpenMatcher = Callable[[str], TokenMatcher]


def no_grammars(compiled: str) -> TokenMatcher:
    """The `OpenMatcher` of an engine without structured output."""
    raise RequestError(f"the grammar {compiled[:60]!r} cannot be followed", held="this engine opens no grammars")


def request_matcher(add: AddRequest, open_matcher: OpenMatcher) -> TokenMatcher | None:
    """The matcher of a request; None where it is unconstrained. Raises RequestError when its grammar was not compiled, or not into
    something readable."""
    params = add.params.structured_output
    if params is None:
        return None
    if not params.compiled:
        raise RequestError("structured output has no compiled grammar", next="compile it in serve")
    try:
        return open_matcher(params.compiled)
    except PhalanxError:
        raise
    except Exception as error:
        raise RequestError("the compiled grammar cannot be read", why=repr(error), next="compile it again") from error


@dataclass
class _TokenList:
    """A vocabulary as llguidance reads it."""

    tokens: list[bytes]
    eos_token_id: int | None
    bos_token_id: int | None = None
    special_token_ids: list[int] = field(default_factory=list)
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("no grammar forces tokens, so no text is tokenized")


class Grammars:
    """The grammars of one engine. Several threads may open them at once.

    vocabulary: read when it is first needed, which takes a second for 130,000 tokens, in which nothing else runs in this process;
    `prepare` does it early. vocab_size: the width of the logits. eos_token_ids: of the model.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        self._vocabulary, self._size, self._stops = vocabulary, vocab_size, list(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._opened: OrderedDict[str, _Entry] = OrderedDict()

    def prepare(self) -> llguidance.LLTokenizer:
        """Read the vocabulary, unless that has been done."""
        import numpy  # noqa: F401  # for the masks

        with self._reading:
            if self._tokenizer is None:
                vocabulary = self._vocabulary()
                self._stops = self._stops or vocabulary.eos_token_ids
                tokens = [*vocabulary.tokens[: self._size], *([b""] * (self._size - len(vocabulary.tokens)))]
                self._tokenizer = tokenizer_of(tokens, self._stops)
            return self._tokenizer

    def open(self, grammar: str) -> Matcher:
        """A matcher at the begin of a grammar, with its first mask. Raises RequestError for a grammar that is not valid, is beyond
        the limits, or that no text satisfies."""
        with self._lock:
            entry = self._opened.setdefault(grammar, _Entry())
            self._opened.move_to_end(grammar)
            while len(self._opened) > CACHED_GRAMMARS:
                self._opened.popitem(last=False)
        with entry.lock:  # of many completions of one request, one reads the grammar
            if entry.matcher is None:
                entry.matcher = self._read(grammar)
            return entry.matcher.copy()

    def _read(self, grammar: str) -> Matcher:
        matcher = read_grammar(self.prepare(), grammar)
        if matcher.is_error():
            raise RequestError("the grammar of this request cannot be read", why=_reason(matcher), next="simplify it")
        opened = Matcher(matcher, self._size, self._stops)
        opened.mask()
        return opened


def tokenizer_of(tokens: list[bytes], stops: Sequence[int], *, slices: Sequence[str] = _SLICES) -> llguidance.LLTokenizer:
    """llguidance's view of a vocabulary. stops: tokens that end a text."""
    import llguidance

    listed: Any = _TokenList(tokens, stops[0] if stops else None)
    return llguidance.LLTokenizer(listed, eos_token=list(stops) or None, slices=list(slices))


def read_grammar(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """llguidance's matcher of a grammar, within the limits of one token's work."""
    import llguidance

    limits = llguidance.LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW, step_max_items=STEP_MAX_ITEMS, step_lexer_fuel=STEP_LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES, verbose_errors=False,
    )  # fmt: skip
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


@dataclass
class _Entry:
    """A grammar, None until it was read. lock: held by whoever reads it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    matcher: Matcher | None = None


class Matcher:
    """Follows the output of one request through its grammar. Opened by `Grammars`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, stops: Sequence[int]) -> None:
        self._matcher, self._size, self._stops = matcher, vocab_size, stops
        self._mask: bytes | None = None
        self._ended = False  # a stop token was accepted

    def copy(self) -> Matcher:
        """A matcher in the same state, which goes its own way."""
        other = Matcher(self._matcher.deep_copy(), self._size, self._stops)
        other._mask, other._ended = self._mask, self._ended
        return other

    @property
    def finished(self) -> bool:
        """The text is complete, and its stop token was accepted. Without one, the end of the grammar ends it."""
        return self._ended or (not self._stops and self._complete)

    @property
    def _complete(self) -> bool:
        """Nothing but a stop token can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> bytes:
        """StepRow.mask for the next token: bit t is set where token t is allowed. A stop token is allowed once the text is
        complete. When finished, only a stop token is allowed (or, where the model has none, any token: the request is over).

        Raises RequestError where the grammar allows no token, or is beyond a limit.
        """
        if self._mask is None:
            self._mask = self._next_mask()
        return self._mask

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """As `TokenMatcher`. Raises as `mask`."""
        masks, taken = [self.mask()], 0
        try:
            for token in drafts:
                # A draft that ends the text is not followed: the matcher would have to leave its end again.
                if token < 0 or token in self._stops or self._complete or self._matcher.try_consume_tokens([token]) != 1:
                    break
                taken += 1
                if not self._stops and self._matcher.is_stopped():
                    break
                masks.append(self._next_mask())
        finally:
            if taken and not self._matcher.is_error():
                self._matcher.rollback(taken)
        return masks

    def accept(self, token: int) -> None:
        """Take the token that was sampled; once finished, any token is ignored. Raises RequestError when the grammar rejects it, or
        is beyond a limit."""
        if self.finished:
            return
        if token in self._stops and self._matcher.is_accepting():
            self._ended, self._mask = True, None
            return
        self._mask = None
        if self._matcher.is_stopped() or not self._matcher.consume_token(token):
            raise self._error(f"the grammar rejects the sampled token {token}")

    def _next_mask(self) -> bytes:
        if self._ended or self._complete:
            return self._final_mask()
        import numpy as np

        words = np.zeros((self._size + 32) // 32, dtype=np.int32)  # without a stop token, llguidance adds one
        width = (self._size + (not self._stops) + 31) // 32
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, 4 * width)
        if self._matcher.is_error():
            if "NoExtensionBias" in self._matcher.get_error():
                raise RequestError(
                    "structured output reached a dead end", held="the grammar allows no token of this vocabulary here",
                    why="it leads to a branch that no text satisfies, or to characters for which this model has no tokens",
                    next="check the grammar for unreachable or unsatisfiable branches",
                )  # fmt: skip
            raise self._error("structured output failed")
        if not self._stops:
            words[self._size // 32] &= (1 << self._size % 32) - 1
        return words[: (self._size + 31) // 32].astype("<i4").tobytes()

    def _final_mask(self) -> bytes:
        import numpy as np

        allowed = np.zeros(32 * ((self._size + 31) // 32), dtype=np.uint8)
        allowed[list(self._stops) if self._stops else slice(self._size)] = 1
        return np.packbits(allowed, bitorder="little").tobytes()

    def _error(self, failure: str) -> RequestError:
        reason = _reason(self._matcher)
        if any(words in reason for words in _LIMITS):
            return RequestError(
                "structured output takes too long to follow", held=f"the grammar exceeds a limit of the parser: {reason}",
                why="it is ambiguous, or has too many alternatives at this place", next="simplify it",
            )  # fmt: skip
        return RequestError(failure, why=reason, next="report this as a bug")


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The first line of a matcher's error."""
    return (matcher.get_error().partition("\n")[0] or str(matcher.stop_reason()))[:300]

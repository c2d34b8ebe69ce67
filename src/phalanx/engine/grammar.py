# SPDX-License-Identifier: Apache-2.0
"""Structured output inside the engine: `Matcher`, one per constrained request, tells which tokens its grammar allows next.

`StructuredOutputParams.compiled` names two files that serve wrote on this host, since together they have megabytes: xgrammar's view
of the tokenizer, and the compiled grammar. Their names are digests of their content, so each is read once.
xgrammar is imported when the first matcher is made, or by `warm`: it brings torch, which takes seconds.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from phalanx.engine.messages import AddRequest
from phalanx.errors import PhalanxError, RequestError


class TokenMatcher(Protocol):
    """What a constrained request needs of its grammar; `Matcher` is the implementation."""

    def mask(self) -> bytes:
        """The tokens that may come next: int32 words of (vocab_size + 31) // 32, little endian. Computed once for each token."""

    def accept(self, token: int) -> None: ...

    @property
    def finished(self) -> bool: ...


OpenMatcher = Callable[[str], TokenMatcher]

CACHED_BYTES = 48 << 20
"""Bytes of the files of grammars that stay in memory. A grammar takes about 1.2 times its file, which may have 32 MiB."""


def warm() -> None:
    """Import what a Matcher needs. For a thread, so that the loop does not wait while the first constrained request does."""
    import xgrammar  # noqa: F401


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


class Matcher:
    """Follows the output of one request through its grammar.

    compiled: StructuredOutputParams.compiled. Raises RequestError when the files that it names cannot be read.
    """

    def __init__(self, compiled: str) -> None:
        import xgrammar

        grammar = _grammars.read(compiled)
        info = grammar.tokenizer_info
        self._stops = frozenset(info.stop_token_ids)
        # Without a stop token, only the end of the grammar can end it.
        self._matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=not self._stops)
        self._words = np.zeros((1, (info.vocab_size + 31) // 32), dtype=np.int32)
        # xgrammar leaves the bits behind the last token set.
        bits = np.arange(32 * self._words.size) < info.vocab_size
        self._mask: bytes | None = None
        self._compiled, self._began = compiled, False
        self._vocabulary = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32).reshape(self._words.shape)

    @property
    def finished(self) -> bool:
        """The text is complete and its stop token was accepted (or the model has none): nothing can follow."""
        return bool(self._matcher.is_terminated())

    def mask(self) -> bytes:
        """StepRow.mask for the next token: bit t is set where token t is allowed. A stop token is allowed once the text is
        complete. When finished, only a stop token is allowed (or, where the model has none, any token: the request is over)."""
        if self._mask is None:
            self._mask = self._next_mask() if self._began else _grammars.first_mask(self._compiled, self._next_mask)
        return self._mask

    def _next_mask(self) -> bytes:
        if not self.finished:
            self._matcher.fill_next_token_bitmask(self._words)
            return (self._words & self._vocabulary).astype("<i4").tobytes()
        words = np.zeros_like(self._words) if self._stops else self._vocabulary.copy()
        for token in self._stops:
            words.view(np.uint32)[0, token // 32] |= np.uint32(1 << token % 32)
        return words.astype("<i4").tobytes()

    def accept(self, token: int) -> None:
        """Take the token that was sampled; once finished, any token is ignored. Raises RequestError when the grammar rejects it."""
        if self.finished:
            return
        self._mask, self._began = None, True
        if not self._matcher.accept_token(token):
            self._matcher.fill_next_token_bitmask(self._words)
            if not (self._words & self._vocabulary).any():  # no token is allowed, so whichever is sampled is rejected
                raise RequestError(
                    "structured output reached a dead end", held="the grammar allows no token of this vocabulary here",
                    why="it leads to a branch that no text satisfies, or to characters for which this model has no tokens",
                    next="check the grammar for unreachable or unsatisfiable branches",
                )  # fmt: skip
            raise RequestError(f"the grammar rejects the sampled token {token}", next="report this as a bug")


class GrammarCache:
    """The grammars that were used last, by `StructuredOutputParams.compiled`: as many as `max_bytes` of files, but at least one.
    Several threads may read at once; of one grammar, each reads it and makes its first mask once, for which the others wait: 128
    completions of a request would take the cores from the loop for a second."""

    def __init__(self, max_bytes: int = CACHED_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(entry.grammar is not None for entry in self._entries.values())

    def read(self, compiled: str) -> Any:
        """The compiled grammar. Raises RequestError when the files cannot be read."""
        entry = self._entry(compiled)
        with entry.lock:
            if entry.grammar is not None:
                return entry.grammar
            try:
                grammar, size = _read(compiled)
            except RequestError:
                with self._lock:
                    if self._entries.get(compiled) is entry:
                        del self._entries[compiled]
                raise
            with self._lock:
                entry.grammar, entry.size = grammar, size
                if self._entries.get(compiled) is entry:
                    self._bytes += size
                    self._drop_oldest()
        return grammar

    def first_mask(self, compiled: str, make: Callable[[], bytes]) -> bytes:
        """The mask at the begin of a grammar, which `make` makes unless it is there."""
        with self._lock:
            entry = self._entries.get(compiled)
        if entry is None:  # it was dropped
            return make()
        with entry.lock:
            if entry.first_mask is None:
                entry.first_mask = make()
            return entry.first_mask

    def _entry(self, compiled: str) -> _Entry:
        with self._lock:
            entry = self._entries.setdefault(compiled, _Entry())
            self._entries.move_to_end(compiled)
            return entry

    def _drop_oldest(self) -> None:
        """Drop grammars until the others fit, but no more than all but the last."""
        for compiled in list(self._entries):
            if self._bytes <= self._max_bytes or len(self) == 1:
                return
            if self._entries[compiled].grammar is not None:
                self._bytes -= self._entries.pop(compiled).size


@dataclass
class _Entry:
    """A grammar, None until it was read. lock: held by whoever reads it or makes its first mask. size: bytes of its file."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    grammar: Any = None
    size: int = 0
    first_mask: bytes | None = None


_grammars = GrammarCache()


def _read(compiled: str) -> tuple[Any, int]:
    """A grammar and the bytes of its file."""
    import xgrammar

    try:
        files = json.loads(compiled)
        content = Path(files["grammar"]).read_bytes()
        grammar = xgrammar.CompiledGrammar.deserialize_json(content.decode(), _tokenizer_info(files["tokenizer"]))
        return grammar, len(content)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RequestError(
            "the compiled grammar of this request cannot be read", held=str(error) or type(error).__name__,
            why="it has left the cache, or was compiled by another version or on another host", next="send the request again",
        ) from None  # fmt: skip


@functools.lru_cache(maxsize=4)
def _tokenizer_info(path: str) -> Any:
    import xgrammar

    return xgrammar.TokenizerInfo.deserialize_json(Path(path).read_text(encoding="utf-8"))


def open_matcher(compiled: str) -> TokenMatcher:
    """The matcher of a compiled grammar."""
    return Matcher(compiled)

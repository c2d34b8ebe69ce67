# SPDX-License-Identifier: Apache-2.0
"""Which tokens a grammar takes next: `Matcher`, one per guided request.

`StructuredOutputParams.compiled` names two files that `serve.grammar` wrote on this host, since together they have megabytes: what xgrammar needs to
know of the tokenizer, and the compiled grammar. Their names are digests of their content, so that each is read once.
xgrammar is imported when the first matcher is made, or by `warm`: it brings torch, which takes seconds.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import RequestError


def warm() -> None:
    """Import what a Matcher needs. For a thread at start-up, so that the first guided request does not pay for it."""
    import xgrammar  # noqa: F401


class Matcher:
    """Follows one request's output through its grammar.

    compiled: StructuredOutputParams.compiled. Raises RequestError when what it names cannot be read.
    """

    def __init__(self, compiled: str) -> None:
        import xgrammar

        grammar = _grammar(compiled)
        info = grammar.tokenizer_info
        self._stops = frozenset(info.stop_token_ids)
        # Without a stop token, nothing but the end of the grammar can end it.
        self._matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=not self._stops)
        self._words = np.zeros((1, (info.vocab_size + 31) // 32), dtype=np.int32)
        # xgrammar leaves the bits behind the last token set.
        bits = np.arange(32 * self._words.size) < info.vocab_size
        self._known = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32).reshape(self._words.shape)

    @property
    def finished(self) -> bool:
        """The text is complete and its stop token was accepted (or the model has none): nothing can follow."""
        return bool(self._matcher.is_terminated())

    def mask(self) -> bytes:
        """Row.mask for the next token: bit t is set where token t may come. A stop token may come once the text is complete; when
        finished, nothing but a stop token may (or, where the model has none, anything: the request is over)."""
        if not self.finished:
            self._matcher.fill_next_token_bitmask(self._words)
            return (self._words & self._known).astype("<i4").tobytes()
        words = np.zeros_like(self._words) if self._stops else self._known.copy()
        for token in self._stops:
            words.view(np.uint32)[0, token // 32] |= np.uint32(1 << token % 32)
        return words.astype("<i4").tobytes()

    def accept(self, token: int) -> None:
        """Take the token that was sampled; once finished, whatever comes is ignored. Raises RequestError when it does not fit."""
        if not self.finished and not self._matcher.accept_token(token):
            self._matcher.fill_next_token_bitmask(self._words)
            if not (self._words & self._known).any():  # whatever is sampled then
                raise RequestError(
                    "an answer under a grammar was asked for", held="no token of this model may follow what is written of it",
                    why="the grammar leads on to what no text satisfies, or to characters that this model has no tokens for",
                    next="change the grammar",
                )  # fmt: skip
            raise RequestError(
                f"token {token} was sampled under a grammar", why="the grammar does not take it there", next="report this as a bug"
            )


@functools.lru_cache(maxsize=64)
def _grammar(compiled: str) -> Any:
    import xgrammar

    try:
        files = json.loads(compiled)
        text = Path(files["grammar"]).read_text(encoding="utf-8")
        return xgrammar.CompiledGrammar.deserialize_json(text, _tokenizer_info(files["tokenizer"]))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RequestError(
            "this request's compiled grammar cannot be read", held=str(error) or type(error).__name__,
            why="it has left the cache, or was compiled by another version or on another host", next="ask again",
        ) from None  # fmt: skip


@functools.lru_cache(maxsize=4)
def _tokenizer_info(path: str) -> Any:
    import xgrammar

    return xgrammar.TokenizerInfo.deserialize_json(Path(path).read_text(encoding="utf-8"))

# SPDX-License-Identifier: Apache-2.0
"""The state of one request inside the engine."""

from __future__ import annotations

from phalanx.engine.grammar import TokenMatcher
from phalanx.engine.messages import AddRequest, RequestUpdate, RowResult, SlotAssignment, TokenLogprobs
from phalanx.errors import PhalanxError, RequestError


class Request:
    """One completion of one prompt.

    Its tokens are counted in three numbers. `tokens` are those whose ids the engine knows: the prompt and the output so far.
    `pending` more are sampled by steps in flight, the last of them by step `sampled_in`, and known to the device only. `submitted`
    positions, counted from 0, have been put into steps since the last admission, so the next row starts there. A row that reaches
    len(tokens) + pending samples.

    `limit` is the length, prompt included, at which the request ends with "length". `slot` is -1 while it waits. `blocks` holds a
    KV block per block_size positions, -1 where a block left the sliding window; those from `first_live` on are referenced.
    """

    __slots__ = (  # noqa: RUF023  grouped by meaning
        "id", "params", "tokens", "prompt_length", "stop_ids", "eos_ids", "min_length", "seed", "limit", "matcher", "constrained",
        "steady", "submitted", "pending", "sampled_in", "in_flight", "slot", "blocks", "shared", "sent", "first_live", "keys",
        "registered", "chunk_cap", "to_compute", "cached_tokens", "was_admitted", "ended", "prompt_logprobs", "grammar_row",
        "grammar_seconds", "grammar_quick",
    )  # fmt: skip

    def __init__(self, add: AddRequest, *, seed: int, limit: int, matcher: TokenMatcher | None) -> None:
        self.id = add.request_id
        self.params = add.params
        self.tokens = list(add.token_ids)
        self.prompt_length = len(add.token_ids)
        self.stop_ids = frozenset(add.stop_token_ids)
        self.eos_ids = frozenset(add.eos_token_ids)
        self.min_length = self.prompt_length + add.params.min_tokens
        self.seed = seed
        self.limit = limit
        self.matcher = matcher
        self.constrained = matcher is not None
        self.steady = not (add.stop_token_ids or add.params.stops or self.constrained)  # only its limit ends it
        self.submitted = 0
        self.pending = 0
        self.sampled_in = 0
        self.in_flight = 0  # rows in steps whose results have not been processed
        self.slot = -1
        self.blocks: list[int] = []
        self.shared = 0  # how many of them the prefix cache gave
        self.sent = 0  # how many of them the ranks know
        self.first_live = 0
        self.keys: list[bytes] = []
        self.registered = 0  # how many of its full blocks have been offered to the prefix cache
        self.chunk_cap = 0
        self.to_compute: int | None = None  # while it waits: of its tokens those that the prefix cache lacked when it was asked
        self.cached_tokens = 0
        self.was_admitted = False
        self.ended = False
        self.grammar_row: RowResult | None = None  # its token is being accepted by the grammar
        self.grammar_seconds = 0.0  # CPU time of all calls, less TOKEN_SECONDS for each
        self.grammar_quick = True  # the last call was
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if add.params.prompt_logprobs is None else [None]

    @property
    def to_go(self) -> int | None:
        """How many more tokens it will take beyond those that are known or pending; None where it may end at any time."""
        return self.limit - len(self.tokens) - self.pending if self.steady else None

    def assignment(self) -> SlotAssignment:
        """The message to the ranks when the request takes its slot. A copy: tokens grow while the message is on its way."""
        return SlotAssignment(self.slot, self.tokens.copy(), self.prompt_length, self.params, self.seed, sorted(self.stop_ids))

    def take_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Append those of positions start+1 on, of which a recomputation may repeat some."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - 1 - start :]

    def stops_at(self, token: int) -> bool:
        """The token is a stop token, and may be one here. The sampler forbids stop ids while fewer than min_tokens are out; so does
        this line."""
        return token in self.stop_ids and len(self.tokens) >= self.min_length

    def follow(self, token: int) -> bool:
        """Advance the grammar by a sampled token, and compute its next mask; returns whether the text is complete. This may take
        long and runs beside the loop: it changes the matcher only. Raises RequestError when the grammar rejects the token."""
        assert self.matcher is not None
        if self.ended:
            return False
        try:
            self.matcher.accept(token)
            complete = self.matcher.finished
            if not complete:
                self.matcher.mask()
        except PhalanxError:
            raise
        except Exception as error:
            raise RequestError(f"the grammar failed on token {token}", why=repr(error)) from error
        return complete

    def take_token(self, result: RowResult, token: int, *, complete: bool = False) -> RequestUpdate:
        """Append a sampled token and return the update for the client; `ended` is set when it is the last one. complete: what
        `follow` returned."""
        tokens = self.tokens
        first = len(tokens) == self.prompt_length
        stopping = self.stops_at(token) or complete
        tokens.append(token)
        update = RequestUpdate(self.id, [token], cached_tokens=self.cached_tokens)
        if result.logprobs is not None:
            update.logprobs = [result.logprobs]
        if first:
            update.prompt_logprobs = self.prompt_logprobs
        if stopping:
            update.finish_reason = "stop"
            if token in self.stop_ids and token not in self.eos_ids:
                update.stop_reason = token
        elif len(tokens) >= self.limit:
            update.finish_reason = "length"
        self.ended = update.finish_reason is not None
        return update

# SPDX-License-Identifier: Apache-2.0
"""The state of one request inside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.engine.adapters import Adapter
from phalanx.engine.grammar import TokenMatcher
from phalanx.engine.messages import AddRequest, RequestRejected, RequestUpdate, RowResult, SlotAssignment, TokenLogprobs
from phalanx.engine.prefix import root_key
from phalanx.errors import LogitsNotFinite, PhalanxError, RequestError


@dataclass
class Followed:
    """How a grammar takes the tokens of a row. complete_at: the number of the one that completes the text. Where none stops: masks,
    of the next token and behind each of its drafts that the grammar takes, and those drafts."""

    complete_at: int | None = None
    masks: list[bytes] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


class Request:
    """One completion of one prompt.

    Its tokens are counted in four numbers. `tokens` are those whose ids the engine knows: the prompt and the output so far.
    `pending` more, at least, are sampled by steps in flight, the last of them by step `sampled_in`, and known to the device only.
    `submitted` positions, counted from 0, have certainly been put into steps since the last admission, and `drafted` more if all
    drafts in flight are accepted: the next row starts between. A row that reaches len(tokens) + pending samples.

    `limit` is the length, prompt included, at which the request ends with "length". `slot` is -1 while it waits. `blocks` holds for
    each block_size positions a KV block of each group, one group behind the other, -1 where a block left the group's window; it has
    room for `capacity` positions. Of each group those from `first_live` on are referenced.
    """

    __slots__ = (  # noqa: RUF023  grouped by meaning
        "id", "params", "tokens", "prompt_length", "stop_ids", "eos_ids", "min_length", "seed", "limit", "matcher", "constrained",
        "adapter", "steady", "submitted", "drafted", "pending", "sampled_in", "decoding", "proposed", "in_flight", "slot", "blocks",
        "capacity", "shared", "loads", "sent", "first_live", "keys", "root_key", "registered", "kept_at", "chunk_cap",
        "to_compute", "cached_tokens", "arrival", "was_admitted", "scheduled", "ended", "prompt_logprobs", "drafts", "masks",
        "grammar_row", "grammar_seconds", "grammar_quick",
    )  # fmt: skip

    def __init__(
        self, add: AddRequest, *, seed: int, limit: int, matcher: TokenMatcher | None, adapter: Adapter | None = None
    ) -> None:
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
        self.adapter = adapter
        self.steady = not (add.stop_token_ids or add.params.stops or self.constrained)  # only its limit ends it
        self.arrival = 0  # its number among those of the scheduler
        self.submitted = 0
        self.drafted = 0
        self.pending = 0
        self.decoding = False  # a step since the last admission samples for it, so its last token and drafts are in its slot
        self.sampled_in = 0
        self.proposed = 0  # drafts that the last step that samples for it proposes
        self.in_flight = 0  # rows in steps whose results have not been processed
        self.slot = -1
        self.blocks: list[int] = []
        self.capacity = 0
        self.shared = 0  # how many of the positions the prefix cache gave
        self.loads = False  # while it waits: for its prefix, which comes from host memory in parts
        self.sent = 0  # how many of them the ranks know
        self.first_live: list[int] = []
        self.keys: list[bytes] = []
        self.root_key = root_key(add.params.cache_salt or "", b"" if adapter is None else adapter.file.digest)
        self.registered = 0  # how many of its full blocks, of each group, have been offered to the prefix cache
        self.kept_at: list[int] = []  # positions behind which its state is kept
        self.chunk_cap = 0
        self.to_compute: int | None = None  # while it waits: of its tokens those that the prefix cache lacked when it was asked
        self.cached_tokens = 0
        self.was_admitted = False
        self.scheduled = 0  # when, as of `RequestUpdate`
        self.ended = False
        self.drafts: list[int] = []  # of its next row, where the engine must know them
        self.masks: list[bytes] = []  # of its next row, once its grammar has been advanced
        self.grammar_row: RowResult | None = None  # its tokens are being accepted by the grammar
        self.grammar_seconds = 0.0  # CPU time of all calls, less TOKEN_SECONDS for each
        self.grammar_quick = True  # the last call was
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if add.params.prompt_logprobs is None else [None]

    @property
    def to_go(self) -> int | None:
        """How many more tokens it will take beyond those that are known or pending; None where it may end at any time."""
        return self.limit - len(self.tokens) - self.pending if self.steady else None

    def assignment(self) -> SlotAssignment:
        """The message to the ranks when the request takes its slot. A copy: tokens grow while the message is on its way. Ranks get
        masks, and no grammar."""
        params = msgspec.structs.replace(self.params, structured_output=None) if self.constrained else self.params
        adapter = -1 if self.adapter is None else self.adapter.slot
        return SlotAssignment(self.slot, self.tokens.copy(), self.prompt_length, params, self.seed, sorted(self.stop_ids), adapter)

    def without_token(self) -> RequestRejected:
        """The request ends, since its logits are not finite."""
        self.ended = True
        failure = LogitsNotFinite(
            f"the logits of token {len(self.tokens)} are NaN or infinite",
            why="weights are not finite, or values exceed the range of the dtype",
            next="look for such weights in the server's log; with dtype='fp16' try 'bf16'",
        )
        return RequestRejected(self.id, failure.to_wire())

    def take_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Append those of positions start+1 on, of which a recomputation may repeat some."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - 1 - start :]

    def stops_at(self, token: int, ahead: int = 0) -> bool:
        """The token is a stop token, and may be one there, `ahead` tokens behind those that are known. The sampler forbids stop ids
        while fewer than min_tokens are out; so does this line."""
        return token in self.stop_ids and len(self.tokens) + ahead >= self.min_length

    def follow(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> Followed:
        """Advance the grammar by sampled tokens, up to the first that stops, and compute the masks of the next ones. drafts: of
        these. This may take long and runs beside the loop: it changes the matcher only. Raises RequestError when the grammar
        rejects a token."""
        assert self.matcher is not None
        followed, token = Followed(), tokens[0]
        try:
            for ahead, token in enumerate(tokens):
                if self.ended or self.stops_at(token, ahead):
                    return followed
                self.matcher.accept(token)
                if self.matcher.finished:
                    followed.complete_at = ahead
                    return followed
            followed.masks = self.matcher.masks(drafts)
            followed.drafts = list(drafts[: len(followed.masks) - 1])
        except PhalanxError:
            raise
        except Exception as error:
            raise RequestError(f"the grammar failed on token {token}", why=repr(error)) from error
        return followed

    def take_token(self, token: int) -> bool:
        """Append a sampled token, if the client is to hear nothing else: it is not the first one, ends nothing, and no grammar
        follows it. False: nothing has changed."""
        length = len(self.tokens)
        if length == self.prompt_length or length + 1 >= self.limit or self.constrained or token < 0 or token in self.stop_ids:
            return False
        self.tokens.append(token)
        self.in_flight -= 1
        self.pending -= 1
        if self.drafts:
            self.drafts = []
        return True

    def take_tokens(self, result: RowResult, *, complete_at: int | None = None) -> RequestUpdate:
        """Append sampled tokens, up to the first that ends the request, and return the update for the client; `ended` is set then.
        complete_at: see `Followed`."""
        tokens, taken = self.tokens, result.tokens[: self.limit - len(self.tokens)]
        update = RequestUpdate(self.id, taken)
        if len(tokens) == self.prompt_length:
            update.prompt_logprobs, update.scheduled = self.prompt_logprobs, self.scheduled
            update.cached_tokens, update.pooled = self.cached_tokens, result.pooled
        for number, token in enumerate(taken):
            if number == complete_at or self.stops_at(token, number):
                update.finish_reason = "stop"
                if token in self.stop_ids and token not in self.eos_ids:
                    update.stop_reason = token
                del taken[number + 1 :]
                break
        tokens += taken
        if update.finish_reason is None and len(tokens) >= self.limit:
            update.finish_reason = "length"
        if result.logprobs:
            update.logprobs = result.logprobs[: len(taken)]
        if result.drafted:
            update.accepted = min(len(taken), len(result.tokens) - 1)  # the last of the row is none
            update.rejected = result.drafted - update.accepted
        self.ended = update.finish_reason is not None
        return update

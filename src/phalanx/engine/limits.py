# SPDX-License-Identifier: Apache-2.0
"""The limits of the scheduler, and the requests that it rejects because they cannot run within them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.engine.messages import AddRequest, max_rows_per_step
from phalanx.errors import CapacityError, PromptTooLong, RequestError
from phalanx.layout.memory import blocks_of_request, most_positions


@dataclass(frozen=True)
class SchedulerOptions:
    """The limits of the scheduler.

    num_blocks, block_size: the KV pool, in blocks and tokens per block. max_batch_size: requests that run at once.
    max_num_tokens: tokens of one step. max_seq_len: prompt and output of one request. depth: steps in flight. windows: of each
    group of layers that share block ids, tokens that its layers look back over, None for all. returns_tokens: see `Executor`.
    vocab_size: token ids at or above it are rejected; None takes any. seed: seeds the requests that bring no seed, in the order in
    which they come. length_hint: what would raise max_seq_len, for the error of a longer prompt; empty where nothing does, since
    the model ends there. max_drafts: that the ranks propose for a row, at most. drafts_keep_kv: they have keys and values before
    they are verified.
    state_snapshots: prefixes whose state is kept, where layers have a state of each request, which a prefix hit needs; 0: no layer
    has one, or prefix_caching is off. least_kept: a state is kept if another request need not compute so many tokens then.
    max_decode_gap: seconds between two tokens of a request, at most, as far as prompts can be cut for it;
    "auto": see `step_draft.AUTO_FACTOR`; None for no bound. host_blocks: slots of host memory for KV blocks that leave the pool.
    host_states: slots of host memory for the states of prefixes that give way to others.
    copied_blocks: that come back from there in one step, at most, while requests run, and that go there, beside those of
    `HostBlocks.allow`.
    """

    num_blocks: int
    block_size: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    depth: int = 2
    pipeline_stages: int = 1
    returns_tokens: bool = False
    windows: tuple[int | None, ...] = (None,)
    prefix_caching: bool = True
    chunked_prefill: bool = True
    vocab_size: int | None = None
    seed: int = 0
    length_hint: str = "raise max_seq_len"
    max_drafts: int = 0
    drafts_keep_kv: bool = False
    max_decode_gap: float | Literal["auto"] | None = None
    state_snapshots: int = 0
    least_kept: int = 512
    host_blocks: int = 0
    host_states: int = 0
    copied_blocks: int = 64

    @property
    def max_rows(self) -> int:
        """Rows of one step, at most."""
        return max_rows_per_step(self.max_batch_size, self.pipeline_stages)

    @property
    def token_lag(self) -> int | None:
        """How many steps behind the row that samples a token the next row of its request is, at least, while the engine does not
        know the token; None: the request waits until it does."""
        return token_lag(self.pipeline_stages, returns_tokens=self.returns_tokens)


def token_lag(stages: int, *, returns_tokens: bool) -> int | None:
    """See `SchedulerOptions.token_lag`. As many steps as there are stages: the last stage samples step n before it begins step n +
    1, and the first stage is at step n + stages then."""
    return stages if stages == 1 or returns_tokens else None


def depth_of(stages: int, *, returns_tokens: bool) -> int:
    """Steps in flight: one for each stage, and one that is queued where its tokens need not be known."""
    return max(stages, 2) if token_lag(stages, returns_tokens=returns_tokens) is None else stages + 1


def length_limit(add: AddRequest, options: SchedulerOptions) -> int:
    """The length, prompt included, at which a request ends: by max_tokens, max_seq_len or what the KV pool holds.

    Raises PromptTooLong, CapacityError, or RequestError for token ids that the model does not have.
    """
    length = len(add.token_ids)
    if length == 0:
        raise RequestError("the prompt has 0 tokens", next="give at least one token")
    _reject_unknown_tokens(add, options.vocab_size)
    if length > options.max_seq_len - 1:
        raise PromptTooLong(
            f"a prompt of {length} tokens is too long",
            held=f"max_seq_len is {options.max_seq_len}" + ("" if options.length_hint else ", the model's own limit"),
            why="the prompt and at least one new token must fit in it",
            next="shorten the prompt" + (f" or {options.length_hint}" if options.length_hint else ""),
        )  # fmt: skip
    if length > options.max_num_tokens and not options.chunked_prefill:
        raise PromptTooLong(
            f"a prompt of {length} tokens is too long for one step", held=f"max_num_tokens is {options.max_num_tokens}",
            why="without chunked prefill a prompt must fit one step", next="enable chunked prefill or raise max_num_tokens",
        )  # fmt: skip
    size, limit = options.block_size, options.max_seq_len
    if add.params.max_tokens is not None:
        limit = min(limit, length + add.params.max_tokens)
    limit = min(limit, most_positions(options.windows, options.num_blocks, size) + 1)  # the last token is never computed
    windows = options.windows if options.chunked_prefill else (None,) * len(options.windows)
    needed = blocks_of_request(windows, length, size)
    if needed > options.num_blocks:
        raise CapacityError(
            f"a prompt of {length} tokens does not fit the KV cache",
            held=f"it holds {most_positions(windows, options.num_blocks, size)} tokens",
            why=f"the prompt takes {needed} blocks of {size} tokens, and there are {options.num_blocks}",
            next="shorten the prompt or give the KV cache more memory",
        )  # fmt: skip
    return limit


def _reject_unknown_tokens(add: AddRequest, vocab_size: int | None) -> None:
    """Raise RequestError for a token id outside the vocabulary: it would end a rank, and with it the engine."""
    top = vocab_size if vocab_size is not None else 2**63
    for name, ids in (
        ("prompt", add.token_ids), ("stop_token_ids", add.stop_token_ids), ("logit_bias", list(add.params.logit_bias or ())),
        ("prediction", add.params.prediction or ()),
    ):  # fmt: skip
        if ids and (min(ids) < 0 or max(ids) >= top):
            unknown = next(token for token in ids if not 0 <= token < top)
            raise RequestError(
                f"token {unknown} in {name} is unknown",
                held=f"the vocabulary has tokens 0..{top - 1}",
                next="give tokens of this model",
            )

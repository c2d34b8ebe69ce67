# SPDX-License-Identifier: Apache-2.0
"""What the scheduler works within, and which requests it refuses because they cannot be run within that."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.engine.messages import AddRequest
from phalanx.errors import CapacityError, PromptTooLong, RequestError


@dataclass(frozen=True)
class SchedulerOptions:
    """What the scheduler works within.

    num_blocks, block_size: the KV pool, in blocks and tokens per block. max_batch_size: requests that run at once.
    max_num_tokens: of one step. max_seq_len: prompt and output of one request. depth: steps in flight. window: tokens that every
    layer looks back over, None for all. vocab_size: token ids at or above it are refused; None takes any. seed: where the seeds of
    requests that bring none are drawn from, in the order in which they come. longer: what would raise max_seq_len, to be told to
    who brings a prompt beyond it; empty where nothing does, since the model ends there.
    """

    num_blocks: int
    block_size: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    depth: int = 2
    pipeline_stages: int = 1
    window: int | None = None
    prefix_caching: bool = True
    chunked_prefill: bool = True
    vocab_size: int | None = None
    seed: int = 0
    longer: str = "raise max_seq_len"

    @property
    def most_rows(self) -> int:
        """Of one step."""
        return most_rows(self.max_batch_size, self.pipeline_stages)


def most_rows(max_batch_size: int, pipeline_stages: int) -> int:
    """How many rows a step has at most, on each rank of each stage: the requests that run are shared out among the stages, and a
    step holds one share. The scheduler makes none with more, however few steps are in flight; ranks prepare for none with more."""
    return -(-max_batch_size // pipeline_stages)


def length_limit(add: AddRequest, options: SchedulerOptions) -> int:
    """The length, prompt included, at which a request ends: by max_tokens, max_seq_len or what the KV pool holds.

    Raises PromptTooLong, CapacityError, or RequestError for token ids that the model does not have.
    """
    length = len(add.token_ids)
    if length == 0:
        raise RequestError("a prompt of 0 tokens was asked for", next="give at least one token")
    _refuse_unknown_tokens(add, options.vocab_size)
    if length > options.max_seq_len - 1:
        raise PromptTooLong(
            f"a prompt of {length} tokens was asked for",
            held=f"max_seq_len is {options.max_seq_len}" + ("" if options.longer else ", the model's own limit"),
            why="prompt and at least one new token must fit in it",
            next="shorten the prompt" + (f" or {options.longer}" if options.longer else ""),
        )  # fmt: skip
    if length > options.max_num_tokens and not options.chunked_prefill:
        raise PromptTooLong(
            f"a prompt of {length} tokens was asked for", held=f"max_num_tokens is {options.max_num_tokens}",
            why="without chunked prefill a prompt must fit one step", next="enable chunked prefill or raise max_num_tokens",
        )  # fmt: skip
    size, limit = options.block_size, options.max_seq_len
    if add.params.max_tokens is not None:
        limit = min(limit, length + add.params.max_tokens)
    # A window gives blocks back while the request runs: a step of one token needs those that the window touches, and one more.
    reach = None if options.window is None else options.window // size + 2
    if reach is None or reach > options.num_blocks:
        limit = min(limit, options.num_blocks * size + 1)  # the last token is never computed
    needed = -(-length // size)
    if reach is not None and options.chunked_prefill:
        needed = min(needed, reach)
    if needed > options.num_blocks:
        raise CapacityError(
            f"a prompt of {length} tokens was asked for", held=f"the KV cache holds {options.num_blocks * size} tokens",
            why=f"it takes {needed} blocks of {size} tokens, and there are {options.num_blocks}",
            next="shorten the prompt or give the KV cache more memory",
        )  # fmt: skip
    return limit


def _refuse_unknown_tokens(add: AddRequest, vocab_size: int | None) -> None:
    """A token id beyond the vocabulary would end a rank, and with it the engine."""
    top = vocab_size if vocab_size is not None else 2**63
    for name, ids in (
        ("prompt", add.token_ids), ("stop_token_ids", add.stop_token_ids), ("logit_bias", list(add.params.logit_bias or ())),
    ):  # fmt: skip
        if ids and (min(ids) < 0 or max(ids) >= top):
            wrong = next(token for token in ids if not 0 <= token < top)
            raise RequestError(
                f"token {wrong} was given in {name}",
                held=f"the vocabulary has tokens 0..{top - 1}",
                next="give tokens of this model",
            )

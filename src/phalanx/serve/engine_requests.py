# SPDX-License-Identifier: Apache-2.0
"""Requests as the engine takes them: how one is built, and the checks that need no engine."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.config import SamplingParams
from phalanx.engine.limits import SchedulerOptions, length_limit
from phalanx.engine.messages import AddRequest, EngineFacts


def build_request(request_id: str, token_ids: Sequence[int], params: SamplingParams, eos_token_ids: Sequence[int]) -> AddRequest:
    """The request as the engine takes it, with the ids of the tokens that end it."""
    eos = [] if params.ignore_eos else list(eos_token_ids)
    stops = list(dict.fromkeys([*(params.stop_token_ids or ()), *eos]))
    return AddRequest(request_id, list(token_ids), params, stop_token_ids=stops, eos_token_ids=eos)


def check_request(add: AddRequest, facts: EngineFacts, *, chunked_prefill: bool = True) -> None:
    """Raise the error that an engine with these facts rejects the request with, as far as it is known outside of the engine."""
    limits = SchedulerOptions(
        num_blocks=1 << 40,  # only the engine knows how many a model with a sliding window needs at once
        block_size=facts.block_size, max_batch_size=facts.max_batch_size, max_num_tokens=facts.max_num_tokens,
        max_seq_len=facts.max_seq_len, chunked_prefill=chunked_prefill, vocab_size=facts.vocab_size, length_hint=facts.length_hint,
    )  # fmt: skip
    length_limit(add, limits)

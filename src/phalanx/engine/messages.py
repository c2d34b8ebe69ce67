# SPDX-License-Identifier: Apache-2.0
"""What travels between processes: typed msgspec structs, no pickles, no torch.

Three seams: client <-> engine (`AddRequest`, `Abort`, ... / `Started`, `RequestUpdate`, ...), engine -> ranks (`Step`), ranks -> engine
(`StepResult`, and the facts each rank reports while it starts).

gc=False: of these there are hundreds a step, and none can be part of a cycle.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from phalanx.config.sampling_params import SamplingParams

STEP_KINDS = DECODE_GRAPH, MIXED_GRAPH, EAGER = ("decode graph", "prompt graph", "eager")
"""How a step runs: replayed with rows of one token that all sample, replayed with any rows, or launched kernel by kernel."""

# ---- client -> engine ------------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag=True, array_like=True):
    """A request: one completion of one prompt (n > 1 is fanned out by the client). Answered by Updates or one Refused."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    stop_token_ids: list[int] = []  # params.stop_token_ids and, unless ignore_eos, the model's eos ids
    eos_token_ids: list[int] = []  # which of them are eos: they end with reason "stop" and no stop_reason


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Forget these requests, wherever they are; their blocks are free when in-flight steps have settled. No answer."""

    request_ids: list[str]


class GetStats(msgspec.Struct, tag=True, array_like=True):
    """Answered by one Stats."""


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """End the engine and its ranks now; every request still there gets a Refused(EngineClosed). Answered by Stopped."""


ClientToEngine = AddRequest | Abort | GetStats | Shutdown

# ---- engine -> client ------------------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Natural-log probabilities at one position (of the raw logits' softmax, before penalties and temperature)."""

    token: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: list[tuple[int, float]] = []  # as many alternatives as were asked for, most likely first


class RequestUpdate(msgspec.Struct, tag=True, array_like=True, gc=False):
    """New tokens of one request, in order, exactly once. The last one has a finish_reason."""

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] = []  # one per token where asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # whole, once, in the first Update; [0] is None
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | None = None  # the stop token id that ended it, unless that is an eos
    cached_tokens: int = 0  # prompt tokens that the prefix cache held


class RequestRejected(msgspec.Struct, tag=True, array_like=True):
    """This request cannot be run, or not to its end. `error` is PhalanxError.to_wire()."""

    request_id: str
    error: dict[str, str]


class RankFacts(msgspec.Struct, array_like=True):
    """What one rank reports once it is ready. Bytes by kind: "weights", "activations" (the most that the largest steps held beside
    them), "kv", "graphs", "total" (of the device what torch's allocator holds; on CPU of memory what the process does) and
    "capacity" (of the device, or the host)."""

    rank: int
    node: int
    device: str
    layers: tuple[int, int]
    bytes: dict[str, int] = {}
    phases: dict[str, float] = {}
    attention: str = ""  # the back end in use
    allreduce: str = ""  # the digest of the table, or "seed"


class EngineFacts(msgspec.Struct, array_like=True):
    """What the engine settled on, and the line of facts at the end of start-up."""

    model: str
    dtype: str
    device: str
    world: int
    layout: tuple[int, int, int]  # pp, dp, tp
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    block_size: int
    num_blocks: int
    vocab_size: int
    eos_token_ids: list[int]
    ranks: list[RankFacts] = []
    phases: dict[str, float] = {}
    reasons: dict[str, str] = {}  # option -> why it has its value
    longer: str = ""  # what would raise max_seq_len; empty where nothing does, since the model ends there


class Started(msgspec.Struct, tag=True, array_like=True):
    """The engine takes requests."""

    facts: EngineFacts


class Stats(msgspec.Struct, tag=True, array_like=True):
    """Counters since start, and gauges of now. Sent twice a second while there is work, and when asked for."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    steps: int = 0
    blocks_total: int = 0
    blocks_referenced: int = 0  # held by requests; cached but unreferenced blocks do not count
    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    prompt_tokens: int = 0
    generation_tokens: int = 0
    rank_bytes: dict[int, dict[str, int]] = {}
    allreduce: dict[str, int] = {}  # "ONESHOT/RESIDUAL_RMS_NORM" -> calls, on rank 0
    ran: dict[str, int] = {}  # "decode graph/steps", "/tokens" and "/padding" (tokens), and so for each of STEP_KINDS, on rank 0


class RankStats(NamedTuple):
    """What ranks report beside results. bytes: by kind, for each rank; of rank 0, allreduce: calls by "STRATEGY/FUSION", ran: see
    `Stats`."""

    bytes: dict[int, dict[str, int]]
    allreduce: dict[str, int]
    ran: dict[str, int]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine cannot go on and is ending; every open request gets this error. Also sent when start-up fails."""

    error: dict[str, str]


class Stopped(msgspec.Struct, tag=True, array_like=True):
    """The engine and its ranks have ended as asked."""


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """A sign of life, once a second."""


EngineToClient = RequestUpdate | RequestRejected | Started | Stats | Failed | Stopped | Heartbeat

# ---- engine -> ranks -------------------------------------------------------------------------------------------------


class SlotAssignment(msgspec.Struct, array_like=True):
    """A request takes a slot (0 .. max_batch_size-1): its sampler state and block table begin anew.

    `token_ids` are all tokens known so far (prompt, and output from before a preemption); the first `prompt_length` are prompt.
    """

    slot: int
    token_ids: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int  # concrete: from the params, else drawn by the engine
    stop_token_ids: list[int] = []  # forbidden while fewer than min_tokens are out


class StepRow(msgspec.Struct, array_like=True, gc=False):
    """One request's part of one forward: positions start .. start+count-1.

    `tokens` holds their ids; it is empty for a row of one token whose id is what an earlier step sampled into the slot (the
    engine need not know it yet). `blocks` are appended to the slot's block table before the forward; the table's entry for a block
    that left the sliding window goes stale and is never read. `samples`: the last position yields a token, written to the slot.
    `mask`: xgrammar's token bitmask for that token, int32 words of (vocab_size + 31) // 32, little endian.
    """

    slot: int
    start: int
    count: int
    tokens: list[int] = []
    blocks: list[int] = []
    samples: bool = False
    mask: bytes | None = None


class StepBatch(msgspec.Struct, array_like=True):
    """One dp index's part of a step: applied in this order. Rows of one token (decodes) come first."""

    released: list[int] = []  # slots whose request has left
    admitted: list[SlotAssignment] = []
    rows: list[StepRow] = []


class Step(msgspec.Struct, array_like=True):
    """One turn of the loop. Numbers count from 1 without a gap; a rank that sees a gap stops with StepDiverged."""

    number: int
    batches: list[StepBatch]  # one per dp index, possibly empty


class RowResult(msgspec.Struct, array_like=True, gc=False):
    """What one row yielded. `token` is None where the row does not sample."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = []  # for positions start+1 .. start+count that lie in the prompt


class StepResult(msgspec.Struct, array_like=True):
    """Per dp index, one RowResult per row, in the order of the rows."""

    number: int
    batches: list[list[RowResult]]

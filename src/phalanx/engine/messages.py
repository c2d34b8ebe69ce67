# SPDX-License-Identifier: Apache-2.0
"""The messages between processes: typed msgspec structs, no pickles, no torch.

Three directions: client <-> engine (`AddRequest`, ... / `Started`, `RequestUpdate`, ...), engine -> ranks (`Step`), ranks ->
engine (`StepResult`, and the facts that each rank reports while it starts). `executor.protocol` wraps the last two.

gc=False: there are hundreds of these per step, and none can be part of a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from phalanx.config.sampling_params import SamplingParams

STEP_KINDS = DECODE_GRAPH, MIXED_GRAPH, EAGER = ("decode graph", "prompt graph", "eager")
"""How a step runs: as a graph of decode rows that all sample, as a graph of any rows (decode and prefill), or launched kernel by
kernel. The names are labels of metrics."""

PackedCounts = bytes
"""zlib of int64, little endian."""

# ---- client -> engine ------------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag=True, array_like=True):
    """A request: one completion of one prompt (the client splits n > 1 into several). Answered by RequestUpdates or one
    RequestRejected."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    stop_token_ids: list[int] = []  # params.stop_token_ids and, unless ignore_eos, the model's eos ids
    eos_token_ids: list[int] = []  # which of them are eos: they end with reason "stop" and no stop_reason


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Drop these requests, wherever they are. No answer."""

    request_ids: list[str]


class GetStats(msgspec.Struct, tag=True, array_like=True):
    """Answered by one Stats."""


class GetExperts(msgspec.Struct, tag=True, array_like=True):
    """Answered by one ExpertStats."""


class RebalanceExperts(msgspec.Struct, tag=True, array_like=True):
    """Move experts so that ranks get even parts of the recent load. Answered by one ExpertStats at once, before the first move."""


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """End the engine and its ranks now; every open request gets a RequestRejected(EngineClosed). Answered by Stopped."""


ClientToEngine = AddRequest | Abort | GetStats | GetExperts | RebalanceExperts | Shutdown

# ---- engine -> client ------------------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Natural-log probabilities at one position (of the raw logits' softmax, before penalties and temperature)."""

    token: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: list[tuple[int, float]] = []  # as many alternatives as the request wants, most likely first


class RequestUpdate(msgspec.Struct, tag=True, array_like=True, gc=False):
    """New tokens of one request, in order, exactly once. The last one has a finish_reason. The first ones may have parts of
    `prompt_logprobs` and no token; they end with the first update that has a token."""

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] = []  # one per token, where the request wants them
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the next ones, until the first token; the very first is None
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | None = None  # the stop token id that ended it, unless that is an eos
    cached_tokens: int = 0  # prompt tokens found in the prefix cache


class RequestRejected(msgspec.Struct, tag=True, array_like=True):
    """This request cannot be run, or cannot be finished. `error` is PhalanxError.to_wire()."""

    request_id: str
    error: dict[str, str]


class RankFacts(msgspec.Struct, array_like=True):
    """What one rank reports once it is ready. Bytes by kind: "weights", "activations" (their peak in the largest steps), "kv",
    "graphs", "total" (what torch's allocator has of the device; on CPU what the process has of memory) and "capacity" (of the
    device, or the host)."""

    rank: int
    node: int
    device: str
    layers: tuple[int, int]
    bytes: dict[str, int] = {}
    phases: dict[str, float] = {}
    attention: str = ""  # the back end in use
    allreduce: str = ""  # the digest of the table, or "seed"
    expert_bytes: int = 0  # of one expert of a layer, on this rank
    moe_layers: list[int] = []  # the layers with experts whose tokens it counts; others may count for it


class EngineFacts(msgspec.Struct, array_like=True):
    """The resolved size and layout of the engine, and how its start went. Of several replicas: layout, world and ranks are of one,
    max_batch_size and num_blocks of all together."""

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
    length_hint: str = ""  # what would raise max_seq_len; empty where nothing does, since the model ends there
    replicas: int = 1


class Started(msgspec.Struct, tag=True, array_like=True):
    """The engine takes requests."""

    facts: EngineFacts


class Stats(msgspec.Struct, tag=True, array_like=True):
    """Counters since the start, and gauges of now. Sent twice a second while there is work, and as the answer to GetStats."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    blocks_total: int = 0
    blocks_referenced: int = 0  # by requests; cached but unreferenced blocks do not count
    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    prompt_tokens: int = 0
    generation_tokens: int = 0
    rank_bytes: dict[int, dict[str, int]] = {}
    allreduce: dict[str, int] = {}  # "ONESHOT/RESIDUAL_RMS_NORM" -> calls, on rank 0
    ran: dict[str, int] = {}  # "decode graph/steps", "/tokens" and "/padding" (tokens), and so for each of STEP_KINDS, on rank 0
    rank_gauges: dict[int, dict[str, float]] = {}  # of each rank's GPU, as `hardware.gauges` names them
    dp_running: list[int] = []  # `running` of each dp index, where there are several
    dp_blocks_referenced: list[int] = []  # `blocks_referenced` of each, of blocks_total / indices


class RankStats(NamedTuple):
    """What ranks report beside results. bytes: by rank and kind. Of rank 0: allreduce, calls by "STRATEGY/FUSION"; ran, see
    `Stats`. gauges: of each rank's GPU. experts: of each rank that counts them, [its layers with experts, experts]: tokens since
    the start that reached the rank's part of the layer."""

    bytes: dict[int, dict[str, int]]
    allreduce: dict[str, int]
    ran: dict[str, int]
    gauges: dict[int, dict[str, float]]
    experts: Mapping[int, PackedCounts] = MappingProxyType({})


class ExpertStats(msgspec.Struct, tag=True, array_like=True):
    """The tokens that reached each expert, as pairs of a token and one of its experts. Empty for a model without experts.

    layers [L]: the layers that have experts. ranks [L][R]: the ranks that a layer's experts are spread over; where several share
    each expert, the first of those. tokens, recent: [L, R, E]: since the start, and in the last `seconds`. placement [L][P]: the
    expert of each physical expert; each rank of `ranks` has the next P / R of them. movable: whether experts can change ranks.
    layers_left: whose experts are still to move. Since the start: moved, physical experts that got other weights; longest_move,
    seconds that one step was delayed by.
    """

    layers: list[int] = []
    ranks: list[list[int]] = []
    experts: int = 0
    tokens: PackedCounts = b""
    recent: PackedCounts = b""
    seconds: float = 0.0
    placement: list[list[int]] = []
    layers_left: int = 0
    moved: int = 0
    longest_move: float = 0.0
    movable: bool = False


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine cannot go on and ends; every open request gets this error. Also sent when the start fails."""

    error: dict[str, str]


class Stopped(msgspec.Struct, tag=True, array_like=True):
    """The engine and its ranks have ended, as the client asked."""


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """The engine's heartbeat, once a second."""


EngineToClient = RequestUpdate | RequestRejected | Started | Stats | ExpertStats | Failed | Stopped | Heartbeat

# ---- engine -> ranks -------------------------------------------------------------------------------------------------


class SlotAssignment(msgspec.Struct, array_like=True):
    """A request takes a slot (0 .. max_batch_size-1): the sampler state and the block table of the slot are reset.

    `token_ids` are all tokens known so far (the prompt, and output from before a preemption); the first `prompt_length` are prompt.
    """

    slot: int
    token_ids: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int  # from the params, else drawn by the engine
    stop_token_ids: list[int] = []  # forbidden while fewer than min_tokens are out


class StepRow(msgspec.Struct, array_like=True, gc=False):
    """One request's part of a step: positions start .. start+count-1. A decode row has one token, a prefill row several.

    `tokens` holds their ids; it is empty for a decode row whose id was sampled into the slot by an earlier step (the engine
    need not know it yet). `blocks` are appended to the slot's block table before the forward; the table's entry for a block that
    left the sliding window goes stale and is never read. `samples`: the last position yields a token, written to the slot.
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
    """One dp index's part of a step, applied in this order. Decode rows come first."""

    released: list[int] = []  # slots whose request has left
    admitted: list[SlotAssignment] = []
    rows: list[StepRow] = []


class StepExtent(msgspec.Struct, array_like=True):
    """The size of a step that all dp indices run alike, since they exchange tokens in every layer. A rank pads its own part to it
    and asks no other.

    tokens: of each index. decode_rows, prefill_rows, prefill_pairs: the most that one index has; pairs are of a token of a prefill
    row and a KV token that it attends to, without windows. decodes: every row has one token and samples.
    """

    tokens: list[int]
    decode_rows: int
    prefill_rows: int
    prefill_pairs: int
    decodes: bool

    @classmethod
    def of(cls, batches: Sequence[StepBatch]) -> StepExtent:
        singles = [sum(row.count == 1 for row in batch.rows) for batch in batches]
        return cls(
            [sum(row.count for row in batch.rows) for batch in batches],
            max(singles),
            max(len(batch.rows) - single for batch, single in zip(batches, singles, strict=True)),
            max(sum(row.count * (2 * row.start + row.count + 1) // 2 for row in batch.rows if row.count > 1) for batch in batches),
            all(row.count == 1 and row.samples for batch in batches for row in batch.rows),
        )


class ExpertMove(msgspec.Struct, array_like=True):
    """Experts of a layer change places: placement [P] has the expert of each physical expert (see `plan.expert_placement`). The
    ranks that have the layer exchange the weights of those that differ."""

    layer: int
    placement: list[int]


class Step(msgspec.Struct, array_like=True):
    """One forward of all ranks. Numbers count from 1 without a gap; a rank that sees a gap stops with StepDiverged."""

    number: int
    batches: list[StepBatch]  # one per dp index, possibly empty
    extent: StepExtent | None = None  # with several dp indices
    move: ExpertMove | None = None  # before the forward


def max_rows_per_step(max_batch_size: int, pipeline_stages: int) -> int:
    """Rows of a step, at most, on each rank of each stage. The running requests are divided among the stages, and a step has those
    of one. The scheduler makes no step with more rows, however few steps are in flight; ranks prepare for no more."""
    return -(-max_batch_size // pipeline_stages)


class RowResult(msgspec.Struct, array_like=True, gc=False):
    """The result of one row. `token` is None where the row does not sample."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = []  # of the positions start+1 .. start+count that lie in the prompt


class StepResult(msgspec.Struct, array_like=True):
    """Per dp index, one RowResult per row, in the order of the rows."""

    number: int
    batches: list[list[RowResult]]
    moved: float | None = None  # seconds that the step's move took on the slowest rank

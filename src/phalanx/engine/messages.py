# SPDX-License-Identifier: Apache-2.0
"""The messages between processes: typed msgspec structs, no pickles, no torch.

Three directions: client <-> engine (`AddRequest`, ... / `Started`, `RequestUpdate`, ...), engine -> ranks (`Step`), ranks ->
engine (`StepResult`, and the facts that each rank reports while it starts). `executor.protocol` wraps the last two.

gc=False: there are hundreds of these per step, and none can be part of a cycle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from phalanx.config.sampling_params import SamplingParams
from phalanx.layout import Layout

STEP_KINDS = DECODE_GRAPH, MIXED_GRAPH, EAGER = ("decode graph", "prompt graph", "eager")
"""How a step runs: as a graph of decode rows that all sample, as a graph of any rows (decode and prefill), or launched kernel by
kernel. The names are labels of metrics."""

NO_DRAFT = -1
"""In the place of a draft."""

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


class LoadAdapter(msgspec.Struct, tag=True, array_like=True):
    """Load the adapter in a folder, which every host has, under a name. replace: another one may have the name, and loses it; its
    requests go on with it. Answered by one AdaptersChanged, once every rank has it, or none."""

    call: int
    name: str
    folder: str
    replace: bool = False


class UnloadAdapter(msgspec.Struct, tag=True, array_like=True):
    """Take no more requests for an adapter; those that have come go on with it. Answered by one AdaptersChanged."""

    call: int
    name: str


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Drop these requests, wherever they are. No answer."""

    request_ids: list[str]


class GetStats(msgspec.Struct, tag=True, array_like=True):
    """Answered by one Stats."""


class GetExperts(msgspec.Struct, tag=True, array_like=True):
    """Answered by one ExpertStats."""


class RebalanceExperts(msgspec.Struct, tag=True, array_like=True):
    """Move experts so that ranks get even parts of the recent load. Answered by one ExpertStats at once, before the first move."""


RequestMode = Literal["wait", "abort", "keep"]
"""What becomes of running requests before the ranks change the model: they finish; they end with reason "abort"; or they stop, and
compute their tokens again after the wake-up."""


class Sleep(msgspec.Struct, tag=True, array_like=True):
    """Give the memory of the model back: level 1 moves weights to the host's memory, level 2 discards them; both discard the KV
    cache. Requests that have not begun are rejected, unless mode is "keep". Answered by one ModelState."""

    level: int
    mode: RequestMode = "wait"


class WakeUp(msgspec.Struct, tag=True, array_like=True):
    """Take the memory again: weights, from the host or from their folder, the KV cache, or both. Answered by one ModelState."""

    weights: bool = True
    kv_cache: bool = True


class UpdateWeights(msgspec.Struct, tag=True, array_like=True):
    """Read the weights of another checkpoint of the same model. Requests that have not begun wait for them. Answered by one
    ModelState."""

    folder: str
    mode: RequestMode = "wait"


ModelChange = Sleep | WakeUp | UpdateWeights
"""Made one after the other, by all ranks or by none."""


class Vocabulary(msgspec.Struct, tag=True, array_like=True):
    """What structured output needs of the tokenizer. No answer.

    tokens: the bytes of each id; empty for ids that no text may use. Special tokens begin with a byte that no text contains.
    eos_token_ids: the tokenizer's, for a model that names none.
    """

    tokens: list[bytes]
    eos_token_ids: list[int] = []


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """End the engine and its ranks now; every open request gets a RequestRejected(EngineClosed). Answered by Stopped."""


ClientToEngine = (
    AddRequest | LoadAdapter | UnloadAdapter | Abort | GetStats | GetExperts | RebalanceExperts | Sleep | WakeUp | UpdateWeights
    | Vocabulary | Shutdown
)  # fmt: skip

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
    cached_tokens: int = 0  # in the one with the first token: prompt tokens found in the prefix cache
    accepted: int = 0  # tokens that were drafts
    rejected: int = 0  # drafts that were verified, and are no tokens
    scheduled: int = 0  # in the one with the first token: when the request's first step was made, microseconds of time.monotonic()
    pooled: bytes = b""  # with params.pooling: float32, little endian


class NextTokens(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One more token of each of these requests, and nothing else: what most updates are, together for a step."""

    request_ids: list[str]
    tokens: list[int]

    def updates(self) -> list[RequestUpdate]:
        """The same as one message of each request."""
        return [RequestUpdate(id, [token]) for id, token in zip(self.request_ids, self.tokens, strict=True)]


class RequestRejected(msgspec.Struct, tag=True, array_like=True):
    """This request cannot be run, or cannot be finished. `error` is PhalanxError.to_wire()."""

    request_id: str
    error: dict[str, str]


class AdapterFacts(msgspec.Struct, array_like=True):
    """An adapter that requests may name. rank: the largest of its modules."""

    name: str
    folder: str
    rank: int


class AdaptersChanged(msgspec.Struct, tag=True, array_like=True):
    """The answer to call number `call`. error: PhalanxError.to_wire(), where nothing has changed. adapters: all there are now."""

    call: int
    error: dict[str, str] | None
    adapters: list[AdapterFacts]


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
    self_check: str = ""  # what the self check found, on a rank that compares
    host_blocks: int = 0  # KV blocks that its part of host memory holds
    prompt_wave: tuple[int, int] = (0, 0)  # tiles of a prompt whose attention the GPU computes at once, and their tokens
    host_states: int = 0  # states of prefixes that it holds


class EngineFacts(msgspec.Struct, array_like=True):
    """The resolved size and layout of the engine, and how its start went. Of several replicas: ranks are of one,
    max_batch_size, num_blocks and kv_tokens of all together."""

    model: str
    dtype: str
    device: str
    layout: Layout
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    block_size: int
    num_blocks: int
    kv_tokens: int  # that these blocks hold, in requests of full length
    vocab_size: int
    eos_token_ids: list[int]
    ranks: list[RankFacts] = []
    phases: dict[str, float] = {}
    reasons: dict[str, str] = {}  # option -> why it has its value
    length_hint: str = ""  # what would raise max_seq_len; empty where nothing does, since the model ends there
    sampling_defaults: dict[str, int | float] = {}  # of requests: the checkpoint's, by generation_config
    max_prediction: int = 0  # tokens of a request's prediction that are looked up; 0 without n-gram speculation


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
    nonfinite_requests: int = 0  # ended by logits that were NaN or infinite
    rank_bytes: dict[int, dict[str, int]] = {}
    allreduce: dict[str, int] = {}  # "ONESHOT/RESIDUAL_RMS_NORM" -> calls, on rank 0
    ran: dict[str, int] = {}  # "decode graph/steps", "/tokens" and "/padding" (tokens), and so for each of STEP_KINDS, on rank 0
    rank_gauges: dict[int, dict[str, float]] = {}  # of each rank's GPU, as `hardware.gauges` names them
    drafts: int = 0  # rows with drafts that were verified
    draft_tokens: int = 0  # those drafts
    accepted_tokens: list[int] = []  # of them, by their place in the row
    wrong_head: int = 0  # 1: so few of the first ones were accepted that what proposes them is likely none for the model
    dp_running: list[int] = []  # `running` of each dp index, where there are several
    dp_blocks_referenced: list[int] = []  # `blocks_referenced` of each, of blocks_total / indices
    adapters_running: dict[str, int] = {}  # by the names of adapters: their requests that run, and below those that wait
    adapters_waiting: dict[str, int] = {}
    adapters_in_slots: list[str] = []
    max_adapters: int = 0  # that run at once
    host_total: int = 0  # KV blocks that host memory may hold
    host_used: int = 0
    host_hits: int = 0  # of prefix_hits, the tokens whose blocks came from host memory
    host_saved: int = 0  # blocks that were copied there
    host_loaded: int = 0  # and back
    host_dropped: int = 0  # that left the device and were not copied, since the step had its copies or no slot
    host_states: int = 0  # states of prefixes that host memory may hold
    host_states_used: int = 0
    stalled: str = ""  # why work waits and no step ends; empty while steps do, or there is no work


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


class ModelState(msgspec.Struct, tag=True, array_like=True):
    """What ranks have of the model. level: 0 awake, else that of the sleep, until weights and KV cache are both there again.
    weights, kv_cache: whether they are on the devices. folder: of the checkpoint that the weights are from; "" for dummy weights.
    generation: how often they were replaced. bytes: of each rank, that the last change has freed; negative where it took some.
    seconds: of the last change, without the wait for requests. kept: requests that go on after the wake-up. error: why the last
    change was not made, as PhalanxError.to_wire()."""

    level: int = 0
    weights: bool = True
    kv_cache: bool = True
    folder: str = ""
    generation: int = 0
    bytes: dict[int, int] = {}
    seconds: float = 0.0
    kept: int = 0
    error: dict[str, str] | None = None


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine cannot go on and ends; every open request gets this error. Also sent when the start fails."""

    error: dict[str, str]


class Stopped(msgspec.Struct, tag=True, array_like=True):
    """The engine and its ranks have ended, as the client asked."""


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """The engine's heartbeat, once a second."""


EngineToClient = (
    RequestUpdate | NextTokens | RequestRejected | AdaptersChanged | Started | Stats | ExpertStats | ModelState | Failed | Stopped
    | Heartbeat
)  # fmt: skip

# ---- engine -> ranks -------------------------------------------------------------------------------------------------


class SlotAssignment(msgspec.Struct, array_like=True):
    """A request takes a slot (0 .. max_batch_size-1): the sampler state and the block table of the slot are reset.

    `token_ids` are all tokens known so far (the prompt, and output from before a preemption); the first `prompt_length` are prompt.
    `adapter`: the slot of its adapter, which stays there as long as the request has its slot; -1: it has none.
    """

    slot: int
    token_ids: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int  # from the params, else drawn by the engine
    stop_token_ids: list[int] = []  # forbidden while fewer than min_tokens are out
    adapter: int = -1


class StepRow(msgspec.Struct, array_like=True, gc=False):
    """One request's part of a step: positions start .. start+count-1. A prefill row has several tokens of the prompt. A decode row
    has the last token and, behind it, `drafts` drafts of the next ones to verify.

    tokens: their ids; empty for a decode row whose last token and drafts are in the slot (the engine need not know them yet). A
    draft of NO_DRAFT takes a place and is never accepted.
    blocks: appended to the slot's block table before the forward. The table's entry for a block that left the sliding window goes
    stale and is never read. Drafts behind the last block are not verified.
    samples: the last token, and each draft, yields a token. Those up to the first that differs from its draft are the result; the
    last of them is written to the slot.
    masks: of the tokens that a grammar allows there, one for each of these tokens, or for the first of them where no draft that
    follows can be accepted: int32 words of (vocab_size + 31) // 32, little endian; empty without a grammar.
    late: by how many positions `start` may be too high, since steps in flight may accept fewer drafts. The slot has the true one.
    """

    slot: int
    start: int
    count: int
    tokens: list[int] = []
    blocks: list[int] = []
    samples: bool = False
    masks: list[bytes] = []
    drafts: int = 0
    late: int = 0

    @property
    def decodes(self) -> bool:
        """Whether each of its tokens attends as a row of its own."""
        return self.count == 1 or self.drafts > 0

    @property
    def verifies(self) -> bool:
        """Whether the slot may have what the row lacks: its last token, its drafts or its start."""
        return self.drafts > 0 or self.late > 0 or not self.tokens


class BlockCopy(msgspec.Struct, array_like=True, gc=False):
    """A KV block, or a state, is copied from the device to a slot of host memory, or back. generation: of what is in the slot
    behind or before that: it grows with each write."""

    block: int
    slot: int
    generation: int


class StepBatch(msgspec.Struct, array_like=True):
    """One dp index's part of a step; the rows are applied last. Of these, decode rows come first, and of them the ones that verify,
    which all have the same number of drafts, wherever one of them has drafts or is late. propose: how many drafts are to be
    proposed for the tokens behind those that the step samples. adapted: the request of some row has an adapter."""

    released: list[int] = []  # slots whose request has left
    admitted: list[SlotAssignment] = []
    rows: list[StepRow] = []
    propose: int = 0
    state_copies: list[tuple[int, int]] = []  # (from, to): states of slots, and behind those of all slots, of prefixes
    adapted: bool = False
    saved: list[BlockCopy] = []  # to host memory: before anything else
    loaded: list[BlockCopy] = []  # from it: behind `saved`
    saved_states: list[BlockCopy] = []  # as `saved`, of slots and places of states: before `state_copies`
    loaded_states: list[BlockCopy] = []  # to slots: behind `state_copies`


class StepExtent(msgspec.Struct, array_like=True):
    """The size of a step that all dp indices run alike, since they exchange tokens in every layer. A rank pads its own part to it
    and asks no other.

    tokens: of each index. decode_rows, prefill_rows, prefill_pairs: the most that one index has. Each token of a decode row counts
    as a row, since it attends as one; pairs are of a token of a prefill row and a KV token that it attends to, without windows.
    decodes: every row is a decode row and samples. adapted: as of `StepBatch`, of some index.
    """

    tokens: list[int]
    decode_rows: int
    prefill_rows: int
    prefill_pairs: int
    decodes: bool
    adapted: bool = False

    @classmethod
    def of(cls, batches: Sequence[StepBatch]) -> StepExtent:
        prefills = [[row for row in batch.rows if not row.decodes] for batch in batches]
        return cls(
            [sum(row.count for row in batch.rows) for batch in batches],
            max(sum(row.count for row in batch.rows if row.decodes) for batch in batches),
            max(map(len, prefills)),
            max(sum(row.count * (2 * row.start + row.count + 1) // 2 for row in rows) for rows in prefills),
            all(row.decodes and row.samples for batch in batches for row in batch.rows),
            any(batch.adapted for batch in batches),
        )


class ExpertMove(msgspec.Struct, tag=True, array_like=True):
    """Experts of a layer change places: placement [P] has the expert of each physical expert (see `layout.expert_placement`). The
    ranks that have the layer exchange the weights of those that differ."""

    layer: int
    placement: list[int]


class CheckWeights(msgspec.Struct, tag=True, array_like=True):
    """Whether the folder has weights of this model: nothing is read but the heads of its files."""

    folder: str


class ReadWeights(msgspec.Struct, tag=True, array_like=True):
    """Read the weights of this folder. What they replace is kept in the host's memory until `EndChange`."""

    folder: str


class GiveMemory(msgspec.Struct, tag=True, array_like=True):
    """Get ready to give the memory of weights and KV cache back, at `EndChange`. keep: weights go to the host's memory."""

    keep: bool


class TakeMemory(msgspec.Struct, tag=True, array_like=True):
    """Allocate weights, filled from the host's memory or from their folder, and the KV cache."""

    weights: bool
    kv_cache: bool


class EndChange(msgspec.Struct, tag=True, array_like=True):
    """Make the change of the work before final, or undo it: the other ranks have done it, or one of them has not."""

    final: bool


class PlaceAdapter(msgspec.Struct, tag=True, array_like=True):
    """The adapter of this key, which the ranks have read, takes a slot, in the place of another one that no request uses. Keys are
    never used again."""

    slot: int
    key: int


Work = ExpertMove | PlaceAdapter | CheckWeights | ReadWeights | GiveMemory | TakeMemory | EndChange
"""What ranks do before a forward, beside requests."""


class Step(msgspec.Struct, array_like=True):
    """One forward of all ranks. Numbers count from 1 without a gap; a rank that sees a gap stops with StepDiverged.

    before: in this order. Each rank does the parts that concern it. Steps in flight are safe, since ranks run steps in order.
    limit: seconds after the end of the step before it within which it ends, or ranks are stuck.
    """

    number: int
    batches: list[StepBatch]  # one per dp index, possibly empty
    extent: StepExtent | None = None  # with several dp indices
    before: list[Work] = []
    limit: float = math.inf


def max_rows_per_step(max_batch_size: int, pipeline_stages: int) -> int:
    """Rows of a step, at most, on each rank of each stage. The running requests are divided among the stages, and a step has those
    of one. The scheduler makes no step with more rows, however few steps are in flight; ranks prepare for no more."""
    return -(-max_batch_size // pipeline_stages)


class RowResult(msgspec.Struct, array_like=True, gc=False):
    """The result of one row. tokens: what it samples, empty where it does not: with drafts one more than were accepted; negative
    where the logits are not finite. logprobs: of each of them, where the request wants them. drafted: drafts that were verified.
    drafts: proposed for the tokens behind these, where the engine must know them: of a constrained row, or in a pipeline whose
    tokens do not return on the device."""

    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []  # of the positions start+1 .. start+count that lie in the prompt
    drafted: int = 0
    drafts: list[int] = []
    pooled: bytes = b""  # as of `RequestUpdate`


class WorkResult(msgspec.Struct, array_like=True):
    """What became of a step's change of the model on one rank. error: why it did not succeed, as PhalanxError.to_wire(). freed:
    bytes of the device."""

    error: dict[str, str] | None = None
    freed: int = 0


RowOutput = int | RowResult
"""What a row gives. Most rows give one token and nothing else: they are that token."""


def row_result(output: RowOutput) -> RowResult:
    """The same with all fields."""
    return RowResult([output]) if isinstance(output, int) else output


class StepResult(msgspec.Struct, array_like=True):
    """Per dp index, one output per row, in the order of the rows. works: of each rank, where the step changed the model."""

    number: int
    batches: list[list[RowOutput]]
    moved: float | None = None  # seconds that the step's moves of experts took on the slowest rank
    works: dict[int, WorkResult] = {}

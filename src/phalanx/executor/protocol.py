# SPDX-License-Identifier: Apache-2.0
"""The messages between the engine, its ranks and its nodes, over one ROUTER socket of the engine. No pickles, no torch.

A step travels as two frames: a header and the encoded Step. Every other message is one frame. The header holds the number of the
step and a digest that is chained over all steps so far: ranks that agree on one digest have run the same steps from the first.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Literal

import msgspec
import zmq

from phalanx.config.sampling_params import MAX_LOGPROBS
from phalanx.engine.messages import PackedCounts, RankFacts, RowOutput, Step, WorkResult
from phalanx.errors import StepDiverged
from phalanx.executor.cluster_keys import ClusterKeys
from phalanx.layout.adapter import AdapterPart

HEARTBEAT_SECONDS = 1.0
"""How often the engine, each rank and each node send a heartbeat."""
MAX_FRAME_TO_NODE = 1 << 20
"""Bytes of the largest frame that the engine sends to a node: an error."""
MAX_FRAME_TO_RANK = 1 << 30
"""Bytes of the largest frame that the engine sends to a rank: a step that admits a full batch of the longest prompts has less."""
MAX_STORE_REPLY = 1 << 24
"""Bytes of the largest reply of the store: addresses, and what ranks agree on."""
_FRAME_SLACK = 1 << 20  # for errors, and the facts of a rank
_LINGER_MS = 2000  # how long the last messages of a process may take to leave

# ---- rank -> engine --------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The process of a rank runs."""

    rank: int
    node: int
    pid: int


StoreOperation = Literal["set", "get", "append", "add", "compare_set", "delete", "check", "wait", "count"]


class StoreRequest(msgspec.Struct, tag=True, array_like=True):
    """An operation on the store through which ranks form their groups (`executor.rank_store`). `number`: of the reply."""

    rank: int
    number: int
    operation: StoreOperation
    keys: list[str]
    values: list[bytes]


class StartupProgress(msgspec.Struct, tag=True, array_like=True):
    """The start-up phase of a rank; `done` of `total` where the phase counts, in `unit`s, or in bytes where no unit is named."""

    rank: int
    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""


class KvCapacity(msgspec.Struct, tag=True, array_like=True):
    """The weights are loaded, and the memory left holds this many KV blocks. block_bytes: of one on this rank. free_host_memory: in
    bytes; 0 where none is wanted for blocks. state_bytes: of the state of a request, on this rank."""

    rank: int
    blocks: int
    block_bytes: int = 0
    free_host_memory: int = 0
    state_bytes: int = 0


class RankReady(msgspec.Struct, tag=True, array_like=True):
    """The rank takes steps."""

    rank: int
    facts: RankFacts


class StepDone(msgspec.Struct, tag=True, array_like=True):
    """A rank has run a step. `tokens_crc`: CRC-32 of the tokens it sampled (None before the last stage). `rows`: the results, from
    tp index 0 of the last stage. `moved`: seconds that the step's move of experts took. `calls`: as of `RankPlace`."""

    rank: int
    number: int
    digest: bytes
    tokens_crc: int | None = None
    rows: list[RowOutput] | None = None
    moved: float | None = None
    calls: bytes = b""


class WorkDone(msgspec.Struct, tag=True, array_like=True):
    """What became of the change of the model that step `number` began with; sent before its StepDone."""

    rank: int
    number: int
    result: WorkResult


class RankPlace(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank is: fields as of `layout.rank_progress.Place`. calls: empty on GPUs that do not say where they are."""

    begun: int = 0
    finished: int = 0
    layer: int = 0
    inside: bool = False
    queued: bool = False
    calls: bytes = b""
    on_device: bool = False


NOWHERE = RankPlace()
"""Before the first step."""


class AdapterRead(msgspec.Struct, tag=True, array_like=True):
    """A rank has read its part of an adapter, or cannot: `error` is PhalanxError.to_wire()."""

    rank: int
    key: int
    error: dict[str, str] | None = None


class RankError(msgspec.Struct, tag=True, array_like=True):
    """A rank cannot go on. `error` is PhalanxError.to_wire(). `consequence`: it tells no more than that a peer is gone. place: as
    of its heartbeats."""

    rank: int
    error: dict[str, str]
    consequence: bool
    place: RankPlace = NOWHERE


class RankHeartbeat(msgspec.Struct, tag=True, array_like=True):
    """A rank's heartbeat, once a second: its place, its bytes by kind, its all-reduce calls, and how its steps ran (see
    `Stats.ran`). experts: tokens of each expert, see `RankStats`; empty where they are as in the last one."""

    rank: int
    place: RankPlace = NOWHERE
    bytes: dict[str, int] = {}
    allreduce: dict[str, int] = {}
    ran: dict[str, int] = {}
    gauges: dict[str, float] = {}
    experts: PackedCounts = b""


# ---- node -> engine --------------------------------------------------------------------------------------------------


class NodeHello(msgspec.Struct, tag=True, array_like=True):
    """A node has started its ranks. `facts`: see `config.host_facts`; they must be those of the engine's host."""

    node: int
    address: str
    facts: dict[str, str] = {}


class NodeHeartbeat(msgspec.Struct, tag=True, array_like=True):
    """A node's heartbeat, once a second."""

    node: int


class RankExit(msgspec.Struct, tag=True, array_like=True):
    """The process of a rank on a node has ended; `code` as in Popen.returncode."""

    node: int
    rank: int
    code: int


RankToEngine = (
    Hello | StoreRequest | StartupProgress | KvCapacity | RankReady | WorkDone | StepDone | AdapterRead | RankError | RankHeartbeat
    | NodeHello | NodeHeartbeat | RankExit
)  # fmt: skip

# ---- engine -> rank or node ------------------------------------------------------------------------------------------


class StoreReply(msgspec.Struct, tag=True, array_like=True):
    """What a rank's StoreRequest of this number returns."""

    number: int
    values: list[bytes]


class Allocate(msgspec.Struct, tag=True, array_like=True):
    """Make KV caches of this many blocks, and have host memory for so many, and for so many states of prefixes."""

    blocks: int
    host_blocks: int = 0
    host_states: int = 0


class ReadAdapter(msgspec.Struct, tag=True, array_like=True):
    """Read this rank's part of an adapter into host memory, beside the steps: see `layout.adapter.AdapterFile`. Answered by one
    AdapterRead."""

    key: int
    folder: str
    digest: bytes
    parts: list[AdapterPart]


class DropAdapter(msgspec.Struct, tag=True, array_like=True):
    """Forget an adapter in host memory. No step that comes later places it."""

    key: int


class EngineHeartbeat(msgspec.Struct, tag=True, array_like=True):
    """The engine's heartbeat to nodes, once a second."""


class Stop(msgspec.Struct, tag=True, array_like=True):
    """End now. `error`: the failure that ends the engine; None when it was asked to end."""

    error: dict[str, str] | None = None


EngineToRank = StoreReply | Allocate | ReadAdapter | DropAdapter | EngineHeartbeat | Stop

_HEADER = struct.Struct("<Q16s")
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[RankToEngine] = msgspec.msgpack.Decoder(RankToEngine)
_to_rank: msgspec.msgpack.Decoder[EngineToRank] = msgspec.msgpack.Decoder(EngineToRank)
_step = msgspec.msgpack.Decoder(Step)

encode = _encoder.encode


def decode_rank_message(frame: bytes) -> RankToEngine:
    """Raises msgspec.DecodeError for what no rank or node sends."""
    return _to_engine.decode(frame)


def decode_to_rank(frame: bytes) -> EngineToRank:
    """Raises msgspec.DecodeError for what no engine sends."""
    return _to_rank.decode(frame)


def rank_identity(rank: int) -> bytes:
    """The identity under which the engine's socket knows a rank."""
    return f"rank-{rank}".encode()


def node_identity(node: int) -> bytes:
    """The identity under which the engine's socket knows a node."""
    return f"node-{node}".encode()


def heartbeat_identity(rank: int) -> bytes:
    """The identity of the connection on which a rank sends heartbeats."""
    return b"heartbeat-" + rank_identity(rank)


def store_identity(rank: int) -> bytes:
    """The identity of the connection on which a rank reads and writes the store."""
    return b"store-" + rank_identity(rank)


def sender_identity(message: RankToEngine) -> bytes:
    """The identity of the one process that may send this message."""
    match message:
        case RankHeartbeat():
            return heartbeat_identity(message.rank)
        case StoreRequest():
            return store_identity(message.rank)
        case NodeHello() | NodeHeartbeat() | RankExit():
            return node_identity(message.node)
        case _:
            return rank_identity(message.rank)


def max_frame_to_engine(max_num_tokens: int, max_batch_size: int) -> int:
    """Bytes of the largest frame that a rank or node sends: the results of a step in which every position has all logprobs."""
    return _FRAME_SLACK + (max_num_tokens + max_batch_size) * (32 + 16 * MAX_LOGPROBS)


def dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    identity: bytes,
    cluster_token: str | None = None,
    *,
    max_frame: int,
    events: int = 0,
) -> zmq.Socket[bytes]:
    """A socket to the engine's ROUTER. Sending never blocks. `cluster_token`: authenticates both ends over TCP. `max_frame`: a
    larger frame ends the connection. `events`: what its monitor socket reports, from before the first connection."""
    socket = context.socket(zmq.DEALER)
    if cluster_token is not None:
        ClusterKeys(cluster_token).secure_client(socket, identity.decode())
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, 1)
    if events:
        socket.get_monitor_socket(events)
    socket.connect(address)
    return socket


class Chain:
    """The chained digest: blake2b(previous digest + payload). The engine and each rank hold one, which begins with zeros."""

    def __init__(self) -> None:
        self.number = 0
        self.digest = bytes(16)

    def _add(self, payload: bytes) -> None:
        self.number += 1
        self.digest = hashlib.blake2b(self.digest + payload, digest_size=16).digest()

    def seal(self, step: Step) -> list[bytes]:
        """For the engine: the frames of the next step. Raises StepDiverged when its number leaves a gap."""
        payload = _encoder.encode(step)
        if step.number != self.number + 1:
            raise StepDiverged(f"step {step.number} was submitted out of order", held=f"the last one was step {self.number}")
        self._add(payload)
        return [_HEADER.pack(self.number, self.digest), payload]

    def open(self, rank: int, frames: list[bytes]) -> Step:
        """For a rank: the step in these frames. Raises StepDiverged for a gap, or for another digest than this rank computes."""
        number, digest = _HEADER.unpack(frames[0])
        if number != self.number + 1:
            raise StepDiverged(f"rank {rank} received step {number} out of order", held=f"its last one was step {self.number}")
        self._add(frames[1])
        if digest != self.digest:
            raise StepDiverged(
                f"rank {rank} received step {number} with digest {digest.hex()}", held=f"it computes {self.digest.hex()}",
                why="it has not received the same steps as the engine has sent",
            )  # fmt: skip
        return _step.decode(frames[1])

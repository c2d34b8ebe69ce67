# SPDX-License-Identifier: Apache-2.0
"""What the engine, the ranks and the nodes tell each other, over one ROUTER socket of the engine. No pickles, no torch.

A step travels as two frames, a header and the encoded Step; everything else as one. The header holds the step's number and a digest
chained over all steps so far, so that ranks which agree on one digest have run the same steps from the first.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from phalanx.engine.messages import RankFacts, RowResult, Step
from phalanx.errors import StepDiverged

# ---- rank -> engine --------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, array_like=True):
    """A rank's process runs."""

    rank: int
    node: int
    pid: int


class StoreReady(msgspec.Struct, tag=True, array_like=True):
    """Rank 0 has opened the store where ranks meet, at "host:port"."""

    rank: int
    address: str


class StartupProgress(msgspec.Struct, tag=True, array_like=True):
    """Where a rank is in its start-up; `done` of `total` where the phase counts, each a `unit`, or a byte where none is named."""

    rank: int
    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""


class KvCapacity(msgspec.Struct, tag=True, array_like=True):
    """The weights are there, and the memory left holds so many KV blocks."""

    rank: int
    blocks: int


class RankReady(msgspec.Struct, tag=True, array_like=True):
    """The rank takes steps."""

    rank: int
    facts: RankFacts


class StepDone(msgspec.Struct, tag=True, array_like=True):
    """A rank has run a step. `tokens`: CRC-32 of the tokens it sampled (None before the last stage). `rows`: the results, from
    tp index 0 of the last stage."""

    rank: int
    number: int
    digest: bytes
    tokens: int | None = None
    rows: list[RowResult] | None = None


class RankError(msgspec.Struct, tag=True, array_like=True):
    """A rank cannot go on. `error` is PhalanxError.to_wire(); `consequence`: it says no more than that a peer is gone."""

    rank: int
    error: dict[str, str]
    consequence: bool


class RankHeartbeat(msgspec.Struct, tag=True, array_like=True):
    """A rank's sign of life, once a second: the last steps that it began and finished, its bytes by kind, its all-reduce calls, and
    how its steps ran (see `Stats.ran`)."""

    rank: int
    begun: int = 0
    finished: int = 0
    bytes: dict[str, int] = {}
    allreduce: dict[str, int] = {}
    ran: dict[str, int] = {}


# ---- node -> engine --------------------------------------------------------------------------------------------------


class NodeHello(msgspec.Struct, tag=True, array_like=True):
    """A node has started its ranks."""

    node: int
    address: str


class NodeHeartbeat(msgspec.Struct, tag=True, array_like=True):
    """A node's sign of life, once a second."""

    node: int


class RankExit(msgspec.Struct, tag=True, array_like=True):
    """A rank's process on a node has ended; `code` as in Popen.returncode."""

    node: int
    rank: int
    code: int


RankToEngine = (
    Hello
    | StoreReady
    | StartupProgress
    | KvCapacity
    | RankReady
    | StepDone
    | RankError
    | RankHeartbeat
    | NodeHello
    | NodeHeartbeat
    | RankExit
)

# ---- engine -> rank or node ------------------------------------------------------------------------------------------


class StoreAddress(msgspec.Struct, tag=True, array_like=True):
    """The store is at "host:port"."""

    address: str


class Allocate(msgspec.Struct, tag=True, array_like=True):
    """Make KV caches of so many blocks."""

    blocks: int


class EngineHeartbeat(msgspec.Struct, tag=True, array_like=True):
    """The engine's sign of life to nodes, once a second."""


class Stop(msgspec.Struct, tag=True, array_like=True):
    """End now. `error` says why, when it was not asked for."""

    error: dict[str, str] | None = None


EngineToRank = StoreAddress | Allocate | EngineHeartbeat | Stop

_HEADER = struct.Struct("<Q16s")
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[RankToEngine] = msgspec.msgpack.Decoder(RankToEngine)
_from_engine: msgspec.msgpack.Decoder[EngineToRank] = msgspec.msgpack.Decoder(EngineToRank)
_step = msgspec.msgpack.Decoder(Step)

encode = _encoder.encode


def decode_to_engine(frame: bytes) -> RankToEngine:
    """Raises msgspec.DecodeError for what no rank would send."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> EngineToRank:
    return _from_engine.decode(frame)


def rank_name(rank: int) -> bytes:
    """The identity under which the engine's socket knows a rank."""
    return f"rank-{rank}".encode()


def node_name(node: int) -> bytes:
    return f"node-{node}".encode()


class Chain:
    """The chained digest: blake2b(previous digest + payload). Both ends hold one, and it begins with zeros."""

    def __init__(self) -> None:
        self.number = 0
        self.digest = bytes(16)

    def _add(self, payload: bytes) -> None:
        self.number += 1
        self.digest = hashlib.blake2b(self.digest + payload, digest_size=16).digest()

    def seal(self, step: Step) -> list[bytes]:
        """The engine's end: the frames of the next step. Raises StepDiverged when its number leaves a gap."""
        payload = _encoder.encode(step)
        if step.number != self.number + 1:
            raise StepDiverged(f"step {step.number} was submitted", held=f"the last one was step {self.number}")
        self._add(payload)
        return [_HEADER.pack(self.number, self.digest), payload]

    def open(self, rank: int, frames: list[bytes]) -> Step:
        """A rank's end. Raises StepDiverged for a gap or for another digest than this rank computes."""
        number, digest = _HEADER.unpack(frames[0])
        if number != self.number + 1:
            raise StepDiverged(f"rank {rank} was given step {number}", held=f"its last one was step {self.number}")
        self._add(frames[1])
        if digest != self.digest:
            raise StepDiverged(
                f"rank {rank} was given step {number} with digest {digest.hex()}", held=f"it computes {self.digest.hex()}",
                why="it has not been given the same steps as the engine has sent",
            )  # fmt: skip
        return _step.decode(frames[1])

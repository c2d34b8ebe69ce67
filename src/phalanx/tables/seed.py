# SPDX-License-Identifier: Apache-2.0
"""The seed: a latency model per fusion and strategy, and two thresholds of sequence parallelism. It decides where nothing was
measured.

time = a + b x bytes + c x tokens, in integer femtoseconds, so that Python and the generated C++ agree on every comparison.
`tune.fit` computes one from measurements; `default` computes one from a machine's class alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from phalanx.config.dtypes import DTYPES
from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.strategy import Choice, Strategy, choices

# The model does not grow beyond these sizes, so that the sum fits into 64 unsigned bits:
# 2^60 + 2^24 x 2^38 + 2^34 x 2^28 < 2^64.
MAX_A, MAX_B, MAX_C = 2**60, 2**24, 2**34
MAX_BYTES, MAX_TOKENS = 2**38, 2**28

_FS_PER_US = 1_000_000_000


class Latency(NamedTuple):
    """a [fs], b [fs per byte of one rank's tensor], c [fs per token]."""

    a: int
    b: int
    c: int

    @classmethod
    def of_us(cls, a: float, b: float, c: float) -> Latency:
        """From microseconds, microseconds per byte and microseconds per token; clipped to the range of the format."""
        values = (round(a * _FS_PER_US), round(b * _FS_PER_US), round(c * _FS_PER_US))
        return cls(*(min(max(value, 0), top) for value, top in zip(values, (MAX_A, MAX_B, MAX_C), strict=True)))

    def fs(self, tokens: int, nbytes: int) -> int:
        return self.a + self.b * min(nbytes, MAX_BYTES) + self.c * min(tokens, MAX_TOKENS)

    def us(self, tokens: int, nbytes: int) -> float:
        return self.fs(tokens, nbytes) / _FS_PER_US


@dataclass(frozen=True, slots=True)
class SequenceParallelSeed:
    """From which sizes on sequence parallelism runs where the caller allows it and nothing was measured.

    rs_norm_ag_min_tokens: RS_NORM_AG from so many tokens on. gemm_rs_min_bytes: of these, GEMM_RS for messages of so many bytes of
    one rank's tensor. None: never. origin: where they come from, as text. estimated: not measured on this class of machine.
    """

    rs_norm_ag_min_tokens: int | None = None
    gemm_rs_min_bytes: int | None = None
    origin: str = "none"
    estimated: bool = False

    def __post_init__(self) -> None:
        for name, top in (("rs_norm_ag_min_tokens", MAX_TOKENS), ("gemm_rs_min_bytes", MAX_BYTES)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= top:
                raise TableError(f"the seed's {name} {value} is outside 1..{top}", next="tune again with `phalanx allreduce tune`")

    def choose(self, fusion: Fusion, tokens: int, nbytes: int, caller: Caller) -> Strategy | None:
        """RS_NORM_AG or GEMM_RS; None where neither runs."""
        first, least = self.rs_norm_ag_min_tokens, self.gemm_rs_min_bytes
        if caller is Caller.REPLICATED or not fusion.shards or first is None or tokens < first:
            return None
        gemm = caller is Caller.GEMM and least is not None and min(nbytes, MAX_BYTES) >= least
        return Strategy.GEMM_RS if gemm else Strategy.RS_NORM_AG

    def reason(self, strategy: Strategy) -> str:
        """Why `choose` gave it."""
        least = self.gemm_rs_min_bytes or 0
        size = f"{self.rs_norm_ag_min_tokens} tokens" if strategy is Strategy.RS_NORM_AG else f"{least / 2**20:g} MiB"
        return f"not measured at this size: from {size} on ({self.origin})"


@dataclass(frozen=True)
class Seed:
    """models: for every fusion at least one choice, in the order in which ties are broken. origin: where they come from, as
    text. estimated: not fitted to times of this class of machine. sequence_parallel: for callers that accept a sharded residual."""

    origin: str
    models: dict[Fusion, dict[Choice, Latency]]
    estimated: bool = False
    sequence_parallel: SequenceParallelSeed = SequenceParallelSeed()

    def __post_init__(self) -> None:
        for fusion in Fusion:
            if not self.models.get(fusion):
                raise TableError(f"the seed has no model for {fusion.name}", next="fit it again with `phalanx allreduce tune`")
        for fusion, models in self.models.items():
            for choice, latency in models.items():
                for value, top in zip(latency, (MAX_A, MAX_B, MAX_C), strict=True):
                    if not 0 <= value <= top:
                        raise TableError(f"the seed's {fusion.name} {choice}: {value} is outside 0..{top} femtoseconds")

    def choose(self, dtype: str, fusion: Fusion, tokens: int, hidden: int) -> tuple[Choice, float]:
        """The choice with the lowest estimate, and this estimate in microseconds."""
        nbytes = tokens * hidden * DTYPES[dtype].itemsize
        models = self.models[fusion]
        best = min(models, key=lambda choice: models[choice].fs(tokens, nbytes))
        return best, models[best].us(tokens, nbytes)

    def scaled(self, world_from: int, world_to: int, origin: str) -> Seed:
        """The seed of the same machine for another number of ranks: a grows with the number of ranks, b with the bytes that each
        rank receives: W - 1 tensors with ONESHOT, 2 (W - 1) / W with the others."""

        def move(choice: Choice, model: Latency) -> Latency:
            traffic = _traffic(choice.strategy, world_to) / _traffic(choice.strategy, world_from)
            start = (3 + world_to) / (3 + world_from)
            return Latency(min(round(model.a * start), MAX_A), min(round(model.b * traffic), MAX_B), model.c)

        moved = {fusion: {c: move(c, m) for c, m in models.items()} for fusion, models in self.models.items()}
        return Seed(origin, moved, True, replace(self.sequence_parallel, origin=origin, estimated=True))


def _traffic(strategy: Strategy, world: int) -> float:
    """Tensors that a rank receives: the part of b that belongs to the wire."""
    return world - 1 if strategy is Strategy.ONESHOT else 2 * (world - 1) / world


class _Link(NamedTuple):
    """start, wire: by strategy, microseconds to start (for two ranks, and for each rank more) and picoseconds per byte. fused,
    following: what a fusion adds in the collective's kernel and as a kernel of its own, in microseconds and picoseconds per
    byte."""

    start: dict[Strategy, tuple[float, float]]
    wire: dict[Strategy, float]
    fused: tuple[float, float]
    following: tuple[float, float]


# NVLink: 4 x H200, NCCL 2.28.9, FlashInfer 0.6.12 and torch 2.11 symmetric memory, 2026-11-21 (benchmarks/results/
# peers_allreduce_h200_nvlink.csv). PCIe: NVLink's shape at 25 GB/s a direction, PCIe 4.0 x16 as NCCL reaches it. Nodes: 25 GB/s,
# HDR InfiniBand. Shared memory: a 2-core x86 host.
_NVLINK = _Link(
    {Strategy.NCCL: (6.7, 1.9), Strategy.ONESHOT: (2.5, 0.32), Strategy.TWOSHOT: (5.0, 0.6)},
    {Strategy.NCCL: 3.3, Strategy.ONESHOT: 3.0, Strategy.TWOSHOT: 3.3},
    (2.0, 0.5),
    (2.7, 1.0),
)
_PCIE = _Link(
    {Strategy.NCCL: (14.0, 4.0), Strategy.ONESHOT: (6.0, 1.5), Strategy.TWOSHOT: (12.0, 2.0)},
    {Strategy.NCCL: 45.0, Strategy.ONESHOT: 42.0, Strategy.TWOSHOT: 44.0},
    (2.5, 1.0),
    (3.5, 1.5),
)
_NODES = _Link({Strategy.NCCL: (30.0, 6.0)}, {Strategy.NCCL: 42.0}, (2.5, 1.0), (3.5, 1.5))
_SHM = _Link(
    {Strategy.NCCL: (250.0, 150.0), Strategy.ONESHOT: (60.0, 30.0), Strategy.TWOSHOT: (90.0, 45.0)},
    {Strategy.NCCL: 1500.0, Strategy.ONESHOT: 700.0, Strategy.TWOSHOT: 600.0},
    (30.0, 900.0),
    (30.0, 900.0),
)
_LINKS = {"nvlink": _NVLINK, "nvlink_multicast": _NVLINK, "pcie_p2p": _PCIE, "pcie": _PCIE, "nodes": _NODES, "shm": _SHM}


def default(fingerprint: Fingerprint) -> Seed:
    """The seed of a machine's class. It holds only strategies that can run there."""
    link, world = _LINKS[fingerprint.link], max(fingerprint.world, 2)

    def model(choice: Choice, fusion: Fusion) -> Latency:
        start, per_rank = link.start[choice.strategy]
        a, b = start + per_rank * (world - 2), link.wire[choice.strategy] * _traffic(choice.strategy, world)
        if fusion is not Fusion.NONE:
            more_a, more_b = link.fused if choice.fuses(fusion) else link.following
            a, b = a + more_a, b + more_b
        return Latency.of_us(a, b * 1e-6, 0.0)

    runs = [strategy for strategy in link.start if strategy is Strategy.NCCL or fingerprint.peers_reach]
    models = {fusion: {c: model(c, fusion) for c in choices(fusion) if c.strategy in runs} for fusion in Fusion}
    return Seed(f"class {fingerprint.link}", models, True, sequence_parallel(fingerprint))


# The thresholds of sequence parallelism that were measured on H200 over NVLink with 2 and 4 ranks: below so many tokens, a message
# waits for its two hops longer than for what they carry; below so many bytes, the GEMM of one rank's rows is too small to fill a
# GPU (benchmarks/results/comm_rs_norm_ag.tp*.sm90.csv and models_long_steps.tp*.json).
_SP_TOKENS_OF_TWO, _SP_TOKENS_OF_MORE, GEMM_RS_BYTES = 128, 64, 32 << 20
_SP_MEASURED = [(90, "nvlink", 2), (90, "nvlink", 4)]


def sequence_parallel(fingerprint: Fingerprint) -> SequenceParallelSeed:
    """The thresholds of a machine's class. Between CPU ranks sequence parallelism runs only where it was tuned."""
    if not fingerprint.on_gpu or not fingerprint.peers_reach:
        return SequenceParallelSeed(origin=f"class {fingerprint.link}")
    measured = (fingerprint.sm, fingerprint.link, fingerprint.world) in _SP_MEASURED
    origin = "measured on H200" if measured else "as on H200 over NVLink"
    tokens = _SP_TOKENS_OF_TWO if fingerprint.world == 2 else _SP_TOKENS_OF_MORE
    return SequenceParallelSeed(tokens, GEMM_RS_BYTES, origin, not measured)

# SPDX-License-Identifier: Apache-2.0
"""A group whose all-reduce runs the strategy that the machine's table names. All other collectives are those of the group below."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from phalanx.comm.agreement import difference
from phalanx.comm.choose import Rules, decider
from phalanx.comm.detect import detect_fingerprint
from phalanx.comm.group import Group, ResidualRmsNorm, ScatterTargets, Splits
from phalanx.comm.sequence_parallel import ShardedResidual, same_sharding, unshard
from phalanx.comm.shared_memory import share_text
from phalanx.comm.strategies import AllReduce, GemmReduceScatter, aligned, aligned_residual, available, one_dtype
from phalanx.comm.torch_group import TorchGroup
from phalanx.errors import EngineError
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.log import get_logger
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.shipped import advice, table_for
from phalanx.tables.strategy import Strategy
from phalanx.tables.table import Table

_log = get_logger(__name__)
_NONE = Fusion.NONE
_fusion = cache(Fusion.of)


class TunedGroup:
    """A `Group` whose `all_reduce` picks a strategy by size. `calls` counts them: "ONESHOT/RESIDUAL_RMS_NORM" -> how many (a call
    that is captured in a CUDA graph counts once, when it is captured; the code that replays the graph adds the calls that it
    contains).

    `digest`: of the table that decides, or "seed". On GPUs, ranks issue the calls of one group in the same order, each after the
    one before it: on one stream, or on streams that events join.
    """

    def __init__(self, base: Group, rules: Rules, strategies: Mapping[Strategy, AllReduce], digest: str) -> None:
        self.base, self.rules, self.digest = base, rules, digest
        self.rank, self.size = base.rank, base.size
        self.decide = decider(rules)
        self.calls: dict[str, int] = {}
        self.strategies = strategies
        self._gemm_rs = strategies[Strategy.GEMM_RS].gemm_rs if Strategy.GEMM_RS in strategies else None
        self._rs_norm_ag = strategies[Strategy.RS_NORM_AG].rs_norm_ag if Strategy.RS_NORM_AG in strategies else None

    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: None = None) -> Tensor: ...
    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]: ...
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm | None = None) -> Tensor | tuple[Tensor, ...]:
        """As Group."""
        values = x.values if isinstance(x, Unscaled) else x
        dtype = DTYPE_NAMES.get(values.dtype)
        if dtype is None or values.numel() == 0 or values.dim() == 0:
            return self.base.all_reduce(x) if fusion is None else self.base.all_reduce(x, self._unsharded(fusion))
        hidden = values.shape[-1]
        tokens = values.numel() // hidden
        fusable = fusion is not None and one_dtype(x, fusion)
        caller = Caller.SHARDED if fusable and fusion is not None and fusion.accepts_sharded else Caller.REPLICATED
        sharded = fusion is not None and self._stays(fusion.residual, values.dtype)
        decision = self.decide(tokens, hidden, dtype, _NONE if fusion is None else _fusion_of(fusion), caller, sharded)
        self._count(decision.name)
        strategy = self.strategies[decision.strategy]
        if fusion is None:
            return strategy.sum(aligned(x))
        if strategy.rs_norm_ag is None or not sharded:
            fusion = self._unsharded(fusion)
        return strategy.run(x, fusion, fused=decision.fused)

    def gemm_reduce_scatter_targets(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> ScatterTargets | None:
        """As Group."""
        residual, gemm_rs = fusion.residual, self._gemm_rs
        dtype = DTYPE_NAMES.get(residual.dtype)
        if gemm_rs is None or dtype is None or not tokens:
            return None
        if not fusion.accepts_sharded or fusion.weight.dtype != residual.dtype:
            return None
        if isinstance(residual, ShardedResidual) and not same_sharding(tokens, residual.chunk_rows, tokens):
            return None  # the sharding would change here and, where layers differ, change back in the next one
        kind = _fusion_of(fusion)
        if self.decide(tokens, hidden, dtype, kind, Caller.GEMM).strategy is not Strategy.GEMM_RS:
            return None
        targets = gemm_rs.targets(tokens, hidden, fusion)
        return None if targets is None else ScatterTargets(targets, partial(self._finish_gemm_rs, gemm_rs, fusion, kind))

    @contextmanager
    def without(self, strategies: Collection[Strategy]) -> Iterator[None]:
        """Inside, what would run by one of these strategies runs by NCCL (gloo on CPU). The same on every rank; graphs that are
        captured stay as they are."""
        before = self.strategies, self._gemm_rs, self._rs_norm_ag
        incumbent = self.strategies[Strategy.NCCL]
        self.strategies = {each: incumbent if each in strategies else run for each, run in self.strategies.items()}
        self._gemm_rs = None if Strategy.GEMM_RS in strategies else self._gemm_rs
        self._rs_norm_ag = None if Strategy.RS_NORM_AG in strategies else self._rs_norm_ag
        try:
            yield
        finally:
            self.strategies, self._gemm_rs, self._rs_norm_ag = before

    def _finish_gemm_rs(self, gemm_rs: GemmReduceScatter, fusion: ResidualRmsNorm, kind: Fusion) -> tuple[Tensor, ...]:
        self._count(f"GEMM_RS/{kind.name}")
        return gemm_rs.all_reduce_norm(aligned_residual(fusion))

    def _stays(self, residual: Tensor, dtype: torch.dtype) -> bool:
        """Whether a residual is sharded as RS_NORM_AG of a tensor of this dtype shards it."""
        if self._rs_norm_ag is None or not isinstance(residual, ShardedResidual):
            return False
        tokens, hidden = residual.shape
        return same_sharding(tokens, residual.chunk_rows, self._rs_norm_ag.chunk_rows(hidden, dtype))

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def _unsharded(self, fusion: ResidualRmsNorm) -> ResidualRmsNorm:
        """The fusion with a residual that is a tensor on every rank; collective where it is sharded."""
        sharded = isinstance(fusion.residual, ShardedResidual)
        return replace(fusion, residual=unshard(fusion.residual, self)) if sharded else fusion

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self.base.all_gather(x, dim)

    def all_to_all(self, x: Tensor, splits: Splits | None = None) -> Tensor:
        return self.base.all_to_all(x, splits)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.base.reduce_scatter(x)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self.base.broadcast(x, source)

    def send(self, x: Tensor, to: int) -> None:
        self.base.send(x, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        return self.base.receive(x, source)

    def barrier(self) -> None:
        self.base.barrier()

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Any tensor will do: our strategies push straight from where the producer wrote, in stream order, and stage nothing. So
        it may be rewritten as soon as the stream has passed the all-reduce."""
        return torch.empty(*shape, dtype=dtype, device=device)


def _fusion_of(fusion: ResidualRmsNorm) -> Fusion:
    """Under which a table knows it."""
    return _fusion(fusion.quant, token_scale=fusion.scale is None, keep_norm=fusion.keep_norm)


def tuned(
    base: Group,
    *,
    message_bytes: int,
    strategy: str = "AUTO",
    deterministic: bool = False,
    timeout: float = 300.0,
    tables: Path | None = None,
) -> Group:
    """`base` with tuned all-reduces; collective over its ranks. A group of one, or one not over torch, is returned as it is.

    message_bytes: of one rank's longest message, max_num_tokens x hidden size x bytes of an element; it bounds the workspace (on a
    GPU `symmetric.workspace_bytes`, and `symmetric.reduce_scatter_bytes` where GEMM_RS may run). strategy: AUTO, or the name of one
    of `tables.strategy.SUPPORTED`. timeout: seconds that a CPU rank may keep the others waiting. tables: the folder of tuned
    tables, instead of the user's. Raises EngineError when ranks hold different tables.
    """
    if base.size == 1 or not isinstance(base, TorchGroup):
        return base
    fingerprint = detect_fingerprint(base.device, base.size, base)
    table = table_for(fingerprint, tables)
    digest = table.digest if table.sections else "seed"
    options = {"allreduce_strategy": f"{strategy}, deterministic {deterministic}", "longest all-reduce": f"{message_bytes} bytes"}
    _compare(base, {"all-reduce table": table.digest, **options})
    forced = None if strategy == "AUTO" else Strategy[strategy]
    shortest = {None: table.gemm_rs_min_bytes(), Strategy.GEMM_RS: 0}.get(forced)
    gemm_rs = shortest is not None and message_bytes >= shortest
    strategies = available(base, base.device, fingerprint, message_bytes, timeout=timeout, gemm_rs=gemm_rs)
    if deterministic and fingerprint.on_gpu and all(each in strategies.refused for each in (Strategy.TWOSHOT, Strategy.ONESHOT)):
        raise EngineError(
            "deterministic is not possible on these GPUs", held="all-reduces by NCCL alone",
            why=f"{strategies.refused[Strategy.TWOSHOT]}; NCCL adds in an order that depends on the size of a step",
            next="use one GPU or GPUs with peer access, or leave deterministic out",
        )  # fmt: skip
    rules = Rules(fingerprint, strategies.refused, table.lookup, forced, deterministic)
    _announce(base, table, strategies.refused, tables)
    return TunedGroup(base, rules, strategies.runs, digest)


def _announce(base: TorchGroup, table: Table, refused: Mapping[Strategy, str], tables: Path | None) -> None:
    if base.rank:
        return
    for reason in dict.fromkeys(refused.values()):
        names = ", ".join(strategy.name for strategy, why in refused.items() if why == reason)
        _log.warning("not used: %s: %s", names, reason)
    line = advice(table.fingerprint, tables)
    if line:
        _log.info("%s", line)


def _compare(base: TorchGroup, facts: dict[str, str]) -> None:
    texts = share_text(base, "\n".join(facts.values()), base.device)
    verdict = difference([dict(zip(facts, text.split("\n"), strict=True)) for text in texts])
    if verdict is not None:
        raise verdict

# SPDX-License-Identifier: Apache-2.0
"""The parts of a rank that the self check can switch off: then the reference path takes their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from phalanx.comm.group import Group
from phalanx.comm.tuned_group import TunedGroup
from phalanx.kernels.capabilities import plain_torch
from phalanx.models.decoder import Decoder
from phalanx.models.layers.attention.context_parallel import ContextParallel
from phalanx.models.layers.attention.plain import PlainBackend
from phalanx.models.layers.linear_methods.plain import plain_linears
from phalanx.tables.strategy import SUPPORTED, Strategy
from phalanx.worker.model_runner import ModelRunner


@dataclass(frozen=True)
class Part:
    """name: for people. advice: what to do where it moves the answers. off: inside, steps run without it. contains_others: it has
    been made of other parts, and runs them whether they are off or not."""

    name: str
    advice: str
    off: Callable[[], AbstractContextManager[object]]
    contains_others: bool = False


_REPORT = "report this with the log"


def parts_of(runner: ModelRunner, model: Decoder, tp: Group) -> list[Part]:
    """All of them, the same on every rank; one that contains others comes last. tp: the group whose all-reduces follow a table."""
    parts = []
    if isinstance(tp, TunedGroup):
        tune = "use allreduce_strategy='NCCL', and tune this machine again (`phalanx allreduce tune`)"
        for strategy in SUPPORTED:
            if strategy is not Strategy.NCCL:
                parts.append(Part(f"all-reduce strategy {strategy.name}", tune, partial(tp.without, {strategy})))
    if model.context.dp.size > 1:
        advice = "use expert_exchange='ALL_GATHER'"
        parts.append(Part("expert exchange", advice, partial(_gathered_experts, model)))
    if model.context.device.type == "cuda":  # first: back ends and linear methods choose other kernels inside `plain_torch`
        parts.append(Part("kernels of norms, RoPE, experts or small GEMMs", _REPORT, plain_torch))
    dcp = model.context.dcp
    context = ContextParallel(dcp) if dcp.size > 1 else None
    indexer = model.shape.indexer
    backend = PlainBackend(
        latent=model.shape.latent is not None, context=context, topk=0 if indexer is None else indexer.topk
    )  # fmt: skip
    parts.append(Part("attention back end", _REPORT, partial(runner.changed, backend=backend)))
    parts.append(Part("linear kernels", _REPORT, partial(plain_linears, model)))
    if runner.graphs is not None:
        parts.append(Part("captured graphs", "use cuda_graphs=False", partial(runner.changed, graphs=False), contains_others=True))
    return parts


@contextmanager
def _gathered_experts(model: Decoder) -> Iterator[None]:
    """Inside, tokens reach the experts of other dp indices by ALL_GATHER."""
    before = [(layer.exchange, layer.exchange.context) for layer in model.moe_layers.values()]
    for exchange, context in before:
        exchange.context = replace(context, one_sided=None, expert_exchange="ALL_GATHER")
    try:
        yield
    finally:
        for exchange, context in before:
            exchange.context = context


def names(parts: Sequence[Part]) -> str:
    return " and ".join(part.name for part in parts)

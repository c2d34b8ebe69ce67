# SPDX-License-Identifier: Apache-2.0
"""What the engine did when committed rows were measured, and does no longer: priced for those rows alone.

Until 72457fc each layer with experts in FP8 gathered the residual in front of its router, from OWNED_ROWS rows of a step on: an
all-reduce of owned rows did not keep the norm that the router reads. Until 4e866e7 a token alone made each rank read an expert for
each of its pairs, and until a8af21f few steps with prompts of a mixture were replayed from graphs. Until 3bed13a long prompts had
the kernel for attention that short ones have. Until 640446b decodes gathered in the steps of one stage of a pipeline, until
4efea1d steps of data-parallel indices were half empty by turns, and a long prompt had all of its steps until 2026-11-28. Until
ebd3fd9 each token of a pipeline went over the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.planner.rows import OLDER_SCHEDULERS_UNTIL, Row, Start, shape_named
from phalanx.engine.dp_scheduler import DpIndex, DpScheduler
from phalanx.engine.scheduler import SchedulerOptions
from phalanx.engine.step_draft import DecodeCounts
from phalanx.layout import graphs
from phalanx.layout.weights import layer_bytes
from phalanx.planner import coefficients, footprint, simulate
from phalanx.planner.coefficients import Coefficients
from phalanx.planner.cost import Costs

GATHERED_UNTIL = "2026-11-25"
"""The last day with figures of engines that gathered the residual."""
OLDER_OF_THAT_DAY = {"8921e63e6b6a", "7d0dae5", "87975dc", "55e704c"}
"""Commits of the day after it that are older than what follows."""
SHORT_PROMPTS_UNTIL = "2026-11-26"
"""The last day with figures of engines without a kernel for attention of long prompts."""
NEWER_OF_THAT_DAY = {"3bed13a"}
"""Commits of that day that have it."""
HOST_TOKENS_UNTIL = "2026-11-28"
"""The last day with figures of engines whose pipelines sent each token over the host."""
RETURNED_FIRST = "ebd3fd9"
"""The first commit that returns them on the device, of that day."""
OWNED_ROWS = 128
"""Rows of a step from which on all-reduces left the residual with the ranks that own its rows."""


@dataclass(frozen=True)
class FittedCoefficients(Coefficients):
    """c_gather: microseconds in which the gather of a residual began, beside its bytes."""

    c_gather: float = 0.0


class HostTokensCosts(Costs):
    """Those of an engine in which each token of a pipeline went over the host."""

    @property
    def returns_tokens(self) -> bool:
        return False


class OneKernelCosts(HostTokensCosts):
    """Those of an engine without a kernel for attention of long prompts."""

    @property
    def has_long_prompts(self) -> bool:
        return False


class FewGraphsCosts(OneKernelCosts):
    """Those of an engine that counted all experts of a layer, not those that a token reaches, to find up to how many tokens of a
    step with prompts a graph pays, and captured none of more than footprint.FEW_GRAPH_TOKENS."""

    @property
    def graph_tokens(self) -> int:
        if self.shape.latent is not None:
            return 0
        per_layer = layer_bytes(self.shape, 0, self.dtype, self.layout)
        return min(footprint.FEW_GRAPH_TOKENS, int(graphs.HOST_SECONDS * graphs.BYTES_PER_SECOND / per_layer))


class GatheringCosts(FewGraphsCosts):
    """Those of an engine that gathered the residual."""

    def _all_reduces_us(self, tokens: int, layers: int, moe_layers: int) -> float:
        us = super()._all_reduces_us(tokens, layers, moe_layers)
        now = self.machine.coefficients
        assert isinstance(now, FittedCoefficients)
        kept_norm = self.layout.dp == 1 and self._experts_in_fp8
        if self.strategy == "NCCL" or tokens < OWNED_ROWS or not kept_norm:
            return us
        gather = self._all_reduce("NCCL").us(tokens * self.shape.hidden_size * 2.0) / 2  # half of an all-reduce
        return us + moe_layers * (now.c_gather + gather)


def costs_of(row: Row) -> type[Costs]:
    """Those of the engine that a row was measured with."""
    if row.date <= GATHERED_UNTIL:
        return GatheringCosts
    if captured_few(row):
        return FewGraphsCosts
    older = row.date <= SHORT_PROMPTS_UNTIL and row.commit not in NEWER_OF_THAT_DAY
    if older:
        return OneKernelCosts
    return HostTokensCosts if over_host(row) else Costs


def over_host(row: Row) -> bool:
    """Whether a pipeline's tokens went over the host: until ebd3fd9, and in that commit with fewer requests than stages."""
    if row.commit == RETURNED_FIRST:
        return row.workload.requests < row.pp
    return row.pp > 1 and row.date <= HOST_TOKENS_UNTIL


def returns_tokens(row: Row) -> bool:
    """Whether they return on the device."""
    return row.pp > 1 and costs_of(row) is Costs


class OlderCounts(DecodeCounts):
    """Of engines in which a step of a pipeline could be full of decodes."""

    def share(self, stages: int, *, prompts_wait: bool) -> int:
        return self.ready


class OlderScheduler(DpIndex):
    """That of engines in which a step of a pipeline could be full of decodes, each prompt had all of a step until it was computed,
    and a data-parallel index got as many requests as a step of its own holds, whatever it had begun, and no more until it had begun
    them all."""

    decode_counts = OlderCounts

    def _left_to_shorter(self, *_: object) -> int:
        return 0

    def _begun_tokens(self) -> int:
        return 0


class OlderDpScheduler(DpScheduler):
    """Of several indices of those engines."""

    index_type = OlderScheduler


older_scheduler = partial(simulate.engine_scheduler, one=OlderScheduler, several=OlderDpScheduler)


def scheduler_of(row: Row) -> Callable[[SchedulerOptions, int], simulate.AnyScheduler]:
    """That of the engine that a row was measured with."""
    if row.date <= OLDER_SCHEDULERS_UNTIL:
        return older_scheduler
    return simulate.engine_scheduler


def captured_few(measured: Row | Start) -> bool:
    """Whether the engine captured graphs of few sizes, see `FewGraphsCosts`."""
    return measured.date <= GATHERED_UNTIL or measured.commit in OLDER_OF_THAT_DAY


def started_lightly(start: Start) -> bool:
    """Whether the start was one of the present engine, which loads kernels by few layers (d49d01a); until then a start ran all of
    a model for each of its kernels, and its allocator reserved more."""
    return (start.date > SHORT_PROMPTS_UNTIL and start.commit != "7d0dae5") or start.commit in NEWER_OF_THAT_DAY


def captured_tokens(start: Start) -> int:
    """Up to how many tokens the engine captured graphs at that start, if a layer's weights allowed it."""
    return min(start.max_num_tokens, footprint.FEW_GRAPH_TOKENS) if captured_few(start) else start.max_num_tokens


def bytes_of_more_graphs(start: Start) -> int:
    """What graphs take today beyond those that the engine captured at that start."""
    today, then = (
        footprint.graph_bytes(shape_named(start.model), start.dtype, start.layout, start.max_batch_size, tokens)
        for tokens in (start.max_num_tokens, captured_tokens(start))
    )
    return today - then


def fitted() -> FittedCoefficients:
    """The committed coefficients of H200, and what they were fitted with."""
    entry = coefficients.document()["machines"]["H200"]
    return FittedCoefficients.from_json({**entry["coefficients"], **entry["history"]})

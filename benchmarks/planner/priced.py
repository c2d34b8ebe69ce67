# SPDX-License-Identifier: Apache-2.0
"""Measured rows at the prices of given coefficients."""

from __future__ import annotations

from benchmarks.planner import history
from benchmarks.planner.history import FittedCoefficients
from benchmarks.planner.rows import REFERENCE_GBPS, Row, shape_named
from phalanx.hardware import catalogue
from phalanx.layout import Layout
from phalanx.planner import burst
from phalanx.planner.cost import Costs, MachineModel


def machine(coefficients: FittedCoefficients, bandwidth: float = REFERENCE_GBPS) -> MachineModel:
    gpu = catalogue.gpu("H200")
    return MachineModel(gpu, gpu.link, gpu.gpus_per_node, 1, None, coefficients, "table", bandwidth / REFERENCE_GBPS)


def predicted(row: Row, coefficients: FittedCoefficients) -> float:
    """ms per token of a decode row."""
    costs = costs_of_row(row, coefficients)
    context = row.workload.input_len + row.workload.output_len / 2
    return 1e3 * burst.decode_round(costs, row.workload.requests, context, row.max_batch_size)


def costs_of_row(row: Row, coefficients: FittedCoefficients) -> Costs:
    """Those of the engine that the row was measured with."""
    return costs_of(
        row.model, row.dtype, row.kv_fp8, row.tp, row.pp, row.strategy, coefficients, row.bandwidth, row.moe_ep, row.ep,
        row.exchange, history.costs_of(row),
    )  # fmt: skip


def costs_of(
    model: str, dtype: str, kv_fp8: bool, tp: int, pp: int, strategy: str, coefficients: FittedCoefficients,
    bandwidth: float = REFERENCE_GBPS, moe_ep: int = 1, ep: int = 1, exchange: str = "AUTO",
    costs: type[Costs] = Costs,
) -> Costs:  # fmt: skip
    return costs(
        shape_named(model),
        dtype,
        "fp8" if kv_fp8 else "bf16",
        Layout(tp=tp, pp=pp, dp=ep, moe_ep=moe_ep),
        machine(coefficients, bandwidth),
        strategy,
        exchange,
    )

# SPDX-License-Identifier: Apache-2.0
"""Prices of collectives: measured points are met, other worlds and links are scaled the right way, and each says how it is
known."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from benchmarks.planner.rows import RESULTS
from phalanx.hardware import catalogue
from phalanx.planner import collectives

H200, NDR = catalogue.gpu("H200"), catalogue.network("ib-ndr")


def test_a_measured_point_is_met():
    with (RESULTS / "allreduce/benchmark.tp4.sm90.csv").open() as lines:
        times = [
            float(row["time (us)"])
            for row in csv.DictReader(lines)
            if row["fusion"] == "RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE" and row["strategy"] == "NCCL" and row["size"] == "1048576"
            and row["hidden_size"] == "8192"
        ]  # fmt: skip
    curve = collectives.all_reduce(H200, "nvlink", 4, None, "NCCL")
    assert curve.us(1048576) == pytest.approx(min(times), abs=0.001)
    assert curve.label == "table"


@pytest.mark.parametrize("strategy", ["AUTO", "NCCL"])
def test_larger_messages_take_longer(strategy):
    for world in (2, 4, 8):
        curve = collectives.all_reduce(H200, "nvlink", world, None, strategy)
        times = [curve.us(size) for size in (1, 1 << 14, 1 << 20, 1 << 24, 1 << 27, 1 << 30)]
        assert times == sorted(times)
        assert times[-1] > 10 * times[2]


@pytest.mark.parametrize("world", [2, 4])
def test_as_many_bytes_of_shorter_rows_take_no_longer(world: int) -> None:
    """And the curve is that of the nearest measured size: 5,120 is nearer to 4,096 than to 8,192."""
    short, middle, long = (collectives.all_reduce(H200, "nvlink", world, None, hidden=hidden) for hidden in (2048, 4096, 8192))
    for power in range(14, 28):
        assert max(short.us(1 << power), middle.us(1 << power)) <= 1.005 * long.us(1 << power)
    assert short.us(1 << 17) < 0.9 * long.us(1 << 17)
    assert collectives.all_reduce(H200, "nvlink", world, None, hidden=5120).points == middle.points


def test_auto_is_never_dearer_than_nccl():
    for world in (2, 4):
        auto, nccl = (collectives.all_reduce(H200, "nvlink", world, None, s) for s in ("AUTO", "NCCL"))
        for power in range(14, 28):
            assert auto.us(1 << power) <= nccl.us(1 << power)


@pytest.mark.parametrize("world", [2, 4])
def test_a_norm_that_the_router_reads_costs_what_was_measured(world: int) -> None:
    """The norm is gathered in 16 bit beside FP8: with few tokens that is nothing, with many a fifth and more."""
    for hidden in (2048, 8192):
        plain, routed = (collectives.all_reduce(H200, "nvlink", world, None, s, hidden) for s in ("AUTO", collectives.ROUTED))
        assert routed.us(16 * hidden * 2) == pytest.approx(plain.us(16 * hidden * 2), rel=0.05)
        assert 1.1 < routed.us(8192 * hidden * 2) / plain.us(8192 * hidden * 2) < 1.6


def test_more_ranks_slower_links_and_networks_cost_more():
    size = 1 << 24
    tp4, tp8 = (collectives.all_reduce(H200, "nvlink", world, None) for world in (4, 8))
    slow = collectives.all_reduce(replace(H200, link_bandwidth=225e9), "nvlink", 4, None)
    pcie = collectives.all_reduce(catalogue.gpu("L40S"), "pcie", 4, None)
    nodes = collectives.all_reduce(H200, "nvlink", 16, NDR)
    assert tp4.us(size) < tp8.us(size) < pcie.us(size)
    assert tp4.us(size) < slow.us(size) < 2.1 * tp4.us(size)
    assert tp8.us(1 << 14) < nodes.us(1 << 14)
    assert [each.label for each in (tp4, tp8, slow, pcie, nodes)] == ["table", "derived", "derived", "estimated", "estimated"]
    assert collectives.worst("table", "estimated", "derived") == "estimated"


def test_the_exchange_of_experts_is_what_was_measured():
    rows = json.loads((RESULTS / "comm_expert_exchange.ep2.sm90.json").read_text(encoding="utf-8"))["rows"]
    us = {
        (row["exchange"], row["payload"]): row["us"] for row in rows if (row["hidden"], row["tokens"]) == (4096, 256)
    }  # fmt: skip
    size = 256 * 4096 * 2
    for exchange, payload, measured in (
        ("ALL_GATHER", "16 bit", us["ALL_GATHER", "bf16"]), ("ALL_TO_ALL", "e4m3", us["ALL_GATHER", "bf16"]),
        ("ONE_SIDED", "16 bit", us["ONE_SIDED", "bf16"]), ("AUTO", "e4m3", us["ONE_SIDED", "e4m3"]),
    ):  # fmt: skip
        curve = collectives.expert_exchange(H200, "nvlink", 2, None, exchange, payload, 2)
        assert (curve.us(size), curve.label) == (pytest.approx(measured), "table")


@pytest.mark.parametrize("exchange", ["ALL_GATHER", "ONE_SIDED"])
@pytest.mark.parametrize("link", ["nvlink", "pcie"])
def test_the_exchange_of_experts_is_at_least_its_wire(exchange, link):
    curve = collectives.expert_exchange(H200, link, 8, None, exchange, "16 bit", 2)
    size = 1 << 26
    # Of the 7 other indices' tokens, those that have an expert here: 1 - (7/8)^2.
    arriving = 7 * (1 - (7 / 8) ** 2) if exchange == "ONE_SIDED" else 7
    assert curve.us(size) > size * arriving / H200.link_bandwidth * 1e6
    assert curve.label == ("derived" if link == "nvlink" else "estimated")


def test_more_indices_and_slower_links_exchange_more_slowly():
    size = 1 << 20
    two, eight, network, pcie = (
        collectives.expert_exchange(H200, link, world, nodes, "AUTO", "e4m3", 8).us(size)
        for link, world, nodes in (("nvlink", 2, None), ("nvlink", 8, None), ("nvlink", 8, NDR), ("pcie", 8, None))
    )
    assert two < eight < pcie < network

# SPDX-License-Identifier: Apache-2.0
"""The choice: pure, admitted, explained, and quick."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.choose import SP_MIN_TOKENS, Rules, choose, decider, sp_min_tokens
from phalanx.hardware.fingerprint import LINKS, Fingerprint
from phalanx.tables.message import Fusion, Message
from phalanx.tables.strategy import SUPPORTED, Strategy
from phalanx.tables.table import Entry

HERE = Fingerprint(90, "nvlink", 4)


def says(strategy: Strategy, *, fused: bool = True):
    return lambda dtype, fusion, tokens, hidden: Entry(strategy, fused, "table", "measured")


def message(tokens: int = 1, hidden: int = 8192, fusion: Fusion = Fusion.NONE, world: int = 4) -> Message:
    return Message("all_reduce", fusion, "bf16", tokens, hidden, world)


def test_the_table_decides_and_its_reason_stays() -> None:
    found = choose(message(fusion=Fusion.RESIDUAL_RMS_NORM), Rules(HERE, {}, says(Strategy.ONESHOT)))
    assert (found.strategy, found.fused, found.source, found.reason) == (Strategy.ONESHOT, True, "table", "measured")
    assert found.name == "ONESHOT/RESIDUAL_RMS_NORM"


def test_unfused_where_the_table_says_so() -> None:
    rules = Rules(HERE, {}, says(Strategy.ONESHOT, fused=False))
    assert not choose(message(fusion=Fusion.RESIDUAL_RMS_NORM), rules).fused


@pytest.mark.parametrize("strategy", SUPPORTED)
def test_a_forced_strategy_runs(strategy: Strategy) -> None:
    found = choose(message(), Rules(HERE, {}, says(Strategy.NCCL), forced=strategy))
    assert (found.strategy, found.source) == (strategy, "forced")


def test_what_cannot_run_gives_way_to_nccl_and_says_why() -> None:
    odd = choose(message(hidden=12), Rules(HERE, {}, says(Strategy.ONESHOT)))
    assert (odd.strategy, odd.source) == (Strategy.NCCL, "fallback")
    assert "multiple of 8" in odd.reason
    apart = choose(message(), Rules(Fingerprint(90, "pcie", 4), {}, says(Strategy.TWOSHOT)))
    assert apart.strategy is Strategy.NCCL
    assert LINKS["pcie"] in apart.reason
    refused = choose(message(), Rules(HERE, {Strategy.ONESHOT: "no Triton"}, None, forced=Strategy.ONESHOT))
    assert refused.strategy is Strategy.NCCL
    assert "no Triton" in refused.reason


def test_deterministic_never_takes_nccl_sums_where_it_need_not() -> None:
    for rules in (
        Rules(HERE, {}, says(Strategy.NCCL), deterministic=True),
        Rules(HERE, {}, None, deterministic=True),
        Rules(HERE, {Strategy.ONESHOT: "broken"}, says(Strategy.ONESHOT), deterministic=True),
    ):
        assert choose(message(), rules).strategy is Strategy.TWOSHOT
    nothing_else = Rules(
        HERE, dict.fromkeys((Strategy.ONESHOT, Strategy.TWOSHOT), "broken"), says(Strategy.NCCL), deterministic=True
    )
    assert choose(message(), nothing_else).strategy is Strategy.NCCL
    gloo = Rules(Fingerprint(0, "shm", 2), {}, says(Strategy.NCCL), deterministic=True)  # gloo's sums are in rank order here
    assert choose(message(world=2), gloo).name == "GLOO/NONE"


@given(
    st.integers(1, 1 << 20), st.integers(1, 1 << 15), st.sampled_from(Fusion), st.sampled_from(sorted(LINKS)), st.integers(2, 16),
    st.sampled_from(SUPPORTED), st.sampled_from([None, *SUPPORTED]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_every_size_has_an_answer_that_can_run(
    tokens: int,
    hidden: int,
    fusion: Fusion,
    link: str,
    world: int,
    best: Strategy,
    forced: Strategy | None,
    fused: bool,
    pinned: bool,
) -> None:
    here = Fingerprint(0 if link == "shm" else 90, link, world)
    asked = Message("all_reduce", fusion, "bf16", tokens, hidden, world)
    rules = Rules(here, {}, says(best, fused=fused), forced, pinned)
    found = choose(asked, rules)
    assert found == choose(asked, rules)
    assert found.reason
    if found.strategy is Strategy.NCCL:
        assert not found.fused
    else:
        assert here.peers_reach
        assert hidden % 8 == 0
        assert world <= 8
    if fusion is Fusion.NONE:
        assert not found.fused


def test_costs_less_than_a_microsecond_once_a_size_is_known() -> None:
    decide = decider(Rules(HERE, {}, says(Strategy.ONESHOT)))
    decide(16, 8192, "bf16", Fusion.RESIDUAL_RMS_NORM)
    best = 1.0
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(1000):
            decide(16, 8192, "bf16", Fusion.RESIDUAL_RMS_NORM)
        best = min(best, (time.perf_counter() - begin) / 1000)
    assert best < 1e-6, f"{best * 1e6:.2f} us"


def test_the_answers_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.comm.choose._MAX_CACHED", 10)
    decide = decider(Rules(HERE, {}, says(Strategy.ONESHOT)))
    for tokens in range(1, 100):
        assert decide(tokens, 8192, "bf16", Fusion.NONE).strategy is Strategy.ONESHOT
        assert decide.cache_info().currsize <= 10  # type: ignore[attr-defined]


@given(
    st.integers(1, 1 << 12), st.integers(1, 1 << 15), st.sampled_from(Fusion), st.integers(2, 9), st.booleans(),
    st.sampled_from([None, *SUPPORTED]),
)  # fmt: skip
def test_the_residual_is_sharded_where_a_kernel_can(
    tokens: int, hidden: int, fusion: Fusion, world: int, pinned: bool, forced: Strategy | None
) -> None:
    here = Fingerprint(90, "nvlink", world)
    rules = Rules(here, {}, says(Strategy.NCCL), forced, pinned, sp_min_tokens(here))
    found = decider(rules)(tokens, hidden, "bf16", fusion, accepts_sharded=True)
    can = fusion is Fusion.RESIDUAL_RMS_NORM or (fusion.quant == "fp8" and not fusion.keeps_norm)
    many = world in SP_MIN_TOKENS and tokens >= SP_MIN_TOKENS[world]
    assert found.sharded == (can and many and hidden % 16 == 0 and forced in (None, Strategy.TWOSHOT))
    if found.sharded:
        assert found.name == f"RS_NORM_AG/{fusion.name}"
        assert found.fused
    assert not decider(rules)(tokens, hidden, "bf16", fusion).sharded


def test_the_residual_is_not_sharded_on_a_cpu_or_apart() -> None:
    for link in ("shm", "pcie", "nodes"):
        assert sp_min_tokens(Fingerprint(0 if link == "shm" else 90, link, 2)) is None
    refused = Rules(HERE, {Strategy.TWOSHOT: "broken"}, says(Strategy.NCCL), sp_min_tokens=1)
    assert not decider(refused)(4096, 8192, "bf16", Fusion.RESIDUAL_RMS_NORM, accepts_sharded=True).sharded

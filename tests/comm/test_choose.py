# SPDX-License-Identifier: Apache-2.0
"""The choice: pure, admitted, explained, and quick."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.choose import Rules, choose, decider
from phalanx.hardware.fingerprint import LINKS, Fingerprint
from phalanx.tables.message import Caller, Fusion, Message
from phalanx.tables.seed import default
from phalanx.tables.strategy import SEQUENCE_PARALLEL, SUPPORTED, Choice, Strategy
from phalanx.tables.table import HAND_OVER, Entry, HiddenRange, Section, Span, Table

HERE = Fingerprint(90, "nvlink", 4)


def says(strategy: Strategy, *, fused: bool = True):
    return lambda dtype, fusion, tokens, hidden, caller: Entry(strategy, fused, "table", "measured")


PLAIN = tuple(strategy for strategy in SUPPORTED if strategy not in SEQUENCE_PARALLEL)


def test_a_table_cannot_take_the_norm_from_sequence_parallelism() -> None:
    rules = Rules(Fingerprint(90, "nvlink", 2), {}, says(Strategy.RS_NORM_AG, fused=False))
    assert choose(message(64, 16, Fusion.RESIDUAL_RMS_NORM, 2, Caller.SHARDED), rules).fused


def message(
    tokens: int = 1, hidden: int = 8192, fusion: Fusion = Fusion.NONE, world: int = 4, caller: Caller = Caller.REPLICATED
) -> Message:  # fmt: skip
    return Message("all_reduce", fusion, "bf16", tokens, hidden, world, caller)


def test_the_table_decides_and_its_reason_stays() -> None:
    decision = choose(message(fusion=Fusion.RESIDUAL_RMS_NORM), Rules(HERE, {}, says(Strategy.ONESHOT)))
    assert (decision.strategy, decision.fused, decision.source, decision.reason) == (Strategy.ONESHOT, True, "table", "measured")
    assert decision.name == "ONESHOT/RESIDUAL_RMS_NORM"


def test_unfused_where_the_table_says_so() -> None:
    rules = Rules(HERE, {}, says(Strategy.ONESHOT, fused=False))
    assert not choose(message(fusion=Fusion.RESIDUAL_RMS_NORM), rules).fused


@pytest.mark.parametrize("strategy", PLAIN)
@pytest.mark.parametrize("caller", Caller)
def test_a_forced_strategy_runs(strategy: Strategy, caller: Caller) -> None:
    """Everywhere: TWOSHOT means two-shot, in the layers of long steps, too."""
    for fusion in Fusion:
        for tokens in (1, 64, 128, 2048, 16384):
            decision = choose(message(tokens, fusion=fusion, caller=caller), Rules(HERE, {}, says(Strategy.NCCL), forced=strategy))
            assert (decision.strategy, decision.source) == (strategy, "forced")


@pytest.mark.parametrize("forced", SEQUENCE_PARALLEL)
@pytest.mark.parametrize("fusion", Fusion)
def test_forced_sequence_parallelism_runs_where_the_caller_allows_it(forced: Strategy, fusion: Fusion) -> None:
    """And TWOSHOT, which gives the same sums, elsewhere."""
    rules = Rules(HERE, {}, says(Strategy.NCCL), forced=forced)
    ran = [choose(message(64, fusion=fusion, caller=caller), rules) for caller in Caller]
    sharded = Strategy.RS_NORM_AG if fusion.shards else Strategy.TWOSHOT
    assert [decision.strategy for decision in ran] == [Strategy.TWOSHOT, sharded, forced if fusion.shards else sharded]
    assert [decision.source for decision in ran if decision.strategy is forced] == ["forced"] * sum(
        d.strategy is forced for d in ran
    )
    apart = Rules(Fingerprint(90, "pcie", 4), {}, says(Strategy.NCCL), forced=forced)
    assert {choose(message(64, fusion=fusion, caller=caller), apart).strategy for caller in Caller} == {Strategy.NCCL}


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
    st.sampled_from(SUPPORTED), st.sampled_from([None, *SUPPORTED]), st.booleans(), st.booleans(), st.sampled_from(Caller),
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
    caller: Caller,
) -> None:
    here = Fingerprint(0 if link == "shm" else 90, link, world)
    request = Message("all_reduce", fusion, "bf16", tokens, hidden, world, caller)
    rules = Rules(here, {}, says(best, fused=fused), forced, pinned)
    decision = choose(request, rules)
    assert decision == choose(request, rules)
    assert decision.reason
    if decision.strategy is Strategy.NCCL:
        assert not decision.fused
    else:
        assert here.peers_reach
        assert hidden % 8 == 0
        assert world <= 8
    if fusion is Fusion.NONE:
        assert not decision.fused
    if decision.strategy in SEQUENCE_PARALLEL:
        assert decision.fused
        assert fusion.shards
        assert hidden % 16 == 0
        assert int(caller) > SEQUENCE_PARALLEL.index(decision.strategy)


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


def layers(*spans: tuple[int, int, Choice], gemm: tuple[Span, ...] = ()) -> Table:
    """A table of bf16 RESIDUAL_RMS_NORM at hidden 8192 for callers that accept a sharded residual, and perhaps for GEMMs."""
    fusion = Fusion.RESIDUAL_RMS_NORM
    rows = {Caller.SHARDED: tuple(Span(*span) for span in spans), Caller.GEMM: gemm}
    sections = [Section("bf16", fusion, (HiddenRange(8192, 8192, row),), caller) for caller, row in rows.items() if row]
    return Table(HERE, tuple(sections), default(HERE))


def test_the_table_moves_sequence_parallelism() -> None:
    """Away from the thresholds of the seed, in both directions, with the table as the source."""
    sharded, one = Choice(Strategy.RS_NORM_AG), Choice(Strategy.ONESHOT)
    handed_over, gemm_rs = Span(64, 255, HAND_OVER), Span(256, 16384, Choice(Strategy.GEMM_RS), 1.1)
    decide = decider(
        Rules(HERE, {}, layers((1, 7, one), (8, 4095, sharded), (4096, 16384, one), gemm=(handed_over, gemm_rs)).lookup)
    )
    norm = Fusion.RESIDUAL_RMS_NORM
    for tokens, strategy in (
        (7, Strategy.ONESHOT),
        (8, Strategy.RS_NORM_AG),
        (4095, Strategy.RS_NORM_AG),
        (4096, Strategy.ONESHOT),
    ):
        decision = decide(tokens, 8192, "bf16", norm, Caller.SHARDED)
        assert (decision.strategy, decision.source) == (strategy, "table")
    for tokens, strategy in (
        (63, Strategy.RS_NORM_AG),
        (255, Strategy.RS_NORM_AG),
        (256, Strategy.GEMM_RS),
        (9000, Strategy.GEMM_RS),
    ):
        decision = decide(tokens, 8192, "bf16", norm, Caller.GEMM)
        assert (decision.strategy, decision.source) == (strategy, "table")
    assert decide(16385, 8192, "bf16", norm, Caller.SHARDED).source == "seed"
    assert decide(8, 8192, "bf16", norm).strategy not in SEQUENCE_PARALLEL


def test_sequence_parallelism_that_cannot_run_gives_way_to_what_the_caller_would_get_without_it() -> None:
    table = layers((1, 16384, Choice(Strategy.RS_NORM_AG)), gemm=(Span(1, 16384, Choice(Strategy.GEMM_RS)),))
    unsharded, norm = table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, 64, 8192), Fusion.RESIDUAL_RMS_NORM
    refused = Rules(HERE, {Strategy.RS_NORM_AG: "broken", Strategy.GEMM_RS: "broken"}, table.lookup)
    decision = decider(refused)(64, 8192, "bf16", norm, Caller.GEMM)
    assert (decision.strategy, decision.source) == (unsharded.strategy, unsharded.source)
    without_gemm = decider(Rules(HERE, {Strategy.GEMM_RS: "broken"}, table.lookup))
    assert without_gemm(64, 8192, "bf16", norm, Caller.GEMM).strategy is Strategy.RS_NORM_AG


def test_sums_in_rank_order_allow_sequence_parallelism() -> None:
    table = layers((1, 64, Choice(Strategy.RS_NORM_AG)), (65, 128, Choice(Strategy.NCCL)))
    decide = decider(Rules(HERE, {}, table.lookup, deterministic=True))
    assert decide(64, 8192, "bf16", Fusion.RESIDUAL_RMS_NORM, Caller.SHARDED).name == "RS_NORM_AG/RESIDUAL_RMS_NORM"
    assert decide(65, 8192, "bf16", Fusion.RESIDUAL_RMS_NORM, Caller.SHARDED).strategy is Strategy.TWOSHOT


def test_a_sharded_residual_stays_sharded() -> None:
    """The two norms of a layer with experts have fusions of their own, whose tables change to RS_NORM_AG at different sizes."""
    table = layers((1, 64, Choice(Strategy.RS_NORM_AG)), (65, 16384, Choice(Strategy.TWOSHOT)))
    norm, rules = Fusion.RESIDUAL_RMS_NORM, Rules(HERE, {}, table.lookup)
    decide = decider(rules)
    assert decide(128, 8192, "bf16", norm, Caller.SHARDED).strategy is Strategy.TWOSHOT
    for caller in (Caller.SHARDED, Caller.GEMM):
        decision = decide(128, 8192, "bf16", norm, caller, sharded=True)
        assert (decision.name, decision.source) == ("RS_NORM_AG/RESIDUAL_RMS_NORM", "table")
        assert "comes in sharded" in decision.reason
    assert decide(128, 8192, "bf16", norm, Caller.REPLICATED, sharded=True).strategy not in SEQUENCE_PARALLEL
    forced = decider(Rules(HERE, {}, table.lookup, forced=Strategy.TWOSHOT))
    assert forced(128, 8192, "bf16", norm, Caller.SHARDED, sharded=True).strategy is Strategy.TWOSHOT
    broken = decider(Rules(HERE, {Strategy.RS_NORM_AG: "broken"}, table.lookup))
    assert broken(128, 8192, "bf16", norm, Caller.SHARDED, sharded=True).strategy is Strategy.TWOSHOT

# SPDX-License-Identifier: Apache-2.0
"""Every size has an answer, which says where it comes from; and the answer is quick."""

from __future__ import annotations

import timeit

import pytest
from hypothesis import given, settings

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import MAX_BYTES, default
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tables.table import HAND_OVER, HiddenRange, Section, Span, Table
from tests.support.tables_strategies import edges, one_span, tables

MACHINE = Fingerprint(90, "nvlink", 2)
TWOSHOT = Choice(Strategy.TWOSHOT)


def plain_search(table, dtype, fusion, tokens, hidden, caller):
    """(choice, source) as the page of the format says it, span by span."""
    if not fusion.shards:
        caller = Caller.REPLICATED
    section = table.section_for(dtype, fusion, caller)
    spans = [
        span
        for row in (section.hidden_ranges if section else ())
        if row.first <= hidden <= row.last
        for span in row.spans
        if span.first <= tokens <= span.last
    ]
    assert len(spans) <= 1
    if spans and spans[0].choice != HAND_OVER:
        return spans[0].choice, "table"
    seed, sharded = table.seed, table.seed.sequence_parallel
    if caller is Caller.REPLICATED:
        return seed.choose(dtype, fusion, tokens, hidden)[0], "estimated" if seed.estimated else "seed"
    long = sharded.rs_norm_ag_min_tokens is not None and tokens >= sharded.rs_norm_ag_min_tokens and not spans
    nbytes = min(tokens * hidden * (4 if dtype == "fp32" else 2), MAX_BYTES)
    if long and caller is Caller.SHARDED:
        return Choice(Strategy.RS_NORM_AG), "estimated" if sharded.estimated else "seed"
    if long and sharded.gemm_rs_min_bytes is not None and nbytes >= sharded.gemm_rs_min_bytes:
        return Choice(Strategy.GEMM_RS), "estimated" if sharded.estimated else "seed"
    return plain_search(table, dtype, fusion, tokens, hidden, Caller(caller - 1))


@given(tables())
@settings(max_examples=40, deadline=None)
def test_lookup_equals_a_plain_search(table):
    for edge in edges(table):
        entry = table.lookup(*edge)
        choice, source = plain_search(table, *edge)
        assert (entry.strategy, entry.fused, entry.source) == (choice.strategy, choice.fuses(edge[1]), source)
        assert table.lookup(*edge) is entry


def test_sections_name_only_what_their_callers_allow():
    def section(choice, caller, fusion=Fusion.RESIDUAL_RMS_NORM):
        return Section("bf16", fusion, (HiddenRange(8, 8, (Span(1, 1, Choice(choice)),)),), caller)

    for wrong in (
        section(Strategy.RS_NORM_AG, Caller.REPLICATED), section(Strategy.GEMM_RS, Caller.SHARDED),
        section(Strategy.RS_NORM_AG, Caller.SHARDED, Fusion.NONE), section(Strategy.RS_NORM_AG, Caller.GEMM),
        section(Strategy.GEMM_RS, Caller.GEMM, Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4),
    ):  # fmt: skip
        with pytest.raises(TableError, match="cannot run there; tune again"):
            Table(MACHINE, (wrong,), default(MACHINE))
    right = (section(Strategy.RS_NORM_AG, Caller.SHARDED), section(Strategy.GEMM_RS, Caller.GEMM))
    assert Table(MACHINE, right, default(MACHINE)).gemm_rs_min_bytes() == 2 * 8
    with pytest.raises(TableError, match="two sections of one dtype, fusion and caller"):
        Table(MACHINE, right + right, default(MACHINE))


def test_reasons():
    table = one_span(MACHINE, default(MACHINE), TWOSHOT, 1.5)
    inside, outside = table.lookup("bf16", Fusion.NONE, 64, 5120), table.lookup("bf16", Fusion.NONE, 65, 5120)
    assert inside.source == "table"
    assert "1.50x the speed of NCCL" in inside.reason
    assert outside.source == "estimated"
    assert "not measured at this size" in outside.reason
    assert "this dtype and fusion were not measured" in table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, 1, 128).reason


def test_stand_ins():
    fused = Section("bf16", Fusion.RESIDUAL_RMS_NORM_QUANT_FP8, (HiddenRange(8, 8, (Span(1, 1, TWOSHOT),)),))
    table = Table(MACHINE, (fused,), default(MACHINE))
    for fusion in Fusion:
        answered = table.lookup("fp16", fusion, 1, 8)
        assert (answered.source == "table") == (fusion.quant == "fp8")
    assert "with bf16 RESIDUAL_RMS_NORM_QUANT_FP8" in table.lookup("fp16", Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8, 1, 8).reason
    assert table.lookup("fp32", Fusion.RESIDUAL_RMS_NORM_QUANT_FP8, 1, 8).source == "estimated"


def test_a_kept_norm_is_sent_as_one_that_is_not_quantized():
    """So that one answers for it where the residual is sharded, and its quantization where that is replicated."""
    kept = (Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8, Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE)
    sections = [
        Section("bf16", fusion, (HiddenRange(8, 8, (Span(1, 1, Choice(strategy)),)),), caller)
        for fusion, caller, strategy in (
            (Fusion.RESIDUAL_RMS_NORM, Caller.REPLICATED, Strategy.TWOSHOT),
            (Fusion.RESIDUAL_RMS_NORM_QUANT_FP8, Caller.REPLICATED, Strategy.ONESHOT),
            (Fusion.RESIDUAL_RMS_NORM, Caller.SHARDED, Strategy.RS_NORM_AG),
            (Fusion.RESIDUAL_RMS_NORM_QUANT_FP8, Caller.SHARDED, Strategy.ONESHOT),
            (Fusion.RESIDUAL_RMS_NORM, Caller.GEMM, Strategy.GEMM_RS),
            (Fusion.RESIDUAL_RMS_NORM_QUANT_FP8, Caller.GEMM, HAND_OVER.strategy),
        )
    ]
    table = Table(MACHINE, tuple(sections), default(MACHINE))
    for fusion in kept:
        answers = [table.lookup("bf16", fusion, 1, 8, caller) for caller in Caller]
        assert [entry.strategy for entry in answers] == [Strategy.ONESHOT, Strategy.RS_NORM_AG, Strategy.GEMM_RS]
        assert {entry.source for entry in answers} == {"table"}


def test_what_is_no_message():
    table = one_span(MACHINE, default(MACHINE), TWOSHOT)
    with pytest.raises(ValueError, match="0 tokens"):
        table.lookup("bf16", Fusion.NONE, 0, 128)
    with pytest.raises(KeyError):
        table.lookup("int8", Fusion.NONE, 1, 128)


def test_the_digest_is_of_what_decides():
    table = one_span(MACHINE, default(MACHINE), TWOSHOT)
    same = Table(table.fingerprint, table.sections, table.seed, {"date": "another day"})
    other = one_span(MACHINE, default(MACHINE), Choice(Strategy.ONESHOT))
    assert table.digest == same.digest != other.digest


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (HiddenRange(1, 2, ()),),
        (HiddenRange(2, 1, (Span(1, 1, TWOSHOT),)),),
        (HiddenRange(0, 1, (Span(1, 1, TWOSHOT),)),),
        (HiddenRange(1, 2**31, (Span(1, 1, TWOSHOT),)),),
        (HiddenRange(1, 4, (Span(1, 1, TWOSHOT),)), HiddenRange(4, 5, (Span(1, 1, TWOSHOT),))),
        (HiddenRange(1, 4, (Span(1, 3, TWOSHOT), Span(3, 4, TWOSHOT))),),
    ],
)
def test_faulty_ranges(rows):
    with pytest.raises(TableError):
        Table(MACHINE, (Section("bf16", Fusion.NONE, rows),), default(MACHINE))


def test_an_answer_costs_less_than_a_microsecond():
    table = one_span(MACHINE, default(MACHINE), TWOSHOT)
    for tokens in (17, 4096):  # one from the table, one from the seed
        best = min(timeit.repeat(lambda n=tokens: table.lookup("bf16", Fusion.NONE, n, 4096), number=2000, repeat=25)) / 2000
        assert best < 1e-6

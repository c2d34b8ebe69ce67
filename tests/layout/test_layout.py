# SPDX-License-Identifier: Apache-2.0
"""Ranks and places are the same thing twice; stages are the best contiguous split."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.experts import Experts
from phalanx.config.model import ModelShape
from phalanx.config.quantization import MXFP4
from phalanx.errors import LayoutError
from phalanx.layout.layout import Layout, max_chunk, require_suits, stages

SIZES = st.integers(1, 4)


@given(SIZES, SIZES, SIZES)
def test_every_rank_has_one_place(pp: int, dp: int, tp: int) -> None:
    layout = Layout(pp, dp, tp)
    places = [layout.place(rank) for rank in range(layout.world)]
    assert len(set(places)) == layout.world == pp * dp * tp
    assert [layout.rank(at.pp_index, at.dp_index, at.tp_index) for at in places] == list(range(layout.world))
    for rank in range(layout.world):
        assert rank in layout.tp_group(rank)
        assert rank in layout.pp_group(rank)
        assert layout.tp_group(rank) == list(range(rank // tp * tp, rank // tp * tp + tp))
        assert set(layout.tp_group(rank)) & set(layout.pp_group(rank)) == {rank}


def test_tp_is_fastest() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    assert layout.tp_group(5) == [4, 5]
    assert layout.pp_group(5) == [1, 5]
    divided = Layout(pp=2, tp=4, dcp=2)
    assert (divided.dcp_group(5), divided.dcp_group(6), divided.name) == ([4, 5], [6, 7], "tp 4 pp 2 dcp 2")
    assert Layout(tp=2).dcp_group(1) == [1]
    with pytest.raises(LayoutError, match="dcp 3 does not divide tp 4"):
        Layout(tp=4, dcp=3)


@pytest.mark.parametrize("axes", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_an_empty_axis_is_refused(axes: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError, match="at least 1"):
        Layout(*axes)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=r"0\.\.3"):
        Layout(pp=2, tp=2).place(rank)


def _worst(cut: list[range], sizes: list[int], first: int, last: int) -> int:
    loads = [sum(sizes[layer] for layer in stage) for stage in cut]
    loads[0] += first
    loads[-1] += last
    return max(loads)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 60), st.integers(0, 60))
def test_stages_are_contiguous_and_no_split_is_better(sizes: list[int], pp: int, first: int, last: int) -> None:
    if pp > len(sizes):
        with pytest.raises(LayoutError, match=f"{len(sizes)} layers"):
            stages(sizes, pp)
        return
    ranges = stages(sizes, pp, first_bytes=first, last_bytes=last)
    assert [layer for stage in ranges for layer in stage] == list(range(len(sizes)))
    assert all(len(stage) for stage in ranges)
    cuts = itertools.combinations(range(1, len(sizes)), pp - 1)
    every = [[range(a, b) for a, b in itertools.pairwise((0, *cut, len(sizes)))] for cut in cuts]
    assert _worst(ranges, sizes, first, last) == min(_worst(cut, sizes, first, last) for cut in every)


def test_the_last_stage_holds_less_among_equals() -> None:
    assert [len(stage) for stage in stages([1] * 5, 2)] == [3, 2]


@pytest.mark.parametrize(
    ("tokens", "stages", "chunk"),
    [(1000, 1, 1000), (300, 4, 300), (511, 2, 511), (512, 2, 256), (600, 4, 300), (1000, 2, 500), (2050, 4, 513), (1, 2, 1)],
)  # fmt: skip
def test_stages_share_a_prompt_in_equal_chunks(tokens: int, stages: int, chunk: int) -> None:
    assert max_chunk(tokens, stages) == chunk


def test_a_layout_that_does_not_suit_the_model_names_those_that_do() -> None:
    shape = ModelShape(
        architecture="LlamaForCausalLM", vocab_size=90, hidden_size=48, intermediate_size=36, num_layers=3, num_heads=24,
        num_kv_heads=4, head_dim=2, max_positions=64,
    )  # fmt: skip
    require_suits(Layout(pp=3, tp=12), shape)
    with pytest.raises(LayoutError, match=r"size=5 does not divide num_attention_heads=24; use one of 1, 2, 3, 4, 6, 12$"):
        require_suits(Layout(tp=5), shape)
    with pytest.raises(LayoutError, match=r"size=8 does not divide intermediate_size=36; use one of 1, 2, 3, 4, 6, 12$"):
        require_suits(Layout(tp=8), shape)
    with pytest.raises(LayoutError, match=r"pipeline_parallel_size=4 .*3 layers.*at most 3"):
        require_suits(Layout(pp=4), shape)


def test_ranks_that_share_an_expert_each_hold_a_slice_of_it() -> None:
    """In MXFP4, three ranks hold a block of 32 columns each of 96, two hold two and one; four have none to share."""
    shape = ModelShape(
        architecture="GptOssForCausalLM", vocab_size=90, hidden_size=48, intermediate_size=96, num_layers=2, num_heads=12,
        num_kv_heads=12, head_dim=4, max_positions=64, experts=Experts(4, 2, 96, biases=True), quantization=MXFP4,
    )  # fmt: skip
    for layout in (Layout(tp=2), Layout(tp=3), Layout(tp=4, moe_ep=2), Layout(tp=4, moe_ep=4)):
        require_suits(layout, shape)
    with pytest.raises(LayoutError, match="= 4 exceeds the 3 groups of 32 columns"):
        require_suits(Layout(tp=4), shape)
    with pytest.raises(LayoutError, match=r"= 4 does not divide the experts' intermediate size 90; .* 1, 2, 3, 5, 6"):
        require_suits(Layout(tp=4), replace(shape, quantization=None, experts=Experts(4, 2, 90, biases=True)))

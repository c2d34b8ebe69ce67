# SPDX-License-Identifier: Apache-2.0
"""Chunks cover a message once, whatever the workspace holds; with a norm no row is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm import chunked
from phalanx.comm.group import ResidualRmsNorm
from phalanx.kernels.scaled_tensors import Unscaled


def space():
    pytest.importorskip("triton")
    from tests.support import comm_compiled

    return comm_compiled.workspace(2, 90)


@given(st.integers(1, 50), st.integers(1, 60))
def test_every_vector_is_summed_once(vectors: int, at_once: int) -> None:
    x = torch.arange(8 * vectors, dtype=torch.bfloat16)
    sizes = []

    def launch(source, target, count, constants):
        target[: 4 * count] = source[: 4 * count]
        sizes.append(count)
        assert (constants["KIND"], constants["WORLD"], constants["launch_pdl"]) == ("bf16", 2, True)

    assert torch.equal(chunked.all_reduce(x, space(), at_once, launch), x)
    assert max(sizes) <= at_once
    assert sum(sizes) == vectors


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_rows_stay_whole(rows: int, pitch: int, rows_at_once: int) -> None:
    x = torch.arange(rows * 8 * pitch).view(rows, -1).to(torch.bfloat16)
    parts = []

    def launch(arguments, count, constants):
        assert (constants["QUANT"], constants["KEEP_NORM"]) == ("fp8_token", True)
        part, old = arguments[0], arguments[1]
        assert torch.equal(part.view(torch.bfloat16) + 1, old.view(torch.bfloat16))
        assert part.shape[0] == count <= rows_at_once
        parts.append(part)

    fusion = ResidualRmsNorm(x + 1, torch.ones(8 * pitch, dtype=torch.bfloat16), 1e-5, "fp8", None, keep_norm=True)
    chunked.all_reduce_norm(x, fusion, space(), rows_at_once * pitch + pitch - 1, launch)
    assert torch.equal(torch.cat(parts).view(torch.bfloat16), x)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(0, 4))
def test_chunks_of_an_unscaled_product_are_whole_rows_with_their_scales(rows: int, pitch: int, at_once: int, spare: int) -> None:
    output = Unscaled(torch.rand(rows, 8 * pitch).to(torch.bfloat16), torch.rand(rows, 1), torch.rand(8 * pitch))
    wanted = output.to_fp32().to(torch.bfloat16)

    def scaled(source: torch.Tensor, count: int, constants: dict) -> torch.Tensor:
        values = source.reshape(-1)[: 8 * pitch // 2 * count].view(torch.bfloat16).view(count, -1)
        part = Unscaled(values, constants["row_scales"][:count], constants["column_scales"])
        return part.to_fp32().to(torch.bfloat16).view(-1).view(torch.int32)

    def launch(source, target, count, constants):
        assert constants["pitch"] == pitch
        assert count % pitch == 0
        target[: 4 * count] = scaled(source, count // pitch, constants)

    room = at_once * pitch + spare % pitch
    assert torch.equal(chunked.all_reduce(output, space(), room, launch), wanted)

    parts = []
    fusion = ResidualRmsNorm(output.values, output.values[0], 1e-5)
    chunked.all_reduce_norm(
        output, fusion, space(), room, lambda arguments, count, constants: parts.append(scaled(arguments[0], count, constants))
    )
    assert torch.equal(torch.cat(parts).view(torch.bfloat16).view_as(wanted), wanted)


def test_what_has_no_scales_passes_none() -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    constants_of_calls: list[dict] = []
    chunked.all_reduce(x, space(), 2, lambda source, target, count, constants: constants_of_calls.append(constants))
    chunked.all_reduce_norm(
        x, ResidualRmsNorm(x, x[0], 1e-5), space(), 2, lambda arguments, rows, constants: constants_of_calls.append(constants)
    )
    assert [of_call[name] for of_call in constants_of_calls for name in ("row_scales", "column_scales")] == [None] * 4
    assert constants_of_calls[0]["pitch"] is None

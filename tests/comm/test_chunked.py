# SPDX-License-Identifier: Apache-2.0
"""Chunks cover a message once, whatever the workspace holds; with a norm no row is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm import chunked
from phalanx.comm.group import ResidualRmsNorm


def space():
    pytest.importorskip("triton")
    from tests.comm import compiled

    return compiled.workspace(2, 90)


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
    seen = []

    def launch(arguments, count, constants):
        assert (constants["QUANT"], constants["KEEP_NORM"]) == ("fp8_token", True)
        part, old = arguments[0], arguments[1]
        assert torch.equal(part.view(torch.bfloat16) + 1, old.view(torch.bfloat16))
        assert part.shape[0] == count <= rows_at_once
        seen.append(part)

    fusion = ResidualRmsNorm(x + 1, torch.ones(8 * pitch, dtype=torch.bfloat16), 1e-5, "fp8", None, keep_norm=True)
    chunked.all_reduce_norm(x, fusion, space(), rows_at_once * pitch + pitch - 1, launch)
    assert torch.equal(torch.cat(seen).view(torch.bfloat16), x)

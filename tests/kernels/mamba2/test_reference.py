# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 in plain torch: by chunks and token by token, against transformers' and over any division into steps."""

from __future__ import annotations

import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

from phalanx.config.gated_delta import CHUNK
from phalanx.kernels.mamba2 import reference
from tests.support.kernels_mamba2 import SIZES, Requests, inputs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
@pytest.mark.parametrize("begins", [True, False])
def test_chunks_equal_transformers(tokens: int, begins: bool) -> None:
    torch.manual_seed(tokens)
    key, query = torch.randn(2, tokens, SIZES.heads, SIZES.state_dim)
    values, steps = torch.randn(tokens, SIZES.heads, SIZES.head_dim), torch.rand(tokens, SIZES.heads)
    rates = -torch.linspace(0.01, 2.0, SIZES.heads)
    state = torch.randn(SIZES.heads, SIZES.state_dim, SIZES.head_dim) * (not begins)
    expected, behind = mamba2_chunk_scan(
        values[None], steps[None], rates, key[None], query[None], chunk_size=16, return_final_states=True,
        initial_states=None if begins else state.transpose(1, 2)[None],
    )  # fmt: skip
    parts = query, key, values * steps.unsqueeze(-1), steps * rates
    out, last = reference.many_tokens(*parts, state)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, behind[0].transpose(1, 2), rtol=1e-4, atol=1e-4)
    for token in range(tokens):
        one, state = reference.one_token(*(part[token : token + 1] for part in parts), state.view(1, *last.shape))
        torch.testing.assert_close(one[0], expected[0, token], rtol=1e-4, atol=1e-4)


def test_steps_may_end_anywhere() -> None:
    """Two requests in steps of chunks of any length, in mixed batches, and a third that takes the slot of the first."""
    torch.manual_seed(1)
    lengths = [150, 140, 70]
    each = [inputs(length) for length in lengths]
    expected = [Requests(1).step(reference.mamba2, [(0, mixed)])[0] for mixed in each]
    requests, done, slots = Requests(2), [0, 0, 0], [0, 1, 0]
    for step in ({0: 1}, {0: 63, 1: 3}, {1: 64}, {1: 1, 0: 70}, {1: 1, 0: 16}, {1: 70}, {1: 1, 2: 2}, {2: 68}):
        rows = []
        for request, count in step.items():
            if not done[request]:
                requests.begin(slots[request])
            rows.append((slots[request], each[request][done[request] : done[request] + count]))
        outs = requests.step(reference.mamba2, rows, padding=len(rows))
        for request, out in zip(step, outs, strict=True):
            wanted = expected[request][done[request] : done[request] + len(out)]
            torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-4)
            done[request] += len(out)
    assert done == lengths

# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain torch: by chunks and token by token, against transformers' and over any division into steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as transformers_rule

from phalanx.kernels.gated_delta import reference
from phalanx.kernels.gated_delta.reference import CHUNK
from tests.support.kernels_gated_delta import HEADS, Requests, inputs


@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
@pytest.mark.parametrize("begins", [True, False])
def test_chunks_equal_transformers(tokens: int, begins: bool) -> None:
    torch.manual_seed(tokens)
    query, key = torch.randn(2, tokens, HEADS.value_heads, HEADS.key_dim)
    value = torch.randn(tokens, HEADS.value_heads, HEADS.value_dim)
    decay, beta = -torch.rand(tokens, HEADS.value_heads), torch.rand(tokens, HEADS.value_heads)
    state = torch.randn(HEADS.value_heads, HEADS.key_dim, HEADS.value_dim) * (not begins)
    theirs = transformers_rule.torch_chunk_gated_delta_rule
    expected, behind = theirs(
        *(each[None] for each in (query, key, value, decay, beta)), initial_state=None if begins else state[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    query, key = (reference.normed_heads(each, 1) for each in (query, key))
    query = query * HEADS.key_dim**-0.5
    out, last = reference.many_tokens(query, key, value, decay, beta, state)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, behind[0], rtol=1e-4, atol=1e-5)
    for token in range(tokens):
        now = (each[token : token + 1] for each in (query, key, value, decay, beta))
        one, state = reference.one_token(*now, state.view(1, *last.shape))
        torch.testing.assert_close(one[0], expected[0, token], rtol=1e-4, atol=1e-5)


def alone(mixed: Tensor, ba: Tensor) -> Tensor:
    """The outputs of one request in one step."""
    return Requests(1).step(reference.gated_delta, [(0, mixed, ba)])[0]


def test_steps_may_end_anywhere() -> None:
    """Two requests in steps of chunks of any length, in mixed batches, and a third that takes the slot of the first."""
    torch.manual_seed(1)
    lengths = [150, 140, 70]
    each = [inputs(length) for length in lengths]
    expected = [alone(*one) for one in each]
    requests, done, slots = Requests(2), [0, 0, 0], [0, 1, 0]
    for step in ({0: 1}, {0: 63, 1: 3}, {1: 64}, {1: 1, 0: 70}, {1: 1, 0: 16}, {1: 70}, {1: 1, 2: 2}, {2: 68}):
        rows = []
        for request, count in step.items():
            if not done[request]:
                requests.begin(slots[request])
            mixed, ba = (part[done[request] : done[request] + count] for part in each[request])
            rows.append((slots[request], mixed, ba))
        outs = requests.step(reference.gated_delta, rows, padding=len(rows))
        for request, out in zip(step, outs, strict=True):
            wanted = expected[request][done[request] : done[request] + len(out)]
            torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-4)
            done[request] += len(out)
    assert done == lengths


def test_equal_keys_do_not_cancel() -> None:
    """A system of ones below the diagonal, whose powers have binomial coefficients: the values stay those of token by token."""
    torch.manual_seed(2)
    tokens, heads = 2 * CHUNK, 1
    key = torch.nn.functional.normalize(torch.ones(tokens, heads, HEADS.key_dim), dim=-1)
    value, state = torch.randn(tokens, heads, HEADS.value_dim), torch.zeros(heads, HEADS.key_dim, HEADS.value_dim)
    decay, beta = torch.zeros(tokens, heads), torch.ones(tokens, heads)
    out, _ = reference.many_tokens(key, key, value, decay, beta, state)
    torch.testing.assert_close(out, value, rtol=1e-4, atol=1e-4)  # each token replaces what the one before wrote


def test_a_long_run_does_not_drift() -> None:
    """32,768 tokens one by one: the state is that of the same tokens by chunks, in fp64 and in fp32."""
    torch.manual_seed(4)
    tokens, heads = 32768, 2
    query, key = torch.nn.functional.normalize(torch.randn(2, tokens, heads, 8), dim=-1)
    value, beta = torch.randn(tokens, heads, 8), torch.rand(tokens, heads)
    decay = -torch.rand(tokens, heads) * torch.tensor([1e-4, 1e-1])
    start = torch.zeros(heads, 8, 8)
    parts = query, key, value, decay, beta
    _, exact = reference.many_tokens(*(part.double() for part in parts), start.double())
    state = start[None]
    for token in range(tokens):
        _, state = reference.one_token(*(part[token : token + 1] for part in parts), state)
    _, chunked = reference.many_tokens(*parts, start)
    for behind in (state[0], chunked):
        torch.testing.assert_close(behind.double(), exact, rtol=1e-4, atol=1e-5)

# SPDX-License-Identifier: Apache-2.0
"""Sampling ops against transformers' logits processors, formulas written by hand, and statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from phalanx.kernels import reference
from phalanx.kernels.sampling import sampling


def logits_of(rows, vocab, seed=0, spread=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def random_keys(count, seed):
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, (2, count), dtype=np.int64).astype(np.int32))


@pytest.mark.parametrize(
    ("temperature", "k", "p", "m"),
    [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (0.9, 0, 1.0, 0.1), (2.0, 20, 0.9, 0.0), (1.5, 30, 0.95, 0.05),
     (0.3, 1, 0.5, 0.5), (1.0, 0, 0.01, 0.0), (1.0, 0, 0.999999, 0.0), (5.0, 0, 1.0, 1.0)],
)  # fmt: skip
def test_filters_keep_what_transformers_keeps(temperature, k, p, m):
    logits = logits_of(16, 97)
    steps = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    steps += [TopKLogitsWarper(k)] if k else []
    steps += [TopPLogitsWarper(p)] if p < 1 else []
    steps += [MinPLogitsWarper(m)] if m else []
    wanted = steps(None, logits).softmax(-1)

    scaled = reference.scale_logits(logits, torch.full((16,), temperature))
    top_k = torch.full((16,), k) if k else None
    top_p = torch.full((16,), p, dtype=torch.float64) if p < 1 else None
    probabilities = reference.keep_filtered(scaled, k or 97, top_k, top_p, torch.full((16,), m) if m else None).softmax(-1)

    assert torch.equal(probabilities > 0, wanted > 0)
    torch.testing.assert_close(probabilities, wanted)


def test_rows_filter_alone_whatever_the_others_ask():
    logits = logits_of(3, 50, seed=1)
    scaled = reference.scale_logits(logits, torch.tensor([1.0, 0.5, 2.0]))
    top_k, top_p = torch.tensor([50, 7, 3]), torch.tensor([0.6, 2.0, 0.9], dtype=torch.float64)
    together = reference.keep_filtered(scaled, 50, top_k, top_p, torch.tensor([0.0, 0.2, 0.0]))
    alone = torch.cat(
        [
            reference.keep_filtered(scaled[:1], 50, None, top_p[:1], None),
            reference.keep_filtered(scaled[1:2], 7, top_k[1:2], None, torch.tensor([0.2])),
            reference.keep_filtered(scaled[2:], 3, top_k[2:], top_p[2:], None),
        ]
    )
    assert torch.equal(together, alone)


@pytest.mark.parametrize("at_once", [2**24, 100])
def test_draws_of_a_step_are_those_of_each_row_alone(at_once, monkeypatch):
    """Greedy rows, and rows with any of the filters, in one call; by thresholds as by what is kept."""
    monkeypatch.setattr(reference, "_LOGITS_AT_ONCE", at_once)
    logits, noise = logits_of(6, 50, seed=2), random_keys(6, seed=3)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3, 0.9, 2.0])
    filters = torch.tensor([[3, 50, 4, 50, 50, 9], [0.2, 0.8, 1, 1, 1, 0.9], [0.5, 0, 0, 0.2, 0, 0.01]], dtype=torch.float64)
    drawn_tokens = set()
    for _ in range(40):
        tokens = sampling.sample(logits, temperature, noise, filters)
        assert tokens[0] == logits[0].argmax()
        for row in range(1, 6):
            k, p, m = filters[:, row : row + 1]
            scaled = reference.scale_logits(logits[row : row + 1], temperature[row : row + 1])
            kept = reference.keep_filtered(scaled, 50, k.long(), p if p < 1 else None, m.float() if m > 0 else None)
            assert tokens[row] == reference.draw(kept, noise[:, row : row + 1])
        drawn_tokens.add(tuple(tokens.tolist()))
        noise = noise.roll(1, 1) + 77
    assert len(drawn_tokens) > 20


def test_ties_at_the_edge_are_kept_in_every_path():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0]])
    scaled = reference.scale_logits(logits, torch.ones(1))
    for most in (2, 4, 6):  # how much was sorted does not matter
        kept = reference.keep_filtered(scaled, most, torch.tensor([2]), None, None)
        assert torch.isfinite(kept).tolist() == [[True, True, True, True, False, False]]
        kept = reference.keep_filtered(scaled, most, torch.tensor([2]), torch.tensor([0.5], dtype=torch.float64), None)
        assert torch.isfinite(kept).sum() == 4


@pytest.mark.parametrize(
    "row",
    [
        [math.inf, 0.0, 1.0],
        [-math.inf, -math.inf, 3.0],
        [3e38, -3e38, 0.0],
        [math.nan, 0.0, 1.0],
        [1e-45, 0.0, -1e-45],
        [-3.4e38] * 3,
    ],
)
@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 1.0, 100.0])
def test_odd_logits_give_no_nan_and_draw_what_is_allowed(row, temperature):
    scaled = reference.scale_logits(torch.tensor([row]), torch.tensor([temperature]))
    assert not scaled.isnan().any()
    assert scaled.max() == 0
    top_p = torch.tensor([1e-300], dtype=torch.float64)
    for kept in (scaled, reference.keep_filtered(scaled, 3, torch.tensor([3]), top_p, torch.tensor([1.0]))):
        token = reference.draw(kept, torch.tensor([[1], [2]], dtype=torch.int32)).item()
        assert kept[0, token] > -math.inf


def test_repetition_penalty_is_transformers():
    logits, drawn_tokens = logits_of(4, 40), torch.randint(0, 40, (4, 11), generator=torch.Generator().manual_seed(2))
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(drawn_tokens, logits.clone())
    in_prompt = torch.zeros(4, 40, dtype=torch.bool).scatter_(1, drawn_tokens[:, :6], True)
    counts = torch.zeros(4, 40, dtype=torch.int32).scatter_add_(1, drawn_tokens[:, 6:], torch.ones(4, 5, dtype=torch.int32))
    none = torch.zeros(4)
    torch.testing.assert_close(sampling.penalize(logits, counts, in_prompt, torch.full((4,), 1.7), none, none), wanted)


def test_presence_and_frequency_penalties_look_at_the_output_only():
    logits = torch.zeros(1, 4)
    counts, in_prompt = torch.tensor([[0, 1, 3, 0]], dtype=torch.int32), torch.tensor([[True, False, True, False]])
    penalized = sampling.penalize(logits, counts, in_prompt, torch.ones(1), torch.tensor([0.5]), torch.tensor([0.25]))
    assert penalized.tolist() == [[0.0, -0.75, -1.25, 0.0]]


def test_masks_read_bit_by_bit():
    allowed = torch.rand(3, 70, generator=torch.Generator().manual_seed(3)) < 0.3
    allowed[0, 31] = allowed[0, 63] = True  # sign bits
    packed = np.packbits(np.pad(allowed.numpy(), ((0, 0), (0, 26))), axis=1, bitorder="little").view("<i4")
    masked = sampling.allow(logits_of(3, 70), torch.from_numpy(packed.copy()))
    assert torch.equal(torch.isfinite(masked), allowed)


def test_forbid_leaves_a_row_its_last_token():
    logits = torch.tensor([[0.0, 1.0, 2.0], [-math.inf, 5.0, -math.inf]])
    masked = sampling.forbid(logits, torch.tensor([0, 1]), torch.tensor([2, 1]))
    assert masked.argmax(-1).tolist() == [1, 1]


def test_keys_of_ranks_lead_to_argmax():
    logits = logits_of(40, 64).round(decimals=0)  # many ties
    logits[3] = -math.inf
    logits[4, 50] = logits[4, 61] = math.nan
    logits[5, 63] = math.inf
    logits[6], logits[6, 9:12] = -1.0, torch.tensor([-0.0, 0.0, -0.0])
    wanted = logits.argmax(-1)
    assert wanted.tolist()[3:7] == [0, 50, 63, 9]
    wanted[3:6] = reference.NOT_FINITE
    assert torch.equal(sampling.argmax(logits), wanted)
    padded = torch.nn.functional.pad(logits, (0, 32), value=math.inf)
    for width in (64, 32, 24, 48):
        parts = [
            sampling.packed_argmax_keys(padded[:, begin : begin + width], begin, max(0, min(width, 64 - begin)))
            for begin in range(0, 96, width)
        ]
        slots, kv_slots = torch.arange(40).flip(0) + 2, torch.where(torch.arange(40) < 30, 5, -1)
        tokens, last_tokens = torch.empty(40, dtype=torch.int64), torch.full((42,), -9)
        sampling.decode_keys(torch.stack(parts), tokens, (last_tokens, slots, kv_slots))
        assert torch.equal(tokens, wanted)
        assert torch.equal(last_tokens, torch.cat([torch.full((12,), -9), wanted[:30].flip(0)]))


def test_noise_is_uniform_and_tokens_keys_are_independent():
    u = reference.hashed_uniform(random_keys(256, seed=4), 4096)
    assert u.min() > 0
    assert u.max() < 1
    assert stats.kstest(u.flatten().numpy()[::7], "uniform").pvalue > 1e-3
    # Over tokens for a key, over keys for a token, and between neighbours of both kinds.
    counts = np.stack([np.histogram(row, 64, (0, 1))[0] for row in u.numpy()])
    by_key = stats.chisquare(counts, axis=1).pvalue
    assert stats.kstest(by_key, "uniform").pvalue > 1e-3
    by_token = stats.chisquare(np.stack([np.histogram(col, 8, (0, 1))[0] for col in u.numpy().T]), axis=1).pvalue
    assert stats.kstest(by_token[:512], "uniform", method="asymp").pvalue > 1e-6  # 8 bins of 32: only roughly chi-square
    centred = u.double() - 0.5
    for product in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(product.mean().item()) < 5 * (1 / 12) / math.sqrt(product.numel())


def test_noise_near_zero_is_fine_grained():
    """The Gumbel maximum is decided by small u: with 2**17 tokens the winner has u of about 2**-17."""
    u = reference.hashed_uniform(random_keys(64, seed=5), 2**17)
    two = u.topk(2, largest=False, sorted=True).values
    assert (two[:, 0] < two[:, 1]).all()
    assert stats.kstest(two[:, 0].numpy() * 2**17, "expon").pvalue > 1e-3


def test_draws_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, -math.inf])
    many = 60_000
    scaled = reference.scale_logits(logits.expand(many, 6), torch.full((many,), 0.8))
    drawn = torch.bincount(reference.draw(scaled, random_keys(many, seed=6)), minlength=6)
    assert drawn[5] == 0
    wanted = (logits[:5] / 0.8).softmax(-1) * many
    assert stats.chisquare(drawn[:5].numpy(), (wanted * (many / wanted.sum())).double().numpy(), sum_check=False).pvalue > 1e-3


def test_scores_are_of_the_softmax():
    logits = logits_of(5, 33)
    targets = torch.tensor([0, 5, 32, 7, 7])
    table = sampling.score(logits, targets, 4)
    wanted = logits.double().log_softmax(-1)
    torch.testing.assert_close(table[:, 0], wanted.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=0)
    order = wanted.argsort(-1, descending=True)
    assert table[:, 1].tolist() == [(row == t).nonzero().item() + 1 for row, t in zip(order, targets, strict=True)]
    assert torch.equal(table[:, 2:6].long(), order[:, :4])
    torch.testing.assert_close(table[:, 6:], wanted.gather(1, order[:, :4]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_widened_rows_lie_alike(rows: int, dtype: torch.dtype) -> None:
    """However many there are, and whatever lies behind them: kernels are compiled for a stride, and add up by it."""
    padded_rows = torch.randn(rows, 128).to(dtype)
    contiguous = sampling.contiguous_fp32(padded_rows[:, :99])
    assert contiguous.stride() == (99, 1)
    assert torch.equal(contiguous, padded_rows[:, :99].float())
    assert sampling.contiguous_fp32(contiguous) is contiguous
    assert sampling.contiguous_fp32(contiguous, copy=True) is not contiguous

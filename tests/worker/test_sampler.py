# SPDX-License-Identifier: Apache-2.0
"""The sampler: what a request gets is decided by its own parameters, seed and position, never by its neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment
from phalanx.kernels.sampling import sampling
from phalanx.worker import sampler as module
from phalanx.worker.sampler import Sampler

VOCAB = 101
PROMPT = [3, 1, 4, 1, 5]


def params(**fields):
    return SamplingParams(max_tokens=None, **fields)


def admission(slot, sampling_params, *, tokens=PROMPT, prompt_length=5, seed=7, stops=()):
    return SlotAssignment(slot, list(tokens), prompt_length, sampling_params, seed, list(stops))


def logits_of(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def run(sampler, slot, steps, start=5, first_step=0, mask=None):
    """The tokens of one request alone, with logits that depend on the position only."""
    return [
        int(sampler.sample(logits_of(1, 1000 + p), [slot], [p], [mask]).tokens[0])
        for p in range(start + first_step, start + first_step + steps)
    ]


def scores_of(sampler, logits, targets, counts):
    return sampler.score_prompt(lambda part: logits[part], targets, counts).results()


def sampler_with(sampling_params, **fields):
    sampler = Sampler(4, VOCAB, "cpu")
    sampler.admit(admission(0, sampling_params, **fields))
    return sampler


MIX = [
    params(temperature=0.0),
    params(temperature=1.0),
    params(temperature=0.8, top_k=10),
    params(temperature=1.2, top_p=0.7),
    params(temperature=1.1, min_p=0.05),
    params(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3, logprobs=3),
    params(temperature=1.5, presence_penalty=1.0, frequency_penalty=0.5),
    params(temperature=0.0, frequency_penalty=2.0, logit_bias={7: 3.0}),
    params(temperature=1.0, min_tokens=3, logprobs=0),
]


def test_tokens_do_not_depend_on_the_batch():
    alone = []
    for i, sampling_params in enumerate(MIX):
        one = Sampler(16, VOCAB, "cpu")
        one.admit(admission(3, sampling_params, seed=i, stops=[2]))
        alone.append([int(one.sample(logits_of(9, p)[i : i + 1], [3], [p], [None]).tokens[0]) for p in range(5, 15)])
    together = Sampler(16, VOCAB, "cpu")
    for i, sampling_params in enumerate(MIX):
        together.admit(admission(15 - i, sampling_params, seed=i, stops=[2]))
    order = [4, 2, 8, 0, 1, 3, 7, 5, 6]
    for p in range(5, 15):
        sampled = together.sample(logits_of(9, p)[order], [15 - i for i in order], [p] * 9, [None] * 9).tokens
        assert sampled.tolist() == [alone[i][p - 5] for i in order]


@pytest.mark.parametrize("mix", [MIX, MIX[:1], MIX[1:2], [params(temperature=0.0, logprobs=2)]])
def test_narrow_logits_are_widened_where_more_than_their_order_counts(mix):
    """The same tokens and logprobs from bf16 as from the same values in fp32; a mask and min_tokens among them."""
    allowed = np.full(4, -1, dtype="<i4")
    allowed[0] = ~4
    for mask in (None, allowed.tobytes()):
        both = []
        for dtype in (torch.bfloat16, torch.float32):
            sampler = Sampler(16, VOCAB, "cpu")
            for i, sampling_params in enumerate(mix):
                sampler.admit(admission(i, sampling_params, seed=i, stops=[2]))
            count = len(mix)
            steps = []
            for p in (5, 6):
                logits = logits_of(count, p).bfloat16().to(dtype)
                before = logits.clone()
                steps.append(sampler.sample(logits, range(count), [p] * count, [mask] * count).results())
                assert torch.equal(logits, before)
            both.append(steps)
        assert both[0] == both[1]


@pytest.mark.parametrize(
    ("fields", "mask", "alone"),
    [
        ({}, None, True), ({"min_tokens": 1}, None, True), ({"min_tokens": 2}, None, False), ({}, bytes(16), False),
        ({"temperature": 0.5}, None, True), ({"temperature": 0.5, "min_p": 0.1}, None, False),
        ({"logprobs": 0}, None, False), ({"logit_bias": {3: 1.0}}, None, False),
        ({"frequency_penalty": 0.1}, None, False), ({"top_p": 0.5, "top_k": 3}, None, True),
    ],
)  # fmt: skip
def test_when_the_logits_need_not_be_gathered(fields, mask, alone):
    sampler = Sampler(4, VOCAB, "cpu")
    sampler.admit(admission(2, params(**{"temperature": 0.0, **fields}), stops=[9]))
    sampler.admit(admission(0, params(temperature=0.0)))
    draws = sampler.shard_sampling(np.array([0, 2]), np.array([9, 6], dtype=np.int32), [None, mask])
    assert (draws is not None) is alone
    if draws is not None and fields.get("temperature"):
        assert draws.temperature.tolist() == [0.0, 0.5]
        logits = logits_of(2)
        tokens = sampling.sample(logits, draws.temperature, draws.noise)
        assert tokens.tolist() == sampler.sample(logits, [0, 2], [9, 6], [None, None]).tokens.tolist()
        assert tokens[0] == logits[0].argmax()
    elif draws is not None:
        assert draws.temperature is None
    tokens = torch.tensor([4, 7])
    taken = sampler.output_of(tokens)
    tokens.zero_()  # a later step's
    assert [row.tokens[0] for row in taken.results()] == [4, 7]
    assert taken.wait().tolist() == [4, 7]


def test_a_mistake_is_found_before_the_logits_are_needed():
    sampler = sampler_with(params(temperature=0.0))
    for slots, positions in (([1], [5]), ([0, 0], [5, 5]), ([0], [4])):
        with pytest.raises(ValueError, match="slots"):
            sampler.shard_sampling(slots, positions, [None] * len(slots))


def test_counts_are_dropped_with_the_last_penalty():
    sampler = sampler_with(params(presence_penalty=1.0))
    assert len(sampler._penalty_counts.counts) == 4
    sampler.admit(admission(1, params(temperature=0.0)))
    sampler.release(0)
    assert len(sampler._penalty_counts.counts) == 0
    sampler.admit(admission(0, params(temperature=0.0, repetition_penalty=2.0)))
    assert [int(sampler.sample(torch.ones(1, VOCAB), [0], [p], [None]).tokens[0]) for p in (5, 6, 7)] == [0, 2, 6]


def test_memory_for_tokens_is_used_again():
    sampler = sampler_with(params(temperature=0.0))
    for _ in range(3):
        under_way = [sampler.sample(logits_of(1, p), [0], [p], [None]) for p in (5, 6, 7)]
        assert [step.results()[0].tokens[0] for step in under_way] == [int(logits_of(1, p).argmax()) for p in (5, 6, 7)]
    assert len(sampler._pinned._free) == 3


def test_prompts_are_scored_a_run_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 3 * VOCAB + 1)
    sampler, logits, runs = sampler_with(params()), logits_of(8), []

    def logits_of_part(part):
        runs.append(part)
        return logits[part].bfloat16()

    scores = sampler.score_prompt(logits_of_part, list(range(8)), [2] * 8).results()
    assert [(part.start, part.stop) for part in runs] == [(0, 3), (3, 6), (6, 9)]
    assert scores == scores_of(sampler, logits.bfloat16().float(), list(range(8)), [2] * 8)


def test_chunks_change_nothing(monkeypatch):
    def tokens():
        sampler = Sampler(16, VOCAB, "cpu")
        for i, sampling_params in enumerate(MIX):
            sampler.admit(admission(i, sampling_params, seed=i))
        results = [sampler.sample(logits_of(9, p), range(9), [p] * 9, [None] * 9).results() for p in range(5, 9)]
        scores = scores_of(sampler, logits_of(7), list(range(7)), [3] * 7)
        return results, scores

    at_once = tokens()
    monkeypatch.setattr(module, "_CHUNK", 2 * VOCAB)
    assert tokens() == at_once


def test_a_seed_repeats_and_another_differs():
    sampling_params = params(temperature=1.0)
    first = run(sampler_with(sampling_params, seed=1), 0, 30)
    assert run(sampler_with(sampling_params, seed=1), 0, 30) == first
    for seed in (2, -1, 2**63 - 1, -(2**63)):
        assert run(sampler_with(sampling_params, seed=seed), 0, 30) != first
    # The same logits at other positions: other tokens.
    sampler, same = sampler_with(sampling_params), logits_of(1)
    assert len({int(sampler.sample(same, [0], [p], [None]).tokens[0]) for p in range(5, 45)}) > 5


def test_positions_and_seeds_draw_from_the_distribution():
    sampler, logits = Sampler(64, 8, "cpu"), torch.tensor([[1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 2.0, 0.0]])
    for slot in range(64):
        sampler.admit(admission(slot, params(temperature=1.0), seed=slot))
    drawn = torch.cat([sampler.sample(logits.expand(64, 8), range(64), [p] * 64, [None] * 64).tokens for p in range(5, 305)])
    wanted = logits[0].double().softmax(-1).numpy() * len(drawn)
    assert stats.chisquare(np.bincount(drawn.numpy(), minlength=8), wanted, sum_check=False).pvalue > 1e-3


def test_greedy_takes_the_lowest_of_equals():
    sampler = sampler_with(params(temperature=0.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, [90, 40, 41]] = 5.0
    assert sampler.sample(logits, [0], [5], [None]).tokens.tolist() == [40]


@pytest.mark.parametrize("sampling_params", [params(temperature=1e-4), params(top_p=1e-9), params(top_k=1), params(min_p=1.0),
                                   params(temperature=1e-40), params(temperature=0.01, top_p=1e-300, top_k=3)])  # fmt: skip
def test_narrow_sampling_is_greedy(sampling_params):
    logits = logits_of(1)
    sampler = sampler_with(sampling_params)
    assert {int(sampler.sample(logits, [0], [p], [None]).tokens[0]) for p in range(5, 40)} == {int(logits.argmax())}


def test_logit_bias_moves_one_token():
    logits = torch.zeros(1, VOCAB)
    assert sampler_with(params(temperature=0.0, logit_bias={50: 0.1, 60: -100})).sample(logits, [0], [5], [None]).tokens == 50
    # ids that the model does not have are the engine's to refuse; here they harm nobody
    assert sampler_with(params(temperature=0.0, logit_bias={10**9: 5.0})).sample(logits, [0], [5], [None]).tokens == 0
    certain = sampler_with(params(temperature=1.0, logit_bias={9: 100.0}))
    assert {int(certain.sample(logits, [0], [p], [None]).tokens[0]) for p in range(5, 30)} == {9}


def test_min_tokens_forbids_stops_until_enough_are_out():
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 8] = 9.0, 8.0
    sampler = sampler_with(params(temperature=0.0, min_tokens=3), stops=[2, 8, 10**6])
    sampled = [int(sampler.sample(logits, [0], [p], [None]).tokens[0]) for p in range(5, 10)]
    assert sampled == [0, 0, 0, 2, 2]


def mask_of(*tokens, vocab=VOCAB):
    bits = np.zeros((vocab + 31) // 32 * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def test_a_mask_leaves_only_what_it_allows():
    sampler = sampler_with(params(temperature=1.0))
    sampler.admit(admission(1, params(temperature=0.0)))
    sampled = set()
    for p in range(5, 60):
        tokens = sampler.sample(logits_of(2) * 0.1, [0, 1], [p, p], [mask_of(31, 64, 100), mask_of(77)]).tokens
        sampled.add(int(tokens[0]))
        assert tokens[1] == 77
    assert sampled == {31, 64, 100}
    # a mask beats a bias, and min_tokens does not leave a constrained row without a token
    constrained = sampler_with(params(temperature=1.0, logit_bias={5: 100.0}, min_tokens=4, repetition_penalty=2.0), stops=[2])
    assert constrained.sample(logits_of(1), [0], [5], [mask_of(2)]).tokens == 2


def test_a_mask_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="16"):
        sampler_with(params()).sample(logits_of(1), [0], [5], [b"1234"])


def test_penalties_count_what_the_device_sampled():
    """Against the definition, step by step: OpenAI's formula, and the repetition penalty over prompt and output."""
    sampling_params = params(temperature=0.0, presence_penalty=0.3, frequency_penalty=0.7, repetition_penalty=1.2)
    sampler, output = sampler_with(sampling_params), []
    for p in range(5, 30):
        logits = logits_of(1, seed=p % 3)
        wanted = logits[0].clone()
        token_ids = torch.tensor(sorted({*PROMPT, *output}))
        wanted[token_ids] = torch.where(wanted[token_ids] > 0, wanted[token_ids] / 1.2, wanted[token_ids] * 1.2)
        for token in set(output):
            wanted[token] -= 0.3 + 0.7 * output.count(token)
        token = int(sampler.sample(logits, [0], [p], [None]).tokens[0])
        assert token == int(wanted.argmax())
        output.append(token)
    assert len(set(output)) > 5


@pytest.mark.parametrize("sampling_params", [params for params in MIX if not params.greedy])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(sampling_params):
    uninterrupted = run(sampler_with(sampling_params, stops=[2]), 0, 20)
    sampler = sampler_with(sampling_params, stops=[2])
    begun = run(sampler, 0, 8)
    sampler.release(0)
    sampler.admit(admission(1, params(presence_penalty=2.0)))  # somebody else takes the place
    sampler.admit(admission(2, sampling_params, tokens=PROMPT + begun, stops=[2]))
    assert begun + run(sampler, 2, 12, first_step=8) == uninterrupted


def test_counts_exist_only_for_those_who_need_them():
    sampler = Sampler(64, VOCAB, "cpu")
    for slot in range(32):
        sampler.admit(admission(slot, params(top_p=0.9)))
    assert sampler._penalty_counts.counts.numel() == 0
    for slot in range(32, 64):
        sampler.admit(admission(slot, params(presence_penalty=1.0)))
    assert len(sampler._penalty_counts.counts) == 32
    for slot in range(32, 64):
        sampler.release(slot)
        sampler.release(slot)
        sampler.admit(admission(slot, params(frequency_penalty=1.0)))
    assert len(sampler._penalty_counts.counts) == 32
    assert sampler._penalty_counts.counts.sum() == 0


def test_logprobs_are_of_the_raw_logits_for_those_who_ask():
    sampler = Sampler(4, VOCAB, "cpu")
    sampler.admit(admission(0, params(temperature=0.5, logprobs=2, logit_bias={3: 50.0}, top_k=4)))
    sampler.admit(admission(1, params()))
    sampler.admit(admission(2, params(temperature=0.0, logprobs=0)))
    sampler.admit(admission(3, params(logprobs=20)))
    logits = logits_of(4)
    kept = logits.clone()
    sampled = sampler.sample(logits, [0, 1, 2, 3], [5] * 4, [None] * 4)
    assert torch.equal(logits, kept)
    assert sampled.tokens.dtype == torch.int64
    rows = sampled.results()
    assert [row.tokens[0] for row in rows] == sampled.tokens.tolist()
    assert [[len(entry.top) for entry in row.logprobs] for row in rows] == [[2], [], [0], [20]]
    wanted = logits.double().log_softmax(-1)
    assert rows[0].tokens[0] == 3
    assert math.isclose(rows[0].logprobs[0].logprob, wanted[0, 3], abs_tol=1e-5)
    assert rows[0].logprobs[0].rank == int((logits[0] > logits[0, 3]).sum()) + 1
    assert rows[2].logprobs[0].rank == 1
    best = wanted[3].topk(20)
    assert [token for token, _ in rows[3].logprobs[0].top] == best.indices.tolist()
    np.testing.assert_allclose([value for _, value in rows[3].logprobs[0].top], best.values, atol=1e-5)


def test_prompt_logprobs_follow_the_next_token():
    sampler, logits = Sampler(1, VOCAB, "cpu"), logits_of(6)
    targets, counts = [5, 100, 0, 17, 17, 2], [0, 3, 20, 1, 0, 2]
    logprobs = scores_of(sampler, logits, targets, counts)
    wanted = logits.double().log_softmax(-1)
    for i, entry in enumerate(logprobs):
        assert entry.token == targets[i]
        assert math.isclose(entry.logprob, wanted[i, targets[i]], abs_tol=1e-5)
        assert [token for token, _ in entry.top] == wanted[i].topk(counts[i]).indices.tolist()
    assert scores_of(sampler, logits[:0], [], []) == []


@pytest.mark.parametrize(("slots", "positions"), [([1], [5]), ([0, 0], [5, 5]), ([0], [4])])
def test_mistakes_of_the_caller_are_named(slots, positions):
    sampler = sampler_with(params())
    with pytest.raises(ValueError, match="slots"):
        sampler.sample(logits_of(len(slots)), slots, positions, [None] * len(slots))


@pytest.mark.gpu1
def test_the_gpu_draws_what_the_cpu_draws():
    def tokens(device):
        sampler = Sampler(16, VOCAB, device)
        for i, sampling_params in enumerate(MIX):
            sampler.admit(admission(i, sampling_params, seed=i, stops=[2]))
        return [sampler.sample(logits_of(9, p).to(device), range(9), [p] * 9, [None] * 9).results() for p in range(5, 40)]

    cpu, gpu = tokens("cpu"), tokens("cuda")
    assert [[row.tokens for row in step] for step in gpu] == [[row.tokens for row in step] for step in cpu]

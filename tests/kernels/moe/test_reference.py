# SPDX-License-Identifier: Apache-2.0
"""The routers of DeepSeek-V2 and V3 against transformers' own; and a test for each part of them that is easily got wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from phalanx.config.experts import Scoring
from phalanx.kernels.moe.reference import grouped_topk

V3 = Scoring("sigmoid", 4, 2, 2.5)
V2 = Scoring("softmax", 4, 2, 16.0)


def by_expert(weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    """Each expert's weight [T, experts], 0 where it is not chosen: without the order of the choice."""
    return torch.zeros(len(ids), experts).scatter(1, ids.long(), weights)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("center", [0.0, -2.0])
def test_v3_is_that_of_transformers(renormalize: bool, center: float) -> None:
    """With biases so low that all biased scores are negative, too."""
    torch.manual_seed(1)
    config = DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.5,
        norm_topk_prob=renormalize,
    )  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.uniform_(center - 0.5, center + 0.5)
    logits, weights, ids = router(torch.randn(50, 16))
    routing = grouped_topk(logits.detach(), router.e_score_correction_bias, V3, 3, renormalize)
    torch.testing.assert_close(by_expert(*routing, 16), by_expert(weights.detach(), ids, 16))


@pytest.mark.parametrize(("method", "scoring"), [("greedy", Scoring("softmax", 1, 1, 16.0)), ("group_limited_greedy", V2)])
def test_v2_is_that_of_transformers(method: str, scoring: Scoring) -> None:
    torch.manual_seed(1)
    config = DeepseekV2Config(
        hidden_size=16, num_attention_heads=4, n_routed_experts=16, num_experts_per_tok=3, n_group=4, topk_group=2,
        routed_scaling_factor=16.0, topk_method=method,
    )  # fmt: skip
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    logits, weights, ids = router(torch.randn(50, 16))
    routing = grouped_topk(logits.detach(), None, scoring, 3, False)
    torch.testing.assert_close(by_expert(*routing, 16), by_expert(weights.detach(), ids, 16))


def chosen(logits: list[float], **rest: Any) -> list[int]:
    scoring, bias = rest.pop("scoring"), rest.pop("bias", None)
    values = None if bias is None else torch.tensor(bias)
    return sorted(grouped_topk(torch.tensor([logits]), values, scoring, rest.pop("top_k"), False).ids[0].tolist())


def test_a_group_of_v2_is_as_good_as_its_best_expert() -> None:
    """By the sum of two, the second group would be chosen."""
    assert chosen([3.0, -9.0, 2.5, 2.5], scoring=Scoring("softmax", 2, 1), top_k=1) == [0]


def test_a_group_of_v3_is_as_good_as_its_best_two() -> None:
    """By the best one, the first group would be chosen."""
    assert chosen([3.0, -9.0, 2.5, 2.4], scoring=Scoring("sigmoid", 2, 1), top_k=1, bias=[0.0] * 4) == [2]


def test_the_groups_are_chosen_by_biased_scores() -> None:
    assert chosen([3.0, 3.0, 0.0, 0.0], scoring=Scoring("sigmoid", 2, 1), top_k=1, bias=[0.0, 0.0, 1.0, 1.1]) == [3]


def test_a_group_that_is_passed_over_is_not_chosen_though_all_biased_scores_are_negative() -> None:
    """With 0 in place of minus infinity for its experts, they would be the largest."""
    assert chosen([3.0, 3.0, 0.0, 0.0], scoring=Scoring("sigmoid", 2, 1), top_k=2, bias=[-2.0] * 4) == [0, 1]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    routing = grouped_topk(torch.tensor([[0.0, 2.0, -1.0]]), torch.tensor([5.0, 0.0, 0.0]), Scoring("sigmoid", scale=2.0), 2, True)
    scores = torch.tensor([0.0, 2.0]).sigmoid()
    assert routing.ids.tolist() == [[0, 1]]
    torch.testing.assert_close(routing.weights[0], 2.0 * scores / scores.sum())


def test_scores_that_vanish_give_no_nan() -> None:
    """Their sum is 0, by which nothing is divided."""
    routing = grouped_topk(torch.full((1, 4), -200.0), torch.zeros(4), Scoring("sigmoid"), 2, True)
    assert routing.weights.tolist() == [[0.0, 0.0]]

# SPDX-License-Identifier: Apache-2.0
"""The router's GEMM in parts, and the kernel that adds them up: in Triton's interpreter against torch, and compiled without a
GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from phalanx.config.experts import Scoring
from phalanx.kernels.moe import heuristics, reference
from phalanx.kernels.moe.heuristics import RouterTiling
from phalanx.kernels.moe.tensors import RouterLogits
from tests.support.kernels_compiled import compiled_as, spilled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def check_parts_add_up() -> None:
    """Tokens, experts and columns that fill no tile; one part and several, of one tile and of several."""
    from phalanx.kernels.moe.router_gemm import router_gemm

    torch.manual_seed(0)
    for (tokens, experts, hidden), tiling in itertools.product(
        ((1, 8, 208), (37, 60, 400), (16, 128, 96)),
        (RouterTiling(16, 16, 64, 1, 4), RouterTiling(32, 64, 32, 3, 4), RouterTiling(16, 32, 512, 1, 4)),
    ):
        x, weight = torch.randn(tokens, hidden).half(), torch.randn(experts, hidden).half()
        parts = router_gemm(x, weight, tiling)
        assert parts.shape == (-(-hidden // (tiling.block * tiling.tiles)), tokens, experts)
        torch.testing.assert_close(parts.sum(0), x.float() @ weight.float().T, rtol=1e-5, atol=1e-4)


def check_topk_adds_up_in_order() -> None:
    """The choice and the weights are those of the logits that torch adds up: with a bias, rounded, and with scores."""
    from phalanx.kernels.moe.topk_softmax import topk_softmax

    torch.manual_seed(1)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, has_bias, splits, tokens in itertools.product(dtypes, (False, True), (1, 5), (1, 9)):
        parts = torch.randn(splits, tokens, 24)
        parts[:, :, 3] = parts[:, :, 1]  # the first of equal ones
        bias = torch.randn(24).bfloat16() if has_bias else None
        logits = parts[0]
        for part in parts[1:]:
            logits = logits + part
        logits = (logits if bias is None else logits + bias.float()).to(dtype)
        common: dict[str, Any] = {"experts": 24, "renormalize": True, "first": 0, "local_experts": 24}
        x = torch.zeros(tokens, 16)
        routing, _ = topk_softmax(RouterLogits(parts, bias, dtype), x, 3, **common)
        wanted = reference.topk_softmax(logits, 3, True)
        assert torch.equal(routing.ids, wanted.ids)
        torch.testing.assert_close(routing.weights, wanted.weights)
        scoring, scores_bias = Scoring("sigmoid", 4, 2, 2.5), torch.randn(24)
        routing, _ = topk_softmax(RouterLogits(parts, bias, dtype), x, 3, scoring=scoring, bias=scores_bias, **common)
        wanted = reference.grouped_topk(logits, scores_bias, scoring, 3, True)
        assert torch.equal(routing.ids, wanted.ids)
        torch.testing.assert_close(routing.weights, wanted.weights)


CHECKS = [check_parts_add_up, check_topk_adds_up_in_order]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


ROUTERS = ((8, 4096), (128, 2048), (64, 2048), (160, 5120), (256, 7168), (128, 2880))
"""(experts, hidden) of Mixtral, Qwen3, DeepSeek-V2-Lite, V2 and V3, and gpt-oss."""


def test_warmup_has_every_variant() -> None:
    for experts, _ in ROUTERS:
        launched = {heuristics.select_router(tokens, experts) for tokens in heuristics.warmup_token_counts(4096)}
        assert {heuristics.select_router(tokens, experts) for tokens in range(1, 4097)} == launched
        assert None in launched


def test_few_tokens_keep_the_gpu_busy() -> None:
    """A weight is read by many programs at once, whatever its shape."""
    for experts, hidden in ROUTERS:
        for tokens in (2, 64):
            tiling = heuristics.select_router(tokens, experts)
            assert tiling is not None
            splits = -(-hidden // (tiling.block * tiling.tiles))
            assert -(-tokens // tiling.tokens) * -(-experts // tiling.experts) * splits >= 16


@pytest.mark.parametrize(("arch", "tokens"), [(80, 2), (80, 128), (90, 2), (90, 64), (90, 128), (90, 512), (100, 2), (100, 128)])
def test_compiles(arch: int, tokens: int) -> None:
    from phalanx.kernels.moe.router_gemm import _router_gemm

    tilings = {heuristics.select_router(tokens, experts) for experts, _ in ROUTERS} - {None}
    assert tilings
    for tiling in tilings:
        assert tiling is not None
        constants = {"TOKENS": tiling.tokens, "EXPERTS": tiling.experts, "BLOCK": tiling.block, "TILES": tiling.tiles, "SM": arch}
        kinds = {"x": "*bf16", "weight": "*bf16", "parts": "*fp32", "tokens": "i32", "experts": "i32", "hidden": "i32"}
        kernel = compiled_as(
            _router_gemm, kinds, constants, arch, aligned=["x", "weight", "parts", "hidden"], num_warps=tiling.warps,
            num_stages=2 if tiling.tiles > 1 else 1,
        )  # fmt: skip
        assert spilled(kernel) == 0
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (arch >= 90)

# SPDX-License-Identifier: Apache-2.0
"""Decode rows that are drafts leave the outputs of all tokens as they are without: in plain torch, and by the kernels in Triton's
interpreter; and the kernels compile for three generations of GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.config.gated_delta import GatedDelta
from phalanx.kernels.gated_delta import reference
from phalanx.kernels.gated_delta.dispatch import launched
from phalanx.kernels.gated_delta.reference import StateRows
from tests.support.kernels_compiled import by_generation, compiled
from tests.support.kernels_drafts import DRAFTS, LENGTH, require_alike
from tests.support.kernels_gated_delta import HEADS, TAPS, inputs, weights
from tests.support.kernels_interpreted import interpret


def check_drafts(
    rule: Callable[..., Tensor], dtype: torch.dtype, device: str = "cpu", heads: GatedDelta = HEADS, seed: int = 0, absent: int = 0
) -> None:
    """As `tests.support.kernels_drafts`."""
    torch.manual_seed(seed)
    heads = replace(heads, drafts=DRAFTS)
    own = weights(heads, dtype)
    own = own._replace(**{name: getattr(own, name).to(device) for name in ("conv", "a_log", "dt_bias", "norm")})
    conv = torch.full((2, heads.conv_rows, sum(heads.sections)), float("nan"), device=device)
    state = torch.full((2, heads.value_heads, heads.key_dim, heads.value_dim), float("nan"), device=device)
    pending = torch.full((2, heads.value_heads, 2 * heads.kept + 1), float("nan"), device=device)
    texts = [inputs(LENGTH, heads, dtype) for _ in range(3)]
    wanted = [without_drafts(*text, heads, dtype) for text in texts]

    def run(parts: Sequence[Tensor], rows: StateRows) -> Tensor:
        return rule(*parts, heads, own, conv, state, rows, pending)

    require_alike(texts, wanted, lambda count: inputs(count, heads, dtype), run, dtype, device, seed, absent)


def without_drafts(mixed: Tensor, ba: Tensor, heads: GatedDelta, dtype: torch.dtype) -> Tensor:
    rows = StateRows(
        torch.tensor([0]), torch.tensor([0, LENGTH]), torch.tensor([LENGTH]), torch.ones(LENGTH).long(), 0, 1, [0, LENGTH], [LENGTH]
    )
    conv, state = torch.zeros(1, TAPS - 1, sum(heads.sections)), torch.zeros(1, heads.value_heads, heads.key_dim, heads.value_dim)
    return reference.gated_delta(mixed, ba, heads, weights(heads, dtype), conv, state, rows)


@pytest.mark.parametrize("seed", range(4))
def test_in_plain_torch(seed: int) -> None:
    check_drafts(reference.gated_delta, torch.float32, seed=seed)


def test_a_rejected_draft_that_was_taken_in_is_seen() -> None:
    """The test above can fail: where a step takes in all tokens of the one before."""

    def careless(*arguments: Tensor) -> Tensor:
        pending = arguments[-1]
        pending[:, :, -1] -= 1.0
        return reference.gated_delta(*arguments)

    with pytest.raises((AssertionError, RuntimeError)):
        check_drafts(careless, torch.float32)


def check_kernels() -> None:
    check_drafts(launched, torch.float32, seed=1, absent=2)
    check_drafts(launched, torch.bfloat16)


def test_in_the_interpreter() -> None:
    interpret([check_kernels])


@pytest.mark.parametrize(("name", "arch"), by_generation(["_conv_verify", "_delta_verify"], set()))
@pytest.mark.parametrize("new", [True, False])
def test_compiles(name: str, arch: int, new: bool) -> None:
    """Down to machine code, in the sizes of Qwen3-Next."""
    pytest.importorskip("triton")
    kernel = getattr(importlib.import_module("phalanx.kernels.gated_delta.verified"), name)
    kinds = {
        "slots": "*i64", "starts": "*i32", "lengths": "*i32", "kv_slots": "*i64", "rows": "i32", "channels": "i32", "pitch": "i32",
        "slot_pitch": "i32", "z_pitch": "i32", "ba_pitch": "i32", "eps": "fp32", "scale": "fp32",
        **dict.fromkeys(("tails", "state", "pending", "a_log", "dt_bias"), "*fp32"),
    }  # fmt: skip
    sizes = {
        "HEADS": 32, "RATIO": 2, "KEYS": 128, "VALUES": 128, "WIDE_KEYS": 128, "WIDE_VALUES": 128, "EPS": 1e-6, "TAPS": TAPS,
        "BLOCK": 256, "KEPT": DRAFTS + 1, "NEW": new,
    }  # fmt: skip
    constants = {argument: value for argument, value in sizes.items() if argument in kernel.arg_names}
    compiled(kernel, {argument: kinds.get(argument, "*bf16") for argument in kernel.arg_names}, constants, arch)


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check_drafts(launched, dtype, "cuda", GatedDelta((), 16, 32, 128, 128, conv=4), absent=2)

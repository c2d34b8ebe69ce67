# SPDX-License-Identifier: Apache-2.0
"""Decode rows that are drafts leave the outputs of all tokens as they are without: in plain torch, and by the kernels in Triton's
interpreter; and the kernel compiles for three generations of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.config.mamba import Mamba2
from phalanx.kernels.gated_delta.reference import StateRows
from phalanx.kernels.mamba2 import reference
from phalanx.kernels.mamba2.dispatch import launched
from phalanx.kernels.mamba2.reference import MambaStates
from tests.support.kernels_compiled import by_generation, compiled
from tests.support.kernels_drafts import DRAFTS, LENGTH, require_alike
from tests.support.kernels_interpreted import interpret
from tests.support.kernels_mamba2 import SIZES, inputs, weights

pytestmark = pytest.mark.usefixtures("forked_python")


def check_drafts(
    rule: Callable[..., Tensor], dtype: torch.dtype, device: str = "cpu", sizes: Mamba2 = SIZES, seed: int = 0, absent: int = 0
) -> None:
    """As `tests.support.kernels_drafts`."""
    torch.manual_seed(seed)
    sizes, own = replace(sizes, drafts=DRAFTS), weights(sizes, dtype, device)
    states = states_of(2, sizes, device)
    pending = torch.full((2, sizes.heads, sizes.kept + 1), float("nan"), device=device)
    texts = [(inputs(LENGTH, sizes, dtype),) for _ in range(3)]
    wanted = [without_drafts(text, sizes, dtype) for (text,) in texts]

    def run(parts: Sequence[Tensor], rows: StateRows) -> Tensor:
        return rule(parts[0], sizes, own, states, rows, pending)

    require_alike(texts, wanted, lambda count: (inputs(count, sizes, dtype),), run, dtype, device, seed, absent)


def states_of(slots: int, sizes: Mamba2, device: str = "cpu") -> MambaStates:
    inner, of_b, of_c = sizes.sections
    shapes = (sizes.conv_rows, inner), (sizes.conv_rows, of_b + of_c), (sizes.heads, sizes.state_dim, sizes.head_dim)
    return MambaStates(*(torch.full((slots, *shape), float("nan"), device=device) for shape in shapes))


def without_drafts(mixed: Tensor, sizes: Mamba2, dtype: torch.dtype) -> Tensor:
    plain = replace(sizes, drafts=0)
    rows = StateRows(
        torch.tensor([0]), torch.tensor([0, LENGTH]), torch.tensor([LENGTH]), torch.ones(LENGTH).long(), 0, 1, [0, LENGTH], [LENGTH]
    )
    return reference.mamba2(mixed, plain, weights(plain, dtype), states_of(1, plain), rows)


@pytest.mark.parametrize("seed", range(4))
def test_in_plain_torch(seed: int) -> None:
    check_drafts(reference.mamba2, torch.float32, seed=seed)


def test_a_rejected_draft_that_was_taken_in_is_seen() -> None:
    """The test above can fail: where a step takes in all tokens of the one before."""

    def careless(*arguments: Tensor) -> Tensor:
        arguments[-1][:, :, -1] -= 1.0
        return reference.mamba2(*arguments)  # type: ignore[arg-type]

    with pytest.raises((AssertionError, RuntimeError)):
        check_drafts(careless, torch.float32)


def check_kernels() -> None:
    check_drafts(launched, torch.float32, seed=1, absent=2)
    check_drafts(launched, torch.bfloat16)


def test_in_the_interpreter() -> None:
    interpret([check_kernels])


@pytest.mark.parametrize(("name", "arch"), by_generation(["_mamba_verify"], set()))
@pytest.mark.parametrize("new", [True, False])
def test_compiles(name: str, arch: int, new: bool) -> None:
    """Down to machine code, in the sizes of Granite-4.0-h-small."""
    pytest.importorskip("triton")
    from phalanx.kernels.mamba2 import verified

    kernel = getattr(verified, name)
    kinds = {
        "slots": "*i64", "starts": "*i32", "lengths": "*i32", "kv_slots": "*i64", "rows": "i32", "z_pitch": "i32",
        "step_pitch": "i32", **dict.fromkeys(("state", "pending", "a_log", "skip", "dt_bias", "out"), "*fp32"),
    }  # fmt: skip
    sizes = {
        "HEADS": 128, "GROUPS": 1, "STATE": 128, "VALUES": 64, "WIDE_STATE": 128, "WIDE_VALUES": 64, "KEPT": DRAFTS + 1, "NEW": new,
    }  # fmt: skip
    constants = {argument: value for argument, value in sizes.items() if argument in kernel.arg_names}
    compiled(kernel, {argument: kinds.get(argument, "*bf16") for argument in kernel.arg_names}, constants, arch)


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check_drafts(launched, dtype, "cuda", Mamba2((), heads=128, head_dim=64, groups=1, state_dim=128, conv=4), absent=2)

# SPDX-License-Identifier: Apache-2.0
"""The kernels of Mamba-2: in Triton's interpreter against the reference, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.config.gated_delta import CHUNK
from phalanx.config.mamba import Mamba2
from phalanx.kernels.gated_delta.reference import StateRows
from phalanx.kernels.mamba2 import reference
from phalanx.kernels.mamba2.dispatch import launched
from tests.support.kernels_compiled import by_generation, compiled
from tests.support.kernels_interpreted import interpret
from tests.support.kernels_mamba2 import SIZES, Requests, inputs

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

STEPS = [{0: 3}, {1: 70}, {0: 1, 1: 2}, {0: 1, 1: 1}, {1: 1, 0: 66}]
"""Of each: slot -> its next tokens. Rows begin, go on, and end in a chunk and at its end."""


def run_steps(dtype: torch.dtype, device: str = "cpu", sizes: Mamba2 = SIZES, **padding: Any) -> None:
    torch.manual_seed(0)
    requests, plain = Requests(2, sizes, dtype, device), Requests(2, sizes, dtype)
    for step in STEPS:
        rows = [(slot, inputs(count, sizes, dtype)) for slot, count in step.items()]
        outs, wanted = requests.step(launched, rows, **padding), plain.step(reference.mamba2, rows)
        pairs = list(zip(outs, wanted, strict=True))
        pairs += [(own[slot], other[slot]) for own, other in zip(requests.states, plain.states, strict=True) for slot in step]
        for out, want in pairs:
            if dtype == torch.float32:
                torch.testing.assert_close(out.cpu(), want, rtol=2e-4, atol=2e-4)
            else:
                error = (out.cpu() - want).norm() / want.norm()
                assert error < 0.01, error


def check_steps() -> None:
    run_steps(torch.bfloat16)


def check_steps_of_a_fixed_batch() -> None:
    """Rows that are none, and tokens of no row, leave the state at slot 0 as it is."""
    run_steps(torch.float32, padding=5, absent=(2, 1))


def check_padded_decode_rows_change_no_state() -> None:
    torch.manual_seed(1)
    requests = Requests(2)
    requests.step(launched, [(0, inputs(5))])
    before, ones = [state.clone() for state in requests.states], torch.ones(2, dtype=torch.int32)
    rows = StateRows(
        torch.zeros(2, dtype=torch.int64), torch.arange(3, dtype=torch.int32), ones, -torch.ones(2).long(), 2, 0, [], []
    )
    launched(inputs(2), SIZES, requests.weights, requests.states, rows)
    for state, wanted in zip(requests.states, before, strict=True):
        torch.testing.assert_close(state, wanted, rtol=0, atol=0, equal_nan=True)


CHECKS = [check_steps, check_steps_of_a_fixed_batch, check_padded_decode_rows_change_no_state]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


REAL = Mamba2((), heads=128, head_dim=64, groups=1, state_dim=128, conv=4)
ROWS = {"slots": "*i64", "starts": "*i32", "lengths": "*i32", "kv_slots": "*i64"}
FP32 = {"state", "a_log", "skip", "dt_bias", "out"}
_SIZES = {
    "HEADS": REAL.heads, "GROUPS": REAL.groups, "STATE": 128, "VALUES": 64, "WIDE_STATE": 128, "WIDE_VALUES": 64, "SCANNED": 32,
    "CHUNK": CHUNK,
}  # fmt: skip


@pytest.mark.parametrize(("name", "arch"), by_generation(["_decode", "_scan"], ["_decode", "_scan"]))
def test_compiles(name: str, arch: int) -> None:
    """Down to machine code, in the sizes of Granite-4.0-h-small."""
    from phalanx.kernels.mamba2 import scan

    kernel, kinds = getattr(scan, name), {}
    for argument in kernel.arg_names:
        kinds[argument] = "i32" if argument.endswith("pitch") else ROWS.get(argument, "*fp32" if argument in FP32 else "*bf16")
    compiled(kernel, kinds, {argument: value for argument, value in _SIZES.items() if argument in kernel.arg_names}, arch)


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    run_steps(dtype, "cuda", REAL)
    run_steps(dtype, "cuda", padding=5, absent=(2, 1))

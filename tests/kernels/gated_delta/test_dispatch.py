# SPDX-License-Identifier: Apache-2.0
"""The kernels of the gated delta rule and of gated outputs: in Triton's interpreter against the reference, and compiled for three
generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from phalanx.config.gated_delta import GatedDelta
from phalanx.kernels.gated_delta import reference
from phalanx.kernels.gated_delta.dispatch import launched
from phalanx.kernels.gated_delta.reference import CHUNK, StateRows, max_chunk_rows
from tests.support.kernels_compiled import by_generation, compiled, compiled_as
from tests.support.kernels_gated_delta import HEADS, TAPS, Requests, inputs
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

STEPS = [{0: 3}, {1: 70}, {0: 1, 1: 2}, {0: 1, 1: 1}, {1: 1, 0: 66}]
"""Of each: slot -> its next tokens. Rows begin, go on, and end in a chunk and at its end."""


def close(out: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """In bf16 a norm enlarges the error of what is nearly 0: all of them together are close."""
    if dtype == torch.float32:
        torch.testing.assert_close(out, wanted, rtol=2e-4, atol=2e-4)
    else:
        error = (out.float() - wanted.float()).norm() / wanted.float().norm()
        assert error < 0.015, error


def both(dtype: torch.dtype, device: str = "cpu", heads: GatedDelta = HEADS) -> list[Requests]:
    return [Requests(2, heads, dtype, device), Requests(2, heads, dtype)]


def run_steps(dtype: torch.dtype, device: str = "cpu", heads: GatedDelta = HEADS, **padding: Any) -> None:
    torch.manual_seed(0)
    requests, plain = both(dtype, device, heads)
    for step in STEPS:
        rows = [(slot, *inputs(count, heads, dtype)) for slot, count in step.items()]
        outs, wanted = requests.step(launched, rows, **padding), plain.step(reference.gated_delta, rows)
        for out, want in zip(outs, wanted, strict=True):
            close(out.cpu(), want, dtype)
        for slot in step:
            close(requests.state[slot].cpu(), plain.state[slot], dtype)
            close(requests.conv[slot].cpu(), plain.conv[slot], dtype)


def check_steps() -> None:
    run_steps(torch.bfloat16)


def check_steps_of_a_fixed_batch() -> None:
    """Rows that are none, and tokens of no row, leave the state at slot 0 as it is."""
    run_steps(torch.float32, padding=5, absent=(2, 1))


def check_states_in_several_tiles() -> None:
    from phalanx.kernels.gated_delta import recurrent

    with mock.patch.object(recurrent, "TILING", recurrent.TILING._replace(values=8)):
        run_steps(torch.float32)


def check_padded_decode_rows_change_no_state() -> None:
    torch.manual_seed(1)
    requests, _ = both(torch.float32)
    requests.step(launched, [(0, *inputs(5))])
    state, conv = requests.state.clone(), requests.conv.clone()
    (mixed, ba), ones = inputs(2), torch.ones(2, dtype=torch.int32)
    rows = StateRows(
        torch.zeros(2, dtype=torch.int64), torch.arange(3, dtype=torch.int32), ones, -torch.ones(2).long(), 2, 0, [], []
    )
    launched(mixed, ba, requests.heads, requests.weights, requests.conv, requests.state, rows)
    torch.testing.assert_close(requests.state, state, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(requests.conv, conv, rtol=0, atol=0, equal_nan=True)


def check_equal_keys_do_not_cancel() -> None:
    """As the reference's test: equal keys that overwrite each other make a system of ones, which no sum of its powers solves."""

    torch.manual_seed(3)
    mixed, ba = inputs(2 * CHUNK)
    width = HEADS.key_heads * HEADS.key_dim
    mixed[:, width : 2 * width] = 1.0
    ba[:, : HEADS.value_heads], ba[:, HEADS.value_heads :] = 20.0, -40.0
    requests, plain = both(torch.float32)
    out, wanted = requests.step(launched, [(0, mixed, ba)]), plain.step(reference.gated_delta, [(0, mixed, ba)])
    torch.testing.assert_close(out[0], wanted[0], rtol=2e-4, atol=2e-4)


def check_gated_outputs() -> None:
    from phalanx.kernels.gated_delta.output_gate import sigmoid_mul

    torch.manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16):
        x, columns = torch.randn(3, 1100).to(dtype), torch.randn(3, 1500).to(dtype)
        for gate in (columns[:, 400:], columns[:, :1]):
            torch.testing.assert_close(sigmoid_mul(x, gate), reference.sigmoid_mul(x, gate), rtol=1e-2, atol=1e-6)


CHECKS = [
    check_steps, check_steps_of_a_fixed_batch, check_states_in_several_tiles, check_padded_decode_rows_change_no_state,
    check_equal_keys_do_not_cancel, check_gated_outputs,
]  # fmt: skip


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


REAL = GatedDelta((), 16, 32, 128, 128, conv=4)
ROWS = {"slots": "*i64", "starts": "*i32", "lengths": "*i32", "kv_slots": "*i64", "rows": "i32"}
_SIZES = {
    "HEADS": REAL.value_heads, "RATIO": REAL.ratio, "KEYS": 128, "VALUES": 128, "WIDE_KEYS": 128, "WIDE_VALUES": 128, "EPS": 1e-6,
    "CHUNK": CHUNK, "NEAR": 16, "MOST": max_chunk_rows(1), "SCANNED": 32, "TAPS": TAPS, "BLOCK": 256, "TOKENS": 16, "ONE": False,
    "MOST_HEADS": REAL.value_heads, "BIAS": True, "TILE": 64, "STAGES": 2,
}  # fmt: skip
FP32 = {"tails", "state", "a_log", "dt_bias", "decays"}
KERNELS = {
    "_conv_decode": "causal_conv", "_conv_prefill": "causal_conv", "_keep_tails": "causal_conv", "_delta_decode": "recurrent",
    "_prepare": "chunked", "_scan": "chunked", "_norm_and_gate": "chunked", "_sigmoid_mul": "output_gate",
}  # fmt: skip


@pytest.mark.parametrize(("name", "arch"), by_generation(list(KERNELS), {"_prepare", "_scan"}))
def test_compiles(name: str, arch: int) -> None:
    """Down to machine code, in the sizes of Qwen3-Next."""
    import importlib

    kernel = getattr(importlib.import_module(f"phalanx.kernels.gated_delta.{KERNELS[name]}"), name)
    kinds = {}
    for argument in kernel.arg_names:
        if argument in ("eps", "scale"):
            kinds[argument] = "fp32"
        elif argument in ("pitch", "slot_pitch", "z_pitch", "ba_pitch", "channels", "width"):
            kinds[argument] = "i32"
        else:
            kinds[argument] = ROWS.get(argument, "*fp32" if argument in FP32 else "*bf16")
    constants = {argument: value for argument, value in _SIZES.items() if argument in kernel.arg_names}
    if name == "_scan" and arch == 90:
        from phalanx.kernels.gated_delta.chunked import SCAN_BYTES

        aligned = [argument for argument in kernel.arg_names if kinds[argument].startswith("*")]
        launched = compiled_as(kernel, kinds, constants | {"SM": arch}, arch, aligned=aligned, num_warps=4, num_stages=2)
        assert launched.metadata.shared <= SCAN_BYTES
        return
    compiled(kernel, kinds, constants, arch)


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    run_steps(dtype, "cuda", REAL)
    run_steps(dtype, "cuda", padding=5, absent=(2, 1))

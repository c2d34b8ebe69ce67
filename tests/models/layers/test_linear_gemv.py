# SPDX-License-Identifier: Apache-2.0
"""Models whose products of one token do what follows them: in Triton's interpreter, beside the same models without. On CPU outside
of it, and for more tokens, no kernel takes them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from phalanx.comm.group import Solo
from phalanx.config.quantization import ON_LOAD
from phalanx.kernels.gemm import gemv_fused, heuristics
from phalanx.kernels.scaled_tensors import FP8, Quantized
from phalanx.models.layers.linear import MergedColumnParallelLinear
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint
from tests.support.kernels_interpreted import interpreted
from tests.support.models_formation import CPU, Formation

pytest.importorskip("triton")

SEAT = LayerContext(Solo(), torch.bfloat16, CPU)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "std": 0.15}


def merged(context: LayerContext, *, bias: bool = False) -> MergedColumnParallelLinear:
    return MergedColumnParallelLinear(["gate_proj", "up_proj"], 32, 64, what="inner", bias=bias, context=context)


def test_what_a_layer_gives() -> None:
    x, layer = torch.randn(1, 32, dtype=torch.bfloat16), merged(SEAT, bias=True)
    found = layer.gemv_args(x)
    assert found is not None
    assert found.x is x
    assert found.weight is layer.weight
    assert found.bias is layer.bias
    assert (found.x_scale, found.scale, found.dtype) == (None, None, torch.bfloat16)
    assert layer.gemv_args(torch.randn(2, 32)) is None


@pytest.mark.parametrize("static", [False, True])
def test_what_a_layer_in_fp8_gives(static: bool) -> None:
    quantization = replace(ON_LOAD, activations="static" if static else "token")
    layer = merged(replace(SEAT, quantization=quantization, fp8_gemm=True))
    quantized = Quantized(torch.zeros(1, 32, dtype=FP8), torch.ones(1, 1))
    found = layer.gemv_args(quantized)
    assert found is not None
    assert found.x is quantized.values
    assert found.x_scale is quantized.scale
    assert found.scale is layer.fp8.weight_scale
    plain = layer.gemv_args(torch.zeros(1, 32, dtype=torch.bfloat16))
    assert plain is not None
    assert plain.x_scale is layer.fp8.input_scale
    assert merged(replace(SEAT, quantization=quantization, fp8_gemm=False)).gemv_args(quantized) is None


def test_a_cpu_has_no_such_kernels() -> None:
    found = merged(SEAT).gemv_args(torch.zeros(1, 32, dtype=torch.bfloat16))
    assert found is not None
    assert gemv_fused.tiling_of(found) is None
    assert gemv_fused.gate_up_silu(found) is None
    nothing = torch.zeros(0)
    assert gemv_fused.qkv_rope_store(found, nothing, nothing, nothing, nothing, nothing, 1) is None


def check(family: str, fused: int, **options: bool) -> None:
    """A prompt, a step of one token and one of two, with kernels for one token and without: `fused` products of the former."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "m", family, **SIZES)
        prompt, after = torch.randint(0, 384, (9,)), torch.randint(0, 384, (3,))
        logits = []
        for pairs in (None, heuristics.FusedGemvTiling(16, 64, 4)):
            with mock.patch.object(gemv_fused, "tiling_of", return_value=pairs) as asked:
                model = Formation(path, **options)
                model.step([(0, prompt)])
                assert not asked.called
                logits.append([model.step([(0, after[:1])])[0], model.step([(0, after[1:])])[0]])
                assert asked.call_count == fused
        for one, two in zip(*logits, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=5e-2 if options else 1e-4)


def check_all() -> None:
    torch.manual_seed(0)
    check("llama", 4)
    check("qwen2", 4)  # has a bias
    check("qwen3", 2)  # norms its heads
    check("llama", 2, fp8=True, fp8_gemm=True)
    check("llama", 0, fp8=True, fp8_gemm=False)
    with mock.patch.object(heuristics, "WIDEST_TO_QUANTIZE", 100):  # which the intermediate size is beyond
        check("llama", 4, fp8=True, fp8_gemm=True)
        check("qwen2", 4, fp8=True, fp8_gemm=True, fp8_cache=True)


def test_models_in_the_interpreter() -> None:
    assert interpreted("tests.models.layers.test_linear_gemv").strip() == "checked"


if __name__ == "__main__":
    check_all()
    print("checked")

# SPDX-License-Identifier: Apache-2.0
"""Models whose GEMVs are fused with the op behind them: in Triton's interpreter, beside the same models without. On CPU outside of
it, and for more tokens, no kernel takes them."""

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
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint
from tests.support.kernels_interpreted import interpret
from tests.support.models_formation import CPU, Formation
from tests.support.models_layers import merged

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

CONTEXT = LayerContext(Solo(), torch.bfloat16, CPU)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "std": 0.15}


def test_the_operands_of_a_layer() -> None:
    x, layer = torch.randn(1, 32, dtype=torch.bfloat16), merged(CONTEXT, bias=True)
    args = layer.gemv_args(x)
    assert args is not None
    assert args.x is x
    assert args.weight is layer.method.weight
    assert args.bias is layer.bias
    assert (args.x_scale, args.scale, args.dtype) == (None, None, torch.bfloat16)
    assert layer.gemv_args(torch.randn(2, 32)) is None


@pytest.mark.parametrize("static", [False, True])
def test_the_operands_of_a_layer_in_fp8(static: bool) -> None:
    quantization = replace(ON_LOAD, activations="static" if static else "token")
    layer = merged(replace(CONTEXT, quantization=quantization, fp8_gemm=True))
    quantized = Quantized(torch.zeros(1, 32, dtype=FP8), torch.ones(1, 1))
    args = layer.gemv_args(quantized)
    assert args is not None
    assert args.x is quantized.values
    assert args.x_scale is quantized.scale
    assert args.scale is layer.method.weight_scale
    plain = layer.gemv_args(torch.zeros(1, 32, dtype=torch.bfloat16))
    assert plain is not None
    assert plain.x_scale is layer.method.input_scale
    assert merged(replace(CONTEXT, quantization=quantization, fp8_gemm=False)).gemv_args(quantized) is None


def test_a_cpu_has_no_such_kernels() -> None:
    args = merged(CONTEXT).gemv_args(torch.zeros(1, 32, dtype=torch.bfloat16))
    assert args is not None
    assert gemv_fused._select(args) is None
    assert gemv_fused.gate_up_silu(args) is None
    nothing = torch.zeros(0)
    assert gemv_fused.qkv_rope_store(args, nothing, nothing, nothing, nothing, nothing, 1) is None


def check(family: str, fused: int, **options: bool) -> None:
    """A prompt, a step of one token and one of two, with and without fused GEMVs: `fused` of them run."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "m", family, **SIZES)
        prompt, after = torch.randint(0, 384, (9,)), torch.randint(0, 384, (3,))
        logits = []
        for tiling in (None, heuristics.FusedGemvTiling(16, 64, 4)):
            with mock.patch.object(gemv_fused, "_select", return_value=tiling) as select:
                model = Formation(path, **options)
                model.step([(0, prompt)])
                assert not select.called
                logits.append([model.step([(0, after[:1])])[0], model.step([(0, after[1:])])[0]])
                assert select.call_count == fused
        for one, two in zip(*logits, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=5e-2 if options else 1e-4)


def check_all() -> None:
    torch.manual_seed(0)
    check("llama", 4)
    check("qwen2", 4)  # has a bias
    check("qwen3", 2)  # normalizes its heads
    check("llama", 2, quantization=ON_LOAD, fp8_gemm=True)
    check("llama", 0, quantization=ON_LOAD, fp8_gemm=False)
    with mock.patch.object(heuristics, "GEMV_QUANT_MAX_INPUTS", 100):  # which the intermediate size is beyond
        check("llama", 4, quantization=ON_LOAD, fp8_gemm=True)
        check("qwen2", 4, quantization=ON_LOAD, fp8_gemm=True, kv_cache_dtype="fp8")


def test_models_in_the_interpreter() -> None:
    interpret([check_all])

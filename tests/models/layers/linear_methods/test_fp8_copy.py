# SPDX-License-Identifier: Apache-2.0
"""Copies in FP8 of checkpoints in 4 bits: each row of each dense layer is that of the checkpoint, rounded to e4m3 once."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.errors import WeightError
from phalanx.kernels.reference import quantize_fp8
from phalanx.layout import Layout
from phalanx.layout.families import layer_tensors
from phalanx.layout.weights import layer_bytes, stored_in
from phalanx.models import registry, weights
from phalanx.models.decoder import Decoder
from phalanx.models.layers.expert_methods.packed import PackedExperts
from phalanx.models.layers.linear_methods.fp8_copy import Fp8Copy
from phalanx.models.layers.linear_methods.unquantized import Unquantized
from phalanx.models.slices import LayerContext
from tests.support import int4_checkpoints, nvfp4_checkpoints
from tests.support.checkpoints import write_checkpoint
from tests.support.models_formation import CPU, Formation

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2,
    "std": 0.08,
}  # fmt: skip
FORMS = {
    **{name: int4_checkpoints.FORMS[name] for name in ("packed 64 with zeros", "awq", "gptq desc_act (T3)", "packed channel")},
    **{name: nvfp4_checkpoints.FORMS[name] for name in ("compressed-tensors", "modelopt")},
}  # fmt: skip
IDS = torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))


def build(folder: Path, group: Group | None = None) -> Decoder:
    shape = ModelShape.from_folder(folder)
    context = LayerContext(group or Solo(), torch.float32, CPU, quantization=ON_LOAD)
    model = registry.build(shape, range(shape.num_layers), context)
    weights.load(model, folder)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_the_checkpoint_rounded_once(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = write_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16, **SIZES)
    stored, meant = int4_checkpoints.rewrite(plain, tmp_path, FORMS[form])
    tensors = load_file(meant / "model.safetensors")
    with caplog.at_level("INFO"):
        layers = build(stored).layers
    assert any("to FP8 while they are read" in message for message in caplog.messages)
    assert isinstance(layers[1].mlp.down_proj.method, Unquantized)
    attention = layers[0].self_attn
    for linear, parts in (
        (attention.qkv_proj, [f"self_attn.{part}_proj" for part in "qkv"]), (attention.o_proj, ["self_attn.o_proj"]),
        (layers[0].mlp.down_proj, ["mlp.down_proj"]),
    ):  # fmt: skip
        method = linear.method
        assert isinstance(method, Fp8Copy)
        values = torch.cat([tensors[f"model.layers.0.{part}.weight"] for part in parts])
        scale = quantize_fp8(values)[1]
        error = (method.dequantized(torch.float32) - values).abs()
        assert bool((error <= torch.maximum(values.abs() / 16, scale / 1024) * 1.001).all()), "half a step of e4m3"
        assert float(error.max()) > 0
        assert method._source is None, "what the checkpoint holds is free"


def test_over_ranks_and_what_the_planner_counts(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16, **SIZES)
    stored, meant = int4_checkpoints.rewrite(plain, tmp_path, FORMS["packed 64 with zeros"])
    expected = Formation(meant).step([(0, IDS)])[0].log_softmax(-1)
    for tp, pp in ((1, 1), (2, 2), (4, 1)):
        actual = Formation(stored, tp=tp, pp=pp, quantization=ON_LOAD).step([(0, IDS)])[0].log_softmax(-1)
        assert 1e-7 < float((expected.exp() * (expected - actual)).sum(-1).mean()) < 2e-2
    shape = ModelShape.from_folder(stored)
    for tp in (1, 2):
        own = LocalWorld(tp).run(lambda group: build(stored, group).layers[0])[0]
        assert layer_bytes(shape, 0, "fp8", Layout(tp=tp)) - _norms(own) == sum(
            parameter.nbytes for name, parameter in own.named_parameters() if "norm" not in name
        )  # fmt: skip
    formation = Formation(stored, quantization=ON_LOAD)
    formation.randomize(3)
    assert bool(torch.isfinite(formation.step([(0, IDS)])[0]).all())


@pytest.mark.parametrize("form", ["awq", "modelopt"])
def test_a_read_behind_one_that_failed(form: str, tmp_path: Path) -> None:
    """New weights of a running engine, where the first folder has a bad tensor in a layer."""
    plain = write_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16, **SIZES)
    stored, _ = int4_checkpoints.rewrite(plain, tmp_path, FORMS[form])
    expected, model = build(stored).state_dict(), build(stored)
    broken = shutil.copytree(stored, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = "model.layers.0.mlp.up_proj." + {"awq": "scales", "modelopt": "weight_scale"}[form]
    tensors[name] = torch.full(tensors[name].shape, math.nan).to(tensors[name].dtype)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(WeightError, match="NaN"):
        weights.load(model, broken)
    weights.load(model, stored)
    for name, values in model.state_dict().items():
        assert torch.equal(values.float(), expected[name].float()), name


def _norms(layer: torch.nn.Module) -> int:
    """Bytes of the norms as the planner counts them beside FP8: in 16 bit, here in fp32."""
    return sum(parameter.nbytes // 2 for name, parameter in layer.named_parameters() if "norm" in name)


def test_experts_stay_in_4_bits(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 384,
        "num_experts": 4, "num_experts_per_tok": 2, "std": 0.08,
    }  # fmt: skip
    plain = write_checkpoint(tmp_path / "plain", "qwen3_moe", dtype=torch.bfloat16, **sizes)
    stored, _ = int4_checkpoints.rewrite(plain, tmp_path, int4_checkpoints.FORMS["packed 32"])
    layer = build(stored).layers[0]
    assert isinstance(layer.self_attn.o_proj.method, Fp8Copy)
    assert isinstance(layer.mlp.experts.method if hasattr(layer.mlp.experts, "method") else layer.mlp.experts, PackedExperts)
    shape = ModelShape.from_folder(stored)
    kinds = {tensor.gemm: stored_in(shape, tensor, "fp8") for tensor in layer_tensors(shape, 0) if tensor.gemm}
    assert kinds["experts_down"] == "INT4"
    assert "FP8" in kinds.values()

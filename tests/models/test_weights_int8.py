# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in int8 with activations in int8, of compressed-tensors: every layer computes what the tool's arithmetic gives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.errors import ModelError
from phalanx.kernels.int8_mm import int8_mm
from phalanx.layout import Layout
from phalanx.layout.weights import layer_bytes
from phalanx.models import registry, weights
from phalanx.models.batch import DpTokens
from phalanx.models.decoder import Decoder
from phalanx.models.layers.linear_methods.int8 import Int8
from phalanx.models.layers.moe import SparseMoe
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint
from tests.support.int4_checkpoints import IGNORED, Encoded, Form, rewrite
from tests.support.models_formation import CPU, Formation

compressed_tensors = pytest.importorskip("compressed_tensors")

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "std": 0.15,
}  # fmt: skip
IDS = torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))


def config(*, dynamic: bool, strategy: str = "channel") -> dict[str, Any]:
    args = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False, "observer": "minmax"}
    inputs = {**args, "dynamic": dynamic, "strategy": "token" if dynamic else "tensor"}
    scheme = {"targets": ["Linear"], "weights": args, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head", IGNORED],
        "config_groups": {"group_0": scheme}, "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def encode(form: Form, weight: Tensor, name: str) -> Encoded:
    """By the tool's own functions. Layers of one input have scales of it that differ, of which the largest counts."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    scheme = form.config["config_groups"]["group_0"]
    args, dims = QuantizationArgs(**scheme["weights"]), -1 if scheme["weights"]["strategy"] == "channel" else None
    scale = (weight.abs().amax(dims, keepdim=True) if dims else weight.abs().amax().reshape(1)) / 127.5
    zero = torch.zeros_like(scale)
    stored = quantize(weight, scale, zero, args, dtype=torch.int8)
    tensors = {"weight": stored, "weight_scale": scale.bfloat16()}
    if not (scheme["input_activations"] or {}).get("dynamic", True):
        tensors["input_scale"] = (0.02 + weight.abs().mean() / 100).reshape(1)
    return tensors, dequantize(stored, scale.bfloat16().float(), zero, args)


FORMS = {
    "dynamic": Form(config(dynamic=True), encode, -1), "static": Form(config(dynamic=False), encode, -1),
    "dynamic, one scale": Form(config(dynamic=True, strategy="tensor"), encode, -1),
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    plain = write_checkpoint(tmp_path_factory.mktemp("plain"), "qwen2", dtype=torch.bfloat16, **SIZES)
    return {name: rewrite(plain, tmp_path_factory.mktemp("form"), form) for name, form in FORMS.items()}


def build(folder: Path) -> Decoder:
    shape = ModelShape.from_folder(folder)
    model = registry.build(shape, range(shape.num_layers), LayerContext(Solo(), torch.float32, CPU))
    weights.load(model, folder)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_layers_compute_what_the_tool_computes(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    """Input and weight quantized and dequantized by the tool, and multiplied: equal but for the order of sums in fp32."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    stored, meant = written[form]
    args = QuantizationArgs(**FORMS[form].config["config_groups"]["group_0"]["input_activations"])
    quantized, plain = build(stored).layers[0], build(meant).layers[0]
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(2))
    x[3] = 0.0
    for layer, reference in (
        (quantized.self_attn.qkv_proj, plain.self_attn.qkv_proj),
        (quantized.mlp.gate_up_proj, plain.mlp.gate_up_proj),
    ):
        method = layer.method
        assert isinstance(method, Int8)
        scale = method.input_scale
        if scale is None:
            scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        faked = fake_quantize(x, scale.reshape(-1, 1) if args.dynamic else scale.reshape(1), torch.zeros(1), args)
        expected = faked.double() @ reference.method.weight.double().t()
        torch.testing.assert_close(method.multiply(x).double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(method.plain_multiply(x).double(), expected, rtol=1e-5, atol=1e-6)
        assert (method.multiply(x) - x @ reference.method.weight.t()).abs().max() > 1e-4, "activations are quantized, too"


@pytest.mark.parametrize("form", ["dynamic", "dynamic, one scale"])
def test_over_ranks_and_stages_it_stays_near_the_model_that_is_meant(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    stored, meant = written[form]
    expected = Formation(meant).step([(0, IDS)])[0].log_softmax(-1)
    for tp, pp in ((1, 1), (2, 2)):
        actual = Formation(stored, tp=tp, pp=pp).step([(0, IDS)])[0].log_softmax(-1)
        assert float((expected.exp() * (expected - actual)).sum(-1).mean()) < 0.01


def test_dummy_weights_and_the_planner(written: dict[str, tuple[Path, Path]]) -> None:
    formation = Formation(written["dynamic"][0])
    formation.randomize(3)
    assert bool(torch.isfinite(formation.step([(0, IDS)])[0]).all())
    layer = formation.models[0][0].layers[0]
    assert float(layer.mlp.down_proj.method.dequantized().std()) == pytest.approx(96**-0.5, rel=0.05)
    own = sum(parameter.nbytes for parameter in layer.parameters())
    assert layer_bytes(formation.shape, 0, "fp32", Layout()) == own


EXPERTS: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 96, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "std": 0.15,
}  # fmt: skip


def moe_block(folder: Path, group: Group, moe_ep: int = 1, dp: Group | None = None) -> SparseMoe:
    shape = ModelShape.from_folder(folder)
    context = LayerContext(group, torch.float32, CPU, moe_ep=moe_ep, dp=dp or Solo())
    model = registry.build(shape, range(shape.num_layers), context)
    weights.load(model, folder)
    block = model.layers[0].mlp
    assert isinstance(block, SparseMoe)
    return block


@pytest.mark.parametrize("form", FORMS)
def test_experts_compute_what_the_tool_computes(form: str, tmp_path: Path) -> None:
    """Each projection's input and weight quantized and dequantized by the tool, over experts split by number; split by columns,
    ranks have scales of their own for a token's inner features, and stay near."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    plain = write_checkpoint(tmp_path / "plain", "qwen3_moe", dtype=torch.bfloat16, **EXPERTS)
    stored, meant = rewrite(plain, tmp_path, FORMS[form])
    args = QuantizationArgs(**FORMS[form].config["config_groups"]["group_0"]["input_activations"])
    alone, values = moe_block(stored, Solo()), load_file(meant / "model.safetensors")
    tensors = alone.tensors()
    assert tensors.int8

    def faked(x: Tensor, static: Tensor | None) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30) if static is None else static.reshape(1)
        return fake_quantize(x, scale, torch.zeros(1), args).double()

    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(2))
    routing = alone.route(x)
    expected = torch.zeros(7, 64, dtype=torch.float64)
    for expert in range(4):
        gate, up, down = (
            values[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"].double() for part in ("gate", "up", "down")
        )  # fmt: skip
        inputs = faked(x, tensors.input_scale)
        inner = (torch.nn.functional.silu(inputs @ gate.t()) * (inputs @ up.t())).float()
        weight = (routing.weights * (routing.ids == expert)).sum(1, keepdim=True).double()
        expected += weight * (faked(inner, tensors.inner_scale) @ down.t())
    torch.testing.assert_close(alone.partial_sum(x).double(), expected, rtol=1e-3, atol=2e-3)
    for tp, moe_ep in ((2, 2), (4, 4), (2, 1), (4, 2)):
        parts = LocalWorld(tp).run(lambda group, moe_ep=moe_ep: moe_block(stored, group, moe_ep).partial_sum(x))
        total = torch.stack(parts).sum(0)
        if tp == moe_ep or form == "static":
            torch.testing.assert_close(total, alone.partial_sum(x), rtol=1e-3, atol=1e-3)
        else:
            assert (total - alone.partial_sum(x)).norm() < 0.02 * total.norm()
    blocks = LocalWorld(2).run(lambda dp: moe_block(stored, Solo(), dp=dp))
    counts = 5, 2
    sums = LocalWorld(2).run(lambda dp: blocks[dp.rank].exchanged(x.split(counts)[dp.rank], DpTokens.of(counts)))
    bound = 0.05 if form == "static" else 1e-3  # a static scale of dp indices is of their own experts
    torch.testing.assert_close(torch.cat(sums), alone.partial_sum(x), rtol=1e-3, atol=bound)


def test_models_with_experts_stay_near_what_is_meant(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "qwen3_moe", dtype=torch.bfloat16, **EXPERTS)
    stored, meant = rewrite(plain, tmp_path, FORMS["dynamic"])
    expected = Formation(meant).step([(0, IDS)])[0].log_softmax(-1)
    for tp, moe_ep, pp in ((1, 1, 1), (2, 2, 2), (4, 2, 1)):
        actual = Formation(stored, tp=tp, moe_ep=moe_ep, pp=pp).step([(0, IDS)])[0].log_softmax(-1)
        assert float((expected.exp() * (expected - actual)).sum(-1).mean()) < 0.02
    shape = ModelShape.from_folder(stored)
    layer = Formation(stored).models[0][0].layers[0]
    assert layer_bytes(shape, 0, "fp32", Layout()) == sum(parameter.nbytes for parameter in layer.parameters())


def test_what_is_refused_is_named(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "qwen3_moe", dtype=torch.bfloat16)
    for change, match in (({"symmetric": False}, "symmetric=False"), (None, "activations in int8")):
        declared = copy.deepcopy(config(dynamic=True))
        group = declared["config_groups"]["group_0"]
        group["input_activations"] = None if change is None else {**group["input_activations"], **change}
        stored, _ = rewrite(plain, tmp_path / match, Form(declared, encode, -1))
        with pytest.raises(ModelError, match=match):
            ModelShape.from_folder(stored)


@pytest.mark.gpu1
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 64, 256), (17, 100, 132), (200, 512, 1024)])
def test_sums_on_a_gpu_are_exact(tokens: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randint(-128, 128, (rows, inputs), dtype=torch.int8, generator=generator) for rows in (tokens, outputs))
    assert torch.equal(int8_mm(x.cuda(), weight.cuda()).cpu(), int8_mm(x, weight))

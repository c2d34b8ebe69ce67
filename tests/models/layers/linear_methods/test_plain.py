# SPDX-License-Identifier: Apache-2.0
"""Each linear method beside its plain multiplication: the same values, and what differs is noted by layer and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.models import registry, weights
from phalanx.models.decoder import Decoder
from phalanx.models.layers.linear_methods.plain import Linear, PlainLinear, compared_linears, plain_linears
from phalanx.models.slices import LayerContext
from tests.support import int4_checkpoints, nvfp4_checkpoints, quantized_checkpoints
from tests.support.checkpoints import write_checkpoint

SIZES = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_key_value_heads": 2, "std": 0.08}
INT4 = ("packed 64 with zeros", "gptq desc_act (T3)")
FP8 = ("compressed static", "compressed dynamic", "compressed weights only", "blocks")
FORMS = ["plain", "nvfp4", *INT4, *FP8]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), "qwen2", **SIZES)


def build(folder: Path, **options: Any) -> Decoder:
    shape = ModelShape.from_folder(folder)
    model = registry.build(shape, range(shape.num_layers), LayerContext(Solo(), torch.float32, torch.device("cpu"), **options))
    weights.load(model, folder)
    return model


def written(form: str, plain: Path, folder: Path) -> Decoder:
    if form in INT4:
        return build(int4_checkpoints.rewrite(plain, folder, int4_checkpoints.FORMS[form])[0])
    if form in FP8:
        return build(quantized_checkpoints.rewrite(plain, folder, form)[0], fp8_gemm=True)
    if form == "nvfp4":
        return build(int4_checkpoints.rewrite(plain, folder, nvfp4_checkpoints.FORMS["modelopt"])[0])
    return build(plain)


def linears(model: Decoder) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_plain_multiplication_gives_what_the_kernels_give(form: str, plain: Path, tmp_path: Path) -> None:
    model = written(form, plain, tmp_path)
    for layer in linears(model):
        x = torch.randn(9, layer.method.in_features, generator=torch.Generator().manual_seed(3))
        expected, single = layer.method.multiply(x), layer.method.multiply(x[:1])
        torch.testing.assert_close(layer.method.plain_multiply(x), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.method.plain_multiply(x[:1]), single, rtol=1e-4, atol=1e-4)
        quantizer = layer.method.input_quantizer
        if quantizer is not None:
            torch.testing.assert_close(layer.method.plain_multiply(quantizer.quantize(x)), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_layers_are_replaced_for_a_while_and_what_differs_is_noted(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(plain)
    wrong, x = linears(model)[2], torch.randn(9, 256)
    right = type(wrong.method).multiply

    def multiply(self: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = right(self, x, bias)
        if self is wrong_method:
            out[5:] *= 1.25
        return out

    wrong_method = wrong.method
    monkeypatch.setattr(type(wrong.method), "multiply", multiply)
    with plain_linears(model):
        assert all(isinstance(layer.method, PlainLinear) for layer in linears(model))
        torch.testing.assert_close(wrong.method.multiply(x), wrong.method.unscaled(x))
    with compared_linears(model) as differences:
        for layer in linears(model)[:3]:
            layer.method.multiply(torch.randn(9, layer.method.in_features))
        *others, worst = differences()
    assert (worst.name, worst.rows, worst.first) == (wrong_method.parts[0].name, 9, 5)
    assert worst.error == pytest.approx(0.25, abs=0.01)
    assert all(each.error < 1e-6 for each in others)
    assert wrong.method is wrong_method

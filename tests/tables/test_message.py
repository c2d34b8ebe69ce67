# SPDX-License-Identifier: Apache-2.0
"""Fusions keep TensorRT-LLM's numbers; dtypes have several spellings."""

from __future__ import annotations

import pytest

from phalanx.config.dtypes import parse_dtype
from phalanx.errors import OptionError
from phalanx.tables.message import STANDS_IN, Fusion, Message


def test_numbers_are_the_incumbents():
    names = ["NONE", "RESIDUAL_RMS_NORM", "RESIDUAL_RMS_NORM_QUANT_FP8", "RESIDUAL_RMS_NORM_QUANT_NVFP4"]
    names += ["RESIDUAL_RMS_NORM_OUT_QUANT_FP8", "RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4"]
    assert {name: int(Fusion[name]) for name in names} == dict(zip(names, [0, 1, 4, 5, 6, 7], strict=True))
    assert all(int(fusion) >= 64 for fusion in Fusion if fusion.name not in names)


def test_fusion_of_what_a_layer_asks():
    assert Fusion.of("none", token_scale=True, keep_norm=False) is Fusion.RESIDUAL_RMS_NORM
    for fusion in Fusion:
        if fusion.quant != "none":
            assert Fusion.of(fusion.quant, token_scale=fusion.token_scale, keep_norm=fusion.keeps_norm) is fusion
    assert Fusion.of("nvfp4", token_scale=True, keep_norm=True) is Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4


def test_stand_ins_quantize_alike():
    for fusion, others in STANDS_IN.items():
        assert all(other.quant == fusion.quant for other in others)


def test_names():
    assert {parse_dtype(name) for name in ("bf16", "bfloat16", "torch.bfloat16")} == {"bf16"}
    assert parse_dtype("half") == "fp16"
    with pytest.raises(OptionError, match="int8"):
        parse_dtype("int8")
    with pytest.raises(OptionError, match="RESIDUAL_RMS_NORM"):
        Fusion.named("RMS")
    assert Message("all_reduce", Fusion.NONE, "fp32", 3, 1000, 2).bytes == 12_000

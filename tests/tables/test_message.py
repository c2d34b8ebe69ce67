# SPDX-License-Identifier: Apache-2.0
"""Fusions keep TensorRT-LLM's numbers; dtypes have several spellings."""

from __future__ import annotations

import pytest

from phalanx.config.dtypes import parse_dtype
from phalanx.errors import OptionError
from phalanx.tables.message import Caller, Fusion, Message


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


def test_stand_ins_send_the_same_bytes():
    """Or, as the last resort, those of a quantization alike."""
    for caller in Caller:
        for fusion in Fusion:
            others = caller.stand_ins(fusion)
            plain = Fusion.RESIDUAL_RMS_NORM
            assert fusion not in others
            assert all(other.quant == fusion.quant for other in others if other is not plain)
            assert (plain in others) == (caller is not Caller.REPLICATED and fusion.keeps_norm and fusion.quant == "fp8")
            if plain in others:
                assert all(other.keeps_norm for other in others[: others.index(plain)])


def test_names():
    assert {parse_dtype(name) for name in ("bf16", "bfloat16", "torch.bfloat16")} == {"bf16"}
    assert parse_dtype("half") == "fp16"
    with pytest.raises(OptionError, match="int8"):
        parse_dtype("int8")
    with pytest.raises(OptionError, match="RESIDUAL_RMS_NORM"):
        Fusion.named("RMS")
    assert Message("all_reduce", Fusion.NONE, "fp32", 3, 1000, 2).bytes == 12_000

# SPDX-License-Identifier: Apache-2.0
"""T15: experts without a gate, of which a checkpoint has up and down alone (Nemotron-H), in 4 bits: what is loaded means what was
stored, over every split of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phalanx.config.quantization import INT4_ON_LOAD
from phalanx.models.layers.expert_methods.packed import PackedExperts
from tests.support.checkpoints import write_checkpoint
from tests.support.int4_checkpoints import FORMS as INT4
from tests.support.int4_checkpoints import Encoded, Form, rewrite
from tests.support.models_formation import Formation
from tests.support.nvfp4_checkpoints import FORMS as NVFP4
from tests.support.nvfp4_checkpoints import modelopt_fp8, modelopt_nvfp4

SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 384,
    "moe_shared_expert_intermediate_size": 256, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "mamba_head_dim": 32, "layers_block_type": ["mamba", "moe", "attention", "moe"], "std": 0.08,
}  # fmt: skip
KINDS = {
    "packed 32": INT4["packed 32"], "packed 64 with zeros": INT4["packed 64 with zeros"], "awq": INT4["awq"],
    "gptq": INT4["gptq"], "compressed-tensors": NVFP4["compressed-tensors"], "modelopt": NVFP4["modelopt"],
}  # fmt: skip
IDS = torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), "nemotron_h", dtype=torch.bfloat16, **SIZES)


def logits(folder: Path, **options: Any) -> Tensor:
    formation = Formation(folder, **options)
    return torch.cat([formation.step([(0, IDS[:20])], padding=1)[0], formation.step([(0, IDS[20:])])[0]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_gives_what_its_values_mean(kind: str, plain: Path, tmp_path: Path) -> None:
    if kind == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    stored, meant = rewrite(plain, tmp_path, KINDS[kind])
    assert not [name for name in load_file(stored / "model.safetensors") if "gate_proj" in name]
    experts = Formation(stored).models[0][0].layers[1].mixer.experts
    assert isinstance(experts, PackedExperts)
    expected = logits(meant)
    for tp, moe_ep, pp in ((1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 1)):
        torch.testing.assert_close(logits(stored, tp=tp, moe_ep=moe_ep, pp=pp), expected, rtol=1e-4, atol=1e-4)


def test_algorithms_that_differ_by_layer(plain: Path, tmp_path: Path) -> None:
    """ModelOpt's MIXED_PRECISION, as Nemotron-3 is released: experts in NVFP4, and other layers in FP8, by the names on disk."""

    def encode(form: Form, weight: Tensor, name: str) -> Encoded:
        return (modelopt_nvfp4 if ".experts." in name else modelopt_fp8)(form, weight, name)

    names = [name.removesuffix(".weight") for name in load_file(plain / "model.safetensors") if name.endswith("_proj.weight")]
    kinds = {name: {"quant_algo": "NVFP4", "group_size": 16} if ".experts." in name else {"quant_algo": "FP8"} for name in names}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": kinds}
    assert all(name.startswith("backbone.") for name in kinds)
    stored, meant = rewrite(plain, tmp_path, Form(config, encode, 16))
    torch.testing.assert_close(logits(stored, tp=2), logits(meant), rtol=1e-4, atol=1e-4)


def test_a_16_bit_checkpoint_is_rounded_while_it_loads(plain: Path) -> None:
    formation = Formation(plain, quantization=INT4_ON_LOAD)
    tensors = formation.models[0][0].layers[1].mixer.tensors()
    assert tensors.packed is not None
    assert not tensors.gated
    assert bool(torch.isfinite(formation.step([(0, IDS)])[0]).all())

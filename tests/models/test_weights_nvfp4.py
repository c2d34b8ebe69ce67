# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with weights in NVFP4, dense layers and experts: what is loaded means what was stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.errors import ModelError, WeightError
from phalanx.kernels.moe.nvfp4_packing import dequantized
from phalanx.layout import Layout
from phalanx.layout.weights import layer_bytes
from phalanx.models import registry, weights
from phalanx.models.layers.linear_methods.nvfp4 import Nvfp4Linear
from phalanx.models.layers.linear_methods.unquantized import Unquantized
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint
from tests.support.int4_checkpoints import FORMS as INT4_FORMS
from tests.support.int4_checkpoints import IGNORED, Form, rewrite
from tests.support.models_formation import Formation
from tests.support.nvfp4_checkpoints import FORMS, MODELOPT, VALUES, mixed, mixed_config, modelopt_nvfp4

pytest.importorskip("compressed_tensors")

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2,
    "std": 0.08,
}  # fmt: skip
IDS = torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), "llama", dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Form -> the checkpoint, and the plain one that it stands for."""
    return {name: rewrite(plain, tmp_path_factory.mktemp("form"), form) for name, form in FORMS.items()}


def logits(folder: Path, **options: Any) -> Tensor:
    formation = Formation(folder, **options)
    return torch.cat([formation.step([(0, IDS[:20])], padding=1)[0], formation.step([(0, IDS[20:])])[0]])


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_gives_what_its_values_mean(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    """In fp32: the model of the dequantized weights, whose global scales are reciprocal in one form (T10). Of 11 blocks of 32
    columns, two ranks hold six and five, four ranks three and two."""
    stored, meant = written[form]
    expected = logits(meant)
    for tp, pp in ((1, 1), (2, 2), (4, 1)):
        torch.testing.assert_close(logits(stored, tp=tp, pp=pp), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_checkpoint(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    """Value by value; fused parts have their own global scales (T11), an ignored layer stays (T7)."""
    stored, meant = written[form]
    model, tensors = Formation(stored).models[0][0], load_file(meant / "model.safetensors")
    assert isinstance(model.layers[1].mlp.down_proj.method, Unquantized), f"{IGNORED} is to be ignored"
    method = model.layers[0].self_attn.qkv_proj.method
    assert isinstance(method, Nvfp4Linear)
    assert form == "mxfp4" or len(method.row_scale[: method.out_features].unique()) == 3
    expected = torch.cat([tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    torch.testing.assert_close(dequantized(method.weight, torch.float32), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", [FORMS["modelopt"], *(INT4_FORMS[kind] for kind in ("packed 32", "awq", "gptq"))])
@pytest.mark.parametrize(("family", "sizes"), [("ernie4_5", {}), ("phi3", {}), ("hy_v3", {"moe_intermediate_size": 256})])
def test_rows_and_names_that_are_others_on_disk(family: str, sizes: dict[str, int], form: Form, tmp_path: Path) -> None:
    """Pairs that RoPE rotates, which are neighbours on disk, or a part of a head; projections of one input in one tensor; and
    released names that are not those of transformers."""
    folder = write_checkpoint(tmp_path / "plain", family, dtype=torch.bfloat16, head_dim=32, **SIZES, **sizes)
    stored, meant = rewrite(folder, tmp_path, form)
    expected = logits(meant)
    for tp in (1, 2):
        torch.testing.assert_close(logits(stored, tp=tp), expected, rtol=1e-4, atol=1e-4)


def test_layers_of_several_algorithms(plain: Path, tmp_path: Path) -> None:
    """ModelOpt's MIXED_PRECISION: attention in FP8, the MLP in NVFP4; a layer that it does not list is in 16 bit."""
    names = [name.removesuffix(".weight") for name in load_file(plain / "model.safetensors") if name.endswith("_proj.weight")]
    form = Form(mixed_config([name for name in names if name != IGNORED]), mixed, 16)
    stored, meant = rewrite(plain, tmp_path, form)
    for tp in (1, 2):
        torch.testing.assert_close(logits(stored, tp=tp), logits(meant, tp=tp), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt", "mxfp4"])
def test_experts(form: str, tmp_path: Path) -> None:
    """Over ranks that split them by columns, by number, and by both."""
    sizes = {
        "hidden_size": 128,
        "moe_intermediate_size": 96,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "std": 0.08,
    }
    plain = write_checkpoint(tmp_path / "plain", "qwen3_moe", dtype=torch.bfloat16, **sizes)
    stored, meant = rewrite(plain, tmp_path, FORMS[form])
    expected = logits(meant)
    for tp, moe_ep, pp in ((1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 1)):
        torch.testing.assert_close(logits(stored, tp=tp, moe_ep=moe_ep, pp=pp), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt", "mxfp4"])
def test_dummy_weights_and_the_planner(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    """Random weights keep activations in range; the planner counts what a rank holds."""
    formation = Formation(written[form][0])
    formation.randomize(3)
    assert bool(torch.isfinite(formation.step([(0, IDS)])[0]).all())
    method = formation.models[0][0].layers[0].mlp.down_proj.method
    assert float(dequantized(method.weight, torch.float32).std()) == pytest.approx(352**-0.5, rel=0.03)
    shape = ModelShape.from_folder(written[form][0])
    for tp in (1, 2):

        def layer(group: Group) -> Any:
            context = LayerContext(group, torch.bfloat16, torch.device("meta"))
            return registry.build(shape, range(1), context).layers[0]

        own = LocalWorld(tp).run(layer)[0]
        assert layer_bytes(shape, 0, "bf16", Layout(tp=tp)) == sum(parameter.nbytes for parameter in own.parameters())


def test_a_read_that_failed_leaves_nothing(written: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Else tensors of it and of the next read would be packed together."""
    folder, name = written["modelopt"][0], "model.layers.0.mlp.up_proj.weight_scale"
    formation, tensors = Formation(folder), load_file(folder / "model.safetensors")
    tensors[name] = torch.full(tensors[name].shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    method = formation.models[0][0].layers[0].mlp.gate_up_proj.method
    with pytest.raises(WeightError, match="NaN"):
        weights.load(formation.models[0][0], tmp_path)
    assert method._stored
    method.reading()
    assert not method._stored


def test_powers_of_two_that_are_far_apart(plain: Path, tmp_path: Path) -> None:
    """29 apart in a row are exact, 30 are an error; NaN in e8m0 is one."""
    stored, _ = rewrite(plain, tmp_path, FORMS["mxfp4"])
    tensors, name = load_file(stored / "model.safetensors"), "model.layers.0.mlp.down_proj"
    scale, codes = tensors[f"{name}.weight_scale"], tensors[f"{name}.weight_packed"]
    codes[3, :16], scale[3, 0] = 0x17, 127  # 6 and 0.5
    for power, message in ((98, ""), (97, "powers of 2 in one row"), (255, "NaN")):
        scale[3, 1:] = power
        save_file(tensors, stored / "model.safetensors", {"format": "pt"})
        if message:
            with pytest.raises(WeightError, match=message):
                Formation(stored)
        else:
            method = Formation(stored).models[0][0].layers[0].mlp.down_proj.method
            row = dequantized(method.weight, torch.float32)[3]
            assert row[:32].tolist() == [6.0, 0.5] * 16
            assert row[32:].abs().max() == VALUES[(codes[3, 16:].unsqueeze(1) >> torch.tensor([0, 4]) & 7).long()].max() * 2.0**-29


def test_what_cannot_be_is_named(plain: Path, tmp_path: Path) -> None:
    stored, _ = rewrite(plain, tmp_path / "a", Form(MODELOPT, modelopt_nvfp4, 16))
    contents = load_file(stored / "model.safetensors")
    contents["model.layers.0.mlp.up_proj.weight_scale"].view(torch.uint8)[3, 2] = 0xFF
    save_file(contents, stored / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=r"up_proj\.weight_scale holds a negative value or NaN"):
        Formation(stored)
    contents["model.layers.0.mlp.up_proj.weight_scale"] = contents["model.layers.0.mlp.up_proj.weight_scale"].flatten()
    save_file(contents, stored / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=r"up_proj\.weight_scale in .* has shape \[5632\]"):  # T18: swizzled for another kernel
        Formation(stored)
    narrow = write_checkpoint(tmp_path / "narrow", "qwen3", dtype=torch.bfloat16, **{**SIZES, "head_dim": 12})
    stored, _ = rewrite(narrow, tmp_path / "b", Form(MODELOPT, modelopt_nvfp4, 16))
    with pytest.raises(ModelError, match="o_proj has columns 0 to 24 on this rank"):
        Formation(stored, tp=4)

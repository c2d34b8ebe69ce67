# SPDX-License-Identifier: Apache-2.0
"""Experts in 4-bit integers: what is loaded means what was stored, over every split of experts; what is wrong is named."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.config.quantization import INT4_ON_LOAD
from phalanx.errors import LayoutError, ModelError, WeightError
from phalanx.kernels.gemm.int4_packing import dequantized
from phalanx.layout import Layout
from phalanx.layout.layout import require_suits
from phalanx.layout.weights import layer_bytes
from phalanx.models import registry, weights
from phalanx.models.batch import DpTokens
from phalanx.models.layers.moe import SparseMoe
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint
from tests.support.int4_checkpoints import FORMS, Form, compressed, rewrite
from tests.support.models_formation import CPU, Formation

SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 384,
    "num_experts": 4, "num_experts_per_tok": 2, "std": 0.08,
}  # fmt: skip
LAYOUTS = [(1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 1)]
"""(tp, moe_ep, pp): experts whole on one rank, split by groups of columns, by number, and by both."""
KINDS = ["packed 32", "packed 128 static order", "packed 64 with zeros", "awq", "gptq", "gptq with zeros"]
IDS = torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), "qwen3_moe", dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Kind -> the checkpoint, and the plain one that it stands for."""
    return {name: rewrite(plain, tmp_path_factory.mktemp("form"), FORMS[name]) for name in KINDS}


def logits(folder: Path, **options: Any) -> Tensor:
    formation = Formation(folder, **options)
    return torch.cat([formation.step([(0, IDS[:20])], padding=1)[0], formation.step([(0, IDS[20:])])[0]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_gives_what_its_values_mean(kind: str, written: dict[str, tuple[Path, Path]]) -> None:
    """In fp32: the model of the dequantized weights. Of three groups of 128 columns, two ranks hold two and one, each with the
    scales of its own columns (T6)."""
    stored, meant = written[kind]
    expected = logits(meant)
    for tp, moe_ep, pp in LAYOUTS if kind == "packed 32" else LAYOUTS[1:3]:
        torch.testing.assert_close(logits(stored, tp=tp, moe_ep=moe_ep, pp=pp), expected, rtol=1e-4, atol=1e-4)


def test_over_data_parallel_indices(written: dict[str, tuple[Path, Path]]) -> None:
    stored, meant = written["packed 32"]
    alone, counts = block_of(meant, Solo()), (5, 2)
    blocks = LocalWorld(2).run(lambda group: block_of(stored, group))
    x = [torch.randn(count, 256, generator=torch.Generator().manual_seed(count)) for count in counts]
    sums = LocalWorld(2).run(lambda group: blocks[group.rank].exchanged(x[group.rank], DpTokens.of(counts)))
    for own, total in zip(x, sums, strict=True):
        torch.testing.assert_close(total, alone.partial_sum(own), rtol=1e-4, atol=1e-4)


def block_of(folder: Path, dp: Group) -> SparseMoe:
    shape = ModelShape.from_folder(folder)
    model = registry.build(shape, range(1), LayerContext(Solo(), torch.float32, CPU, dp=dp))
    weights.load(model, folder)
    block = model.layers[0].mlp
    assert isinstance(block, SparseMoe)
    return block


@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (128, True), (32, False)])
def test_checkpoints_that_compressed_tensors_packs(group: int, symmetric: bool, plain: Path, tmp_path: Path) -> None:
    """By the tool's own code, as Kimi-K2-Thinking is released: experts alone, and its lists of what is not quantized."""
    compressor = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base").PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = compressed(group, symmetric=symmetric)
    config["ignore"] = [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ]  # fmt: skip
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])

    def encode(form: Form, weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
        if ".experts." not in name:
            return {"weight": weight}, weight
        groups = weight.view(len(weight), -1, group)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = groups.abs().amax(-1) / 7.5 if symmetric else (high - low) / 15
        zero = torch.zeros_like(scale) if symmetric else (-8 - torch.round(low / scale)).clamp(-8, 7)
        stored = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}, scheme)
        return stored, compressor.decompress(dict(stored), scheme)["weight"]

    stored, meant = rewrite(plain, tmp_path, Form(config, encode, group, symmetric))
    expected = logits(meant)
    for tp, moe_ep in ((1, 1), (2, 1), (2, 2)):
        torch.testing.assert_close(logits(stored, tp=tp, moe_ep=moe_ep), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_16_bit_checkpoint_is_rounded_while_it_loads(stacked: bool, tmp_path: Path) -> None:
    """To the nearest of 16 values of each group of 128, whose scale has the dtype of the file; also where the experts of a layer
    are in one tensor."""
    folder = write_checkpoint(tmp_path / "plain", "qwen3_moe", dtype=torch.bfloat16, stacked=stacked, **SIZES)
    meant, contents = tmp_path / "meant", load_file(folder / "model.safetensors")
    meant.mkdir()
    for name, tensor in contents.items():
        if name.endswith(("_proj.weight", "_proj")):
            groups = tensor.float().unflatten(-1, (-1, 128))
            scale = (groups.abs().amax(-1, keepdim=True) / 7.5).to(tensor.dtype).float()
            contents[name] = (torch.round(groups / scale).clamp(-8, 7) * scale).flatten(-2)
    save_file(contents, meant / "model.safetensors", {"format": "pt"})
    (meant / "config.json").write_bytes((folder / "config.json").read_bytes())
    expected = logits(meant)
    for tp, moe_ep in ((1, 1), (2, 2)):
        torch.testing.assert_close(logits(folder, quantization=INT4_ON_LOAD, tp=tp, moe_ep=moe_ep), expected, rtol=1e-4, atol=1e-4)


def test_dummy_weights(plain: Path) -> None:
    formation = Formation(plain, quantization=INT4_ON_LOAD)
    formation.randomize(3)
    assert bool(torch.isfinite(formation.step([(0, IDS)])[0]).all())
    pair = formation.models[0][0].layers[0].mlp.tensors().packed
    assert pair is not None
    for weight, inputs in zip(pair, (256, 384), strict=True):
        one = weight._replace(words=weight.words[1], scales=weight.scales[1])
        assert float(dequantized(one, torch.float32).std()) == pytest.approx(inputs**-0.5, rel=0.02)


@pytest.mark.parametrize("kind", ["packed 32", "packed 128 static order", "gptq with zeros"])
def test_the_planner_counts_what_a_rank_holds(kind: str, written: dict[str, tuple[Path, Path]]) -> None:
    stored, _ = written[kind]
    shape = replace(ModelShape.from_folder(stored), num_kv_heads=4)  # so that no rank pads its keys
    for tp, moe_ep in ((1, 1), (2, 1), (2, 2)):

        def layer(group: Group, moe_ep: int = moe_ep) -> Any:
            context = LayerContext(group, torch.bfloat16, torch.device("meta"), moe_ep=moe_ep)
            return registry.build(shape, range(1), context).layers[0]

        own = LocalWorld(tp).run(layer)[0]
        nbytes = sum(parameter.nbytes for parameter in own.parameters())
        assert layer_bytes(shape, 0, "bf16", Layout(tp=tp, moe_ep=moe_ep)) == nbytes


def test_more_ranks_than_groups_are_refused(written: dict[str, tuple[Path, Path]]) -> None:
    """T5: before any starts. By number they can be split."""
    shape = replace(ModelShape.from_folder(written["packed 128 static order"][0]), num_kv_heads=8)
    require_suits(Layout(tp=2), shape)
    with pytest.raises(LayoutError, match="= 4 exceeds the 3 groups of 128 columns"):
        require_suits(Layout(tp=4), shape)
    require_suits(Layout(tp=4, moe_ep=2), shape)


@pytest.mark.parametrize("kind", ["packed 32", "gptq", "awq"])
def test_routers_stay_as_they_are_whatever_a_list_says(kind: str, written: dict[str, tuple[Path, Path]]) -> None:
    """T8: no list names them, and the files have them in 16 bit."""
    stored, meant = written[kind]
    model, values = Formation(stored).models[0][0], load_file(meant / "model.safetensors")
    scheme = model.shape.quantization
    assert scheme is not None
    for index in (0, 1):
        name = f"model.layers.{index}.mlp.gate"
        assert scheme.of(name) is not None, "its configuration would have it quantized"
        assert torch.equal(model.layers[index].mlp.router.weight, values[f"{name}.weight"])


@pytest.mark.parametrize("end", ["mlp.gate.weight", "mlp.experts.2.up_proj.weight_scale", "mlp.experts.3.down_proj.weight_packed"])
def test_every_tensor_is_read_or_its_absence_named(end: str, plain: Path, tmp_path: Path) -> None:
    """T9: a weight that no file fills would be zeros, and the model fluent nonsense."""
    stored, _ = rewrite(plain, tmp_path, FORMS["packed 32"])
    contents = load_file(stored / "model.safetensors")
    del contents[f"model.layers.1.{end}"]
    save_file(contents, stored / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=rf"model\.layers\.1\.{end} is missing"):
        Formation(stored)


def test_act_order_and_8_bits_are_refused(plain: Path, tmp_path: Path) -> None:
    stored, _ = rewrite(plain, tmp_path, FORMS["packed act order"])
    with pytest.raises(ModelError, match=r"is an expert in act order.*desc_act=false"):
        Formation(stored)
    stored, _ = rewrite(plain, tmp_path / "8", FORMS["packed 8 bit"])
    with pytest.raises(ModelError, match=r"is an expert in 8-bit integers.*in 4 bits"):
        Formation(stored)


def test_projections_that_differ_are_refused(plain: Path, tmp_path: Path) -> None:
    """T7, T14: a list that names one projection of an expert, and one that names all of an expert but not of the next."""
    for entry, match in (("re:.*experts.*down_proj", "in INT4 and 16 bit"), ("re:.*experts\\.1\\.", "not quantized")):
        config = copy.deepcopy(compressed(32))
        config["ignore"] = ["lm_head", entry]
        stored, _ = rewrite(plain, tmp_path / match, replace(FORMS["packed 32"], config=config))
        with pytest.raises(ModelError, match=match):
            Formation(stored)

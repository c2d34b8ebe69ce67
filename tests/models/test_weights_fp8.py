# SPDX-License-Identifier: Apache-2.0
"""FP8 checkpoints in every form, and plain ones quantized on load: what is loaded means what was stored; what is wrong is named."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx import kernels
from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.errors import ModelError, WeightError
from phalanx.layout import Layout
from phalanx.layout.weights import layer_bytes
from phalanx.models import registry, weights
from phalanx.models.decoder import Decoder
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint
from tests.support.models_formation import CPU, Formation
from tests.support.quantized_checkpoints import FORMS, FP8, IGNORED, KV_SCALES, declare, rewrite

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "std": 0.15,
}
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), "qwen2", dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Form -> the FP8 checkpoint, and the plain one that it stands for."""
    return {form: rewrite(plain, tmp_path_factory.mktemp("form"), form) for form in FORMS}


@pytest.fixture
def spoiled(written: dict[str, tuple[Path, Path]], tmp_path: Path) -> Path:
    """A copy of a static, per-tensor checkpoint."""
    return Path(shutil.copytree(written["modelopt in config.json"][0], tmp_path / "spoiled"))


def change(folder: Path, **tensors: Tensor | None) -> None:
    contents = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        contents.pop(f"{LAYER}.{name}", None)
        if tensor is not None:
            contents[f"{LAYER}.{name}"] = tensor
    save_file(contents, folder / "model.safetensors", {"format": "pt"})


def build(folder: Path, group: Group | None = None, **options: Any) -> Decoder:
    shape = ModelShape.from_folder(folder)
    model = registry.build(shape, range(shape.num_layers), LayerContext(group or Solo(), torch.float32, CPU, **options))
    weights.load(model, folder)
    return model


def logits(folder: Path, tp: int = 1, **options: Any) -> Tensor:
    ids = torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))
    formation = Formation(folder, tp=tp, **options)
    first = formation.step([(0, ids[:20])], padding=1)[0]
    return torch.cat([first, *(formation.step([(0, ids[at : at + 1])])[0] for at in range(20, 24))])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_in_fp8_gives_what_its_values_mean(form: str, tp: int, written: dict[str, tuple[Path, Path]]) -> None:
    """Weights only, in fp32: exactly the model of the dequantized weights, over every number of ranks."""
    stored, meant = written[form]
    mlp = build(stored).layers[1].mlp
    assert mlp.gate_up_proj.method.weight.dtype == FP8
    assert mlp.down_proj.method.weight.dtype == torch.float32, f"{IGNORED} is to be ignored"
    torch.testing.assert_close(logits(stored, tp), logits(meant, tp), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["modelopt", "compressed static"])
def test_static_scales_are_those_of_the_checkpoint(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    """Parts of one GEMM keep their own weight scales, share the largest input scale; the cache has the checkpoint's scales."""
    stored, _ = written[form]
    tensors, model = load_file(stored / "model.safetensors"), build(stored, kv_cache_dtype="fp8")
    qkv = model.layers[0].self_attn.qkv_proj
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    scales = [tensors[f"{part}.weight_scale"].reshape(1).expand(tensors[f"{part}.weight"].shape[0]) for part in parts]
    assert len({float(scale[0]) for scale in scales}) == 3
    assert torch.equal(qkv.method.weight_scale, torch.cat(scales))
    assert float(qkv.method.input_scale) == max(float(tensors[f"{part}.input_scale"]) for part in parts)
    assert model.layers[1].self_attn.kv_store.read_scales == pytest.approx(KV_SCALES)
    assert ModelShape.from_folder(stored).quantization.kv
    assert build(stored).layers[1].self_attn.kv_store.read_scales is None


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_quantized_on_load(tp: int, plain: Path) -> None:
    """Each output channel of what a rank holds has a scale of its own; norms, embedding and head stay as they are."""
    tensors = load_file(plain / "model.safetensors")

    def act(group: Group) -> Decoder:
        return build(plain, group, quantization=ON_LOAD)

    for rank, model in enumerate(LocalWorld(tp).run(act)):
        layer, width = model.layers[1], 128 // tp
        for output, name in ((layer.mlp.down_proj, "mlp.down_proj"), (layer.mlp.gate_up_proj, "mlp.gate_proj")):
            full_weight = tensors[f"model.layers.1.{name}.weight"]
            local = (
                full_weight[:, rank * width : (rank + 1) * width]
                if output is layer.mlp.down_proj
                else full_weight[rank * width : (rank + 1) * width]
            )
            quantized, scale = kernels.quantize_fp8(local)
            rows = slice(0, len(local))
            assert torch.equal(output.method.weight[rows].float(), quantized.float())
            assert torch.equal(output.method.weight_scale[rows], scale.squeeze(-1))
            dequantized = output.method.dequantized()[rows]
            assert ((dequantized - local.float()).abs() <= local.float().abs() / 16 + scale / 512 * 1.01).all()
        assert (
            layer.input_layernorm.weight.dtype
            == model.embed_tokens.weight.dtype
            == model.lm_head.table.weight.dtype
            == torch.float32
        )


def test_quantized_on_load_is_near_the_plain_model(plain: Path) -> None:
    exact = logits(plain).softmax(-1)
    for options in ({}, {"fp8_gemm": True}, {"fp8_gemm": True, "kv_cache_dtype": "fp8"}):
        for tp in (1, 4):
            near = logits(plain, tp, quantization=ON_LOAD, **options).log_softmax(-1)
            assert float((exact * (exact.log() - near)).sum(-1).mean()) < 0.05


@pytest.mark.parametrize("form", ["on load", "modelopt", "compressed dynamic"])
def test_bytes_are_those_that_are_planned(form: str, plain: Path, written: dict[str, tuple[Path, Path]]) -> None:
    folder = plain if form == "on load" else written[form][0]
    shape = ModelShape.from_folder(folder)
    dtype = "fp8" if form == "on load" else "bf16"
    for layer in (0, 1):
        quantization = ON_LOAD if form == "on load" else None
        context = LayerContext(Solo(), torch.bfloat16, torch.device("meta"), quantization=quantization)
        model = registry.build(shape, range(layer, layer + 1), context)
        read = sum(weight.nbytes for weight in model.layers[0].parameters() if weight.dim())
        assert read == layer_bytes(shape, layer, dtype, Layout())


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"weight_scale": None}, rf"{LAYER}.weight_scale is missing"),
        ({"input_scale": None}, rf"{LAYER}.input_scale is missing"),
        ({"weight_scale": torch.ones(64)}, r"weight_scale in .* has shape \[64\].*\[\] or \[1\]"),
        ({"weight_scale": torch.tensor(float("nan"))}, r"weight_scale in .*not finite and positive"),
        ({"input_scale": torch.tensor(0.0)}, r"input_scale in .*not finite and positive"),
        ({"weight_scale": torch.tensor(1)}, r"weight_scale in .* has dtype torch.int64"),
        ({"weight": torch.ones(64, 64, dtype=torch.bfloat16)}, r"q_proj.weight in .* has dtype BF16.*read here: F8_E4M3"),
        ({"weight": torch.ones(64, 32).to(FP8)}, r"q_proj.weight in .* has shape \[64, 32\].*\[64, 64\]"),
        ({"zero_point": torch.ones(())}, r"holds .*q_proj.zero_point"),
    ],
)
def test_what_contradicts_the_configuration_is_named(tensors: dict[str, Tensor | None], match: str, spoiled: Path) -> None:
    change(spoiled, **tensors)
    with pytest.raises(WeightError, match=match):
        build(spoiled)


def test_fp8_weights_that_nobody_declared(spoiled: Path, plain: Path) -> None:
    shutil.copy(plain / "config.json", spoiled / "config.json")
    with pytest.raises(WeightError, match=r"holds .*_scale and \d+ more"):
        build(spoiled)


def test_parts_of_one_product_are_quantized_together(spoiled: Path) -> None:
    declare(spoiled, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*k_proj"]})
    with pytest.raises(ModelError, match=r"q_proj is in FP8 and .*k_proj is not"):
        build(spoiled)


def test_dummy_weights_are_parts_of_one_model(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over any number of ranks, from tiles that neither rows nor columns of a rank fall together with; by the seed."""
    monkeypatch.setattr(weights, "TILE", 24)
    shape = ModelShape.from_folder(plain)

    def act(group: Group, seed: int = 3) -> Decoder:
        model = registry.build(shape, range(2), LayerContext(group, torch.float32, CPU, quantization=ON_LOAD))
        for weight in model.parameters():
            weight.fill_(float("nan"))
        weights.dummy(model, seed)
        return model

    unsharded = act(Solo())
    assert not any(weight.float().isnan().any() for weight in unsharded.parameters())
    for rank, model in enumerate(LocalWorld(4).run(act)):
        down, every = model.layers[1].mlp.down_proj, unsharded.layers[1].mlp.down_proj
        assert torch.equal(down.method.weight.float(), every.method.weight.float()[:, rank * 32 : (rank + 1) * 32])
        assert torch.equal(down.method.weight_scale, every.method.weight_scale)
        gate, both = (
            model.layers[0].mlp.gate_up_proj.method.weight.float(),
            unsharded.layers[0].mlp.gate_up_proj.method.weight.float(),
        )
        assert torch.equal(gate, torch.cat([part[rank * 32 : (rank + 1) * 32] for part in both.chunk(2)]))
    inner = unsharded.layers[0].mlp.gate_up_proj
    assert float(inner.method.dequantized().std()) == pytest.approx(64**-0.5, rel=0.05)
    assert not torch.equal(inner.method.weight.float(), act(Solo(), 4).layers[0].mlp.gate_up_proj.method.weight.float())


@pytest.mark.parametrize("form", FORMS)
def test_dummy_weights_of_a_quantized_shape(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    shape = ModelShape.from_folder(written[form][0])
    model = registry.build(shape, range(2), LayerContext(Solo(), torch.float32, CPU, kv_cache_dtype="fp8"))
    weights.dummy(model, 0)
    inner = model.layers[0].mlp.gate_up_proj
    assert float(inner.method.dequantized().std()) == pytest.approx(64**-0.5, rel=0.05)
    assert inner.method.input_scale is None or float(inner.method.input_scale) > 0
    assert (model.layers[1].self_attn.kv_store.read_scales is not None) == shape.quantization.kv


def test_large_dummy_weights_hold_one_tile_at_a_time() -> None:
    """A weight of 405B's width: 64 M values, made in a few seconds."""
    part = weights.Slice("w", (4096, 16384), torch.empty(4096, 16384, dtype=FP8), scale=torch.empty(4096))
    begin = time.monotonic()
    weights._fill_fp8(part, 0)
    assert time.monotonic() - begin < 60
    assert part.target[-1, -64:].float().unique().numel() > 16


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_are_read_anew_leave_nothing_of_the_old(
    form: str, written: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """As `UpdateWeights` does it. The old ones have larger scales."""
    folder, _ = written[form]
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    contents = load_file(old / "model.safetensors")
    larger = {name: tensor * 4 if "scale" in name else tensor for name, tensor in contents.items()}
    save_file(larger, old / "model.safetensors", {"format": "pt"})
    model, fresh = build(old), build(folder)
    weights.load(model, folder)
    for (name, one), (_, other) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(one.float(), other.float()), name

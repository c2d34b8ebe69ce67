# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with weights of 4-bit integers in every form: what is loaded means what was stored; what is wrong is named."""

from __future__ import annotations

import copy
import warnings
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
from phalanx.layout.families import known, layer_tensors
from phalanx.layout.layout import require_suits
from phalanx.layout.weights import layer_bytes
from phalanx.models import registry, weights
from phalanx.models.decoder import Decoder
from phalanx.models.layers.linear_methods.int4 import Int4Linear
from phalanx.models.layers.linear_methods.unquantized import Unquantized
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint
from tests.support.int4_checkpoints import FORMS, IGNORED, Form, compressed, packed, rewrite
from tests.support.models_formation import CPU, Formation
from tests.support.quantized_checkpoints import declare

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "std": 0.08,
}
LAYER = "model.layers.0.self_attn.q_proj"
IDS = torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), "qwen2", dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Form -> the checkpoint, and the plain one that it stands for."""
    return {name: rewrite(plain, tmp_path_factory.mktemp("form"), form) for name, form in FORMS.items()}


@pytest.fixture(scope="module")
def expected(written: dict[str, tuple[Path, Path]]) -> dict[str, Tensor]:
    """The logits of each form's meaning, on one rank."""
    return {name: logits(meant) for name, (_, meant) in written.items()}


def build(folder: Path, group: Group | None = None, **options: Any) -> Decoder:
    shape = ModelShape.from_folder(folder)
    context = LayerContext(group or Solo(), **{"dtype": torch.float32, "device": CPU, **options})
    model = registry.build(shape, range(shape.num_layers), context)
    weights.load(model, folder)
    return model


def logits(folder: Path, **options: Any) -> Tensor:
    formation = Formation(folder, **options)
    return torch.cat([formation.step([(0, IDS[:20])], padding=1)[0], formation.step([(0, IDS[20:])])[0]])


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    contents = load_file(folder / "model.safetensors")
    contents.pop(name, None)
    if tensor is not None:
        contents[name] = tensor.contiguous()
    save_file(contents, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_gives_what_its_values_mean(
    form: str, tp: int, pp: int, written: dict[str, tuple[Path, Path]], expected: dict[str, Tensor]
) -> None:
    """In fp32: the model of the dequantized weights, over every number of ranks and stages. Ranks hold whole groups of columns,
    five of 128 over four ranks among them; a slice of o_proj begins within a group."""
    torch.testing.assert_close(logits(written[form][0], tp=tp, pp=pp), expected[form], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (4, 1)])
def test_every_layout_of_ranks(tp: int, pp: int, written: dict[str, tuple[Path, Path]], expected: dict[str, Tensor]) -> None:
    for form in ("packed 64 with zeros", "gptq desc_act (T3)"):
        torch.testing.assert_close(logits(written[form][0], tp=tp, pp=pp), expected[form], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_checkpoint(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    """Value by value, where nothing is rounded; fused parts have their own scales (T11), an ignored layer stays (T7)."""
    stored, meant = written[form]
    model, tensors = build(stored), load_file(meant / "model.safetensors")
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    assert isinstance(model.layers[1].mlp.down_proj.method, Unquantized), f"{IGNORED} is to be ignored"
    layers = {
        "qkv": (attention.qkv_proj, [f"self_attn.{part}_proj" for part in "qkv"]), "o": (attention.o_proj, ["self_attn.o_proj"]),
        "gate_up": (mlp.gate_up_proj, ["mlp.gate_proj", "mlp.up_proj"]), "down": (mlp.down_proj, ["mlp.down_proj"]),
    }  # fmt: skip
    for linear, parts in layers.values():
        method = linear.method
        assert isinstance(method, Int4Linear)
        values = method.dequantized(torch.float32, slice(0, method.out_features))
        wanted = torch.cat([tensors[f"model.layers.0.{part}.weight"] for part in parts])
        if FORMS[form].bits == 8:  # a sum of two products in fp32
            torch.testing.assert_close(values, wanted, rtol=0, atol=2e-7)
        else:
            assert torch.equal(values, wanted)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_checkpoint_of_compressed_tensors_gives_what_transformers_computes(symmetric: bool, plain: Path, tmp_path: Path) -> None:
    """Packed by the tool's own code, and dequantized by it."""
    compressor = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base").PackedQuantizationCompressor
    import transformers
    from compressed_tensors.quantization import QuantizationScheme

    config = compressed(32, symmetric=symmetric)
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])

    def encode(form: Form, weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.view(len(weight), -1, 32)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = groups.abs().amax(-1) / 7.5 if symmetric else (high - low) / 15
        zero = torch.zeros_like(scale) if symmetric else (-8 - torch.round(low / scale)).clamp(-8, 7)
        tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        return compressor.compress(tensors, scheme), weight

    stored, _ = rewrite(plain, tmp_path, Form(config, encode, 32, symmetric))
    loading = transformers.CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():  # transformers says that config.json has a configuration, too
        warnings.simplefilter("ignore")
        reference = transformers.AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32, quantization_config=loading)
    with torch.no_grad():
        meant = reference(IDS.unsqueeze(0)).logits[0]
    for tp in (1, 2, 4):
        torch.testing.assert_close(logits(stored, tp=tp), meant, rtol=1e-4, atol=1e-4)


def test_several_groups_and_formats(plain: Path, tmp_path: Path) -> None:
    """Groups of one checkpoint with other sizes: a layer is of the group that names it, else of one with a pattern for it."""
    config = compressed(32)
    by_pattern, by_name = (copy.deepcopy(compressed(size)["config_groups"]["group_0"]) for size in (128, -1))
    by_pattern["targets"], by_name["targets"] = ["re:.*self_attn.*"], ["model.layers.1.self_attn.o_proj"]
    config["config_groups"] |= {"group_1": by_pattern, "group_2": by_name}

    def encode(form: Form, weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
        size = -1 if name in by_name["targets"] else 128 if "self_attn" in name else 32
        return packed(replace(form, group=size), weight, name)

    stored, meant = rewrite(plain, tmp_path, Form(config, encode, 32))
    for tp in (1, 2):
        torch.testing.assert_close(logits(stored, tp=tp), logits(meant, tp=tp), rtol=1e-4, atol=1e-4)


def test_slices_that_begin_anywhere(tmp_path: Path) -> None:
    """Heads of 12 columns over four ranks: slices of o_proj begin within words and groups."""
    sizes = {**SIZES, "head_dim": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
    folder = write_checkpoint(tmp_path / "plain", "qwen3", dtype=torch.bfloat16, **sizes)
    for form in ("packed 64 with zeros", "awq", "gptq channel"):
        stored, meant = rewrite(folder, tmp_path / form, FORMS[form])
        torch.testing.assert_close(logits(stored, tp=4), logits(meant, tp=4), rtol=1e-4, atol=1e-4)


def test_a_width_whose_groups_no_size_divides(tmp_path: Path) -> None:
    """T5: 5 groups run on 2 and 4 ranks, by uneven shares that the planner counts; 8 ranks are refused before any starts."""
    folder = write_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16, **SIZES)
    stored, _ = rewrite(folder, tmp_path, FORMS["packed 128 static order"])
    shape = ModelShape.from_folder(stored)
    widths = LocalWorld(4).run(lambda group: len(build(stored, group).layers[0].mlp.down_proj.local))
    assert widths == [256, 128, 128, 128]
    require_suits(Layout(tp=4), shape)
    with pytest.raises(LayoutError, match="5 runs of 128"):
        require_suits(Layout(tp=8), shape)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_231_groups_on_every_size(tp: int) -> None:
    """T5: Qwen2-72B has 29,568 inner features, which no size divides into groups of 128."""
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    shape = ModelShape.from_config({**known("llama-3-70b"), "intermediate_size": 231 * 128, "quantization_config": quantization})
    require_suits(Layout(tp=tp), shape)
    (down,) = (each for each in layer_tensors(shape, 0) if each.name.endswith("down_proj.weight"))
    columns = [down.parts(tp, rank)[0][1] for rank in range(tp)]
    assert [at for part in columns for at in part] == list(range(231 * 128))
    assert {len(part) // 128 for part in columns} == {231 // tp, 231 // tp + 1}
    assert all(part.start % 128 == 0 for part in columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "form", ["packed 32", "packed 64 with zeros", "packed 128 static order", "packed channel", "gptq with zeros", "gptq 8 bit"]
)
def test_the_planner_counts_what_a_rank_holds(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16, **{**SIZES, "num_key_value_heads": 4})
    stored, _ = rewrite(folder, tmp_path, FORMS[form])
    shape, name = ModelShape.from_folder(stored), "bf16" if dtype == torch.bfloat16 else "fp32"
    for tp in (1, 2):
        own = LocalWorld(tp).run(lambda group: build(stored, group, dtype=dtype).layers[0])[0]
        counted = layer_bytes(shape, 0, name, Layout(tp=tp))
        assert counted == sum(parameter.nbytes for parameter in own.parameters())


@pytest.mark.parametrize("tp", [1, 2])
def test_a_16_bit_checkpoint_is_rounded_while_it_loads(tp: int, plain: Path) -> None:
    """To the nearest of 16 values of each group of 128: no value is off by more than half a step of a scale in bf16."""
    tensors = load_file(plain / "model.safetensors")

    def layer(group: Group) -> Any:
        return build(plain, group, quantization=INT4_ON_LOAD).layers[0]

    for rank, own in enumerate(LocalWorld(tp).run(layer)):
        width = 640 // tp
        meant = tensors["model.layers.0.mlp.down_proj.weight"].float()[:, rank * width : (rank + 1) * width]
        method = own.mlp.down_proj.method
        assert isinstance(method, Int4Linear)
        error = (dequantized(method.weight, torch.float32) - meant).abs()
        for begin in range(0, width, 128):
            group = slice(begin, begin + 128)
            step = meant[:, group].abs().amax(-1, keepdim=True) / 7.5
            assert bool((error[:, group] <= step * 0.54).all())
            assert float(error[:, group].mean() / step.mean()) == pytest.approx(0.25, abs=0.02)
        assert own.input_layernorm.weight.dtype == torch.float32


def test_rounding_is_said(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        build(plain, quantization=INT4_ON_LOAD)
    assert any("no AWQ" in message for message in caplog.messages)


@pytest.mark.parametrize("form", ["packed 64 with zeros", "gptq desc_act (T3)", "packed 8 bit", "on load"])
def test_dummy_weights(form: str, plain: Path, written: dict[str, tuple[Path, Path]]) -> None:
    """Random weights of any form, without its files: finite, of the magnitude that keeps activations in range, and repeatable."""
    folder, options = (plain, {"quantization": INT4_ON_LOAD}) if form == "on load" else (written[form][0], {})
    formation = Formation(folder, **options)
    formation.randomize(3)
    first = formation.step([(0, IDS)])[0]
    assert bool(torch.isfinite(first).all())
    method = formation.models[0][0].layers[0].mlp.down_proj.method
    assert float(method.dequantized(torch.float32, slice(0, 256)).std()) == pytest.approx(640**-0.5, rel=0.02)
    formation.randomize(3)
    torch.testing.assert_close(formation.step([(1, IDS)])[0], first)


@pytest.mark.parametrize(
    ("form", "name", "tensor", "match"),
    [
        ("gptq", f"{LAYER}.g_idx", torch.arange(256, dtype=torch.int32) % 8, "g_idx does not list"),
        ("gptq desc_act (T3)", f"{LAYER}.g_idx", torch.full((256,), 8, dtype=torch.int32), "none of the 8"),
        ("gptq desc_act (T3)", f"{LAYER}.g_idx", (torch.arange(256, dtype=torch.int32) // 32).flip(0), "different act orders"),
        ("packed 32", f"{LAYER}.weight_shape", torch.tensor([256, 255]), "weight_shape is"),
        ("packed 32", f"{LAYER}.weight_scale", torch.ones(256, 4).half(), "has shape"),  # T4: a scale's shape sets no group
        ("packed 32", f"{LAYER}.weight_scale", torch.full((256, 8), torch.nan).half(), "NaN or infinite"),
        ("packed 64 with zeros", f"{LAYER}.weight_zero_point", torch.zeros(256, 4, dtype=torch.int8), "has shape"),  # T13
        ("packed 32", f"{LAYER}.weight_packed", None, "weight_packed is missing"),
        ("awq", "model.layers.1.mlp.down_proj.qweight", torch.zeros(8, dtype=torch.int32), "it belongs to a quantization"),
    ],
)  # fmt: skip
def test_what_contradicts_the_configuration_is_named(
    form: str, name: str, tensor: Tensor | None, match: str, plain: Path, tmp_path: Path
) -> None:
    stored, _ = rewrite(plain, tmp_path, FORMS[form])
    change(stored, name, tensor)
    with pytest.raises(WeightError, match=match):
        build(stored)


def test_a_biasless_layer_with_a_bias_of_zeros(plain: Path, tmp_path: Path) -> None:
    """Old tools for GPTQ write one for each layer."""
    stored, _ = rewrite(plain, tmp_path, FORMS["gptq"])
    before = logits(stored)
    change(stored, "model.layers.0.self_attn.o_proj.bias", torch.zeros(256).half())
    torch.testing.assert_close(logits(stored), before)
    change(stored, "model.layers.0.self_attn.o_proj.bias", torch.ones(256).half())
    with pytest.raises(WeightError, match="this layer has no bias"):
        build(stored)


@pytest.mark.parametrize("form", ["packed 32", "awq", "gptq"])
@pytest.mark.parametrize("tp", [1, 2])
def test_layers_that_no_list_names_stay_in_16_bit_where_the_files_have_them_so(
    form: str, tp: int, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """AutoAWQ stores no list; of q, k and v all must be so."""
    stored, meant = rewrite(plain, tmp_path, FORMS[form])
    lists = {"ignore": ["lm_head"], "modules_to_not_convert": None, "dynamic": {}}
    declare(stored, {name: lists.get(name, value) for name, value in FORMS[form].config.items()})
    torch.testing.assert_close(logits(stored, tp=tp), logits(meant, tp=tp), rtol=1e-4, atol=1e-4)
    assert f"1 weights in 16 bit that its quantization does not except, {IGNORED}.weight among them" in caplog.text
    for end in ("weight_packed", "weight_scale", "weight_shape", "qweight", "qzeros", "scales", "g_idx"):
        change(stored, f"{LAYER}.{end}", None)
    change(stored, f"{LAYER}.weight", torch.zeros(256, 256))
    with pytest.raises(WeightError, match=r"q_proj.*weight"):
        build(stored)


def test_layers_in_16_bit_keep_their_memory_where_weights_are_read_anew(plain: Path, tmp_path: Path) -> None:
    """Captured graphs read it, and to check a folder changes nothing."""
    stored, _ = rewrite(plain, tmp_path, FORMS["awq"])
    declare(stored, {**FORMS["awq"].config, "modules_to_not_convert": None})
    model = build(stored)
    before = {name: (each.data_ptr(), each.clone()) for name, each in model.named_parameters()}
    assert any(isinstance(each, Unquantized) for each in model.modules())
    weights.require_complete(model, stored)
    for name, each in model.named_parameters():
        assert each.data_ptr() == before[name][0], name
        assert torch.equal(each, before[name][1]), name


def test_zero_points_of_symmetric_layers(plain: Path, tmp_path: Path) -> None:
    """Old versions of compressed-tensors write them, of zeros; others would be of another model."""
    stored, _ = rewrite(plain, tmp_path, FORMS["packed 32"])
    before = logits(stored)
    change(stored, f"{LAYER}.weight_zero_point", torch.zeros(256, 8, dtype=torch.int8))
    torch.testing.assert_close(logits(stored), before)
    change(stored, f"{LAYER}.weight_zero_point", torch.ones(256, 8, dtype=torch.int8))
    with pytest.raises(WeightError, match="weight_zero_point"):
        build(stored)


def test_a_layer_of_multi_token_prediction_in_16_bit(plain: Path, tmp_path: Path) -> None:
    """T17: what `ignore` does not name, and no layer of the model has, is not read."""
    stored, _ = rewrite(plain, tmp_path, FORMS["packed 32"])
    before = logits(stored)
    for end in ("eh_proj.weight", "mlp.gate_proj.weight", "self_attn.q_proj.weight"):
        change(stored, f"model.layers.2.{end}", torch.ones(8, 8).bfloat16())
    torch.testing.assert_close(logits(stored), before)


def test_parts_of_one_gemm_must_agree(plain: Path, tmp_path: Path) -> None:
    """T14."""
    stored, _ = rewrite(plain, tmp_path, FORMS["packed 32"])
    declare(stored, {**compressed(32), "ignore": ["lm_head", LAYER]})
    with pytest.raises(ModelError, match=r"q_proj is not quantized and .*k_proj is in INT4"):
        build(stored)


@pytest.mark.parametrize("form", ["packed 128 static order", "packed 64 with zeros", "gptq desc_act (T3)"])
def test_activations_in_fp8(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    """Of a prompt of many tokens: near what the values mean, and not equal; of few tokens equal."""
    stored, meant = written[form]
    ids = torch.randint(0, 384, (140,), generator=torch.Generator().manual_seed(2))
    expected = Formation(meant).step([(0, ids)])[0].log_softmax(-1)
    for tp, pp in ((1, 1), (2, 2), (4, 1)):
        actual = Formation(stored, tp=tp, pp=pp, int4_fp8=True).step([(0, ids)])[0].log_softmax(-1)
        divergence = float((expected.exp() * (expected - actual)).sum(-1).mean())
        assert 1e-6 < divergence < 5e-3
    few = Formation(stored, int4_fp8=True).step([(0, ids[:128])])[0]
    torch.testing.assert_close(few, Formation(meant).step([(0, ids[:128])])[0], rtol=1e-4, atol=1e-4)

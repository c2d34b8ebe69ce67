# SPDX-License-Identifier: Apache-2.0
"""gpt-oss against transformers: prefill, chunks and paged decode in mixed batches over tensor, expert and pipeline ranks, with
experts in 16 bit and in MXFP4; and a test for each part of it that is easily got wrong."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.errors import LayoutError, ModelError, WeightError
from phalanx.kernels.moe import reference
from phalanx.kernels.moe.packing import SCALES_IN_WORD, packed, tiled
from phalanx.layout import Layout
from phalanx.layout.cache import token_bytes
from phalanx.layout.families import known
from phalanx.layout.memory import stage_caches
from phalanx.layout.weights import weight_bytes
from phalanx.models import registry
from phalanx.models.slices import LayerContext
from tests.support import mxfp4_checkpoints
from tests.support.checkpoints import write_checkpoint
from tests.support.models_formation import Formation, assert_catalog_is_read, assert_every_weight_matters, run_steps
from tests.support.models_logits import STEPS, RankOf, assert_same, logits_of

LAYOUTS = [(1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 2)]
"""(tp, moe_ep, pp): each expert on one rank and split over two, whole runs of experts on one rank and two, one stage and two."""


@functools.cache
def written(form: str, root: Path) -> tuple[Path, list[Tensor], list[Tensor]]:
    """(folder, token ids per sequence, transformers' logits per sequence)."""
    plain = write_checkpoint(root / form, "gpt_oss", num_hidden_layers=3)
    if form == "16 bit":
        return plain, *logits_of(plain)
    stored, meant = mxfp4_checkpoints.rewrite(plain, root)
    return stored, *logits_of(meant)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpt_oss")


@pytest.mark.parametrize(("tp", "moe_ep", "pp"), LAYOUTS)
@pytest.mark.parametrize("form", ["16 bit", "mxfp4"])
def test_logits_equal_transformers(form: str, tp: int, moe_ep: int, pp: int, root: Path) -> None:
    folder, ids, expected = written(form, root)
    formation = Formation(folder, tp=tp, pp=pp, moe_ep=moe_ep)
    assert formation.shape.windows == (6, None, 6)
    run_steps(formation, STEPS, ids, expected, assert_same)


@pytest.mark.parametrize(("form", "tp"), [("mxfp4", 3), ("16 bit", 4)])
def test_splits_of_the_experts_lose_nothing(form: str, tp: int, tmp_path: Path) -> None:
    """In MXFP4, blocks of 32 columns stay together: 5 of them over 3 ranks are 2, 2 and 1."""
    plain = write_checkpoint(tmp_path / "plain", "gpt_oss", intermediate_size=160, num_attention_heads=12, num_key_value_heads=3)
    stored, meant = mxfp4_checkpoints.rewrite(plain, tmp_path) if form == "mxfp4" else (plain, plain)
    ids, expected = logits_of(meant)
    formation = Formation(stored, tp=tp)
    widths = [model.layers[0].mlp.experts.down_proj.columns for model in formation.models[0]]
    assert widths == ([64, 64, 32] if form == "mxfp4" else [40] * 4)
    assert_same(formation.step([(0, ids[0])])[0], expected[0])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_released_widths_are_split_without_loss(tp: int) -> None:
    from phalanx.layout.shard import in_runs

    parts = [in_runs("intermediate_size", 2880, 32, tp, index) for index in range(tp)]
    assert [at for part in parts for at in part] == list(range(2880))
    assert all(part.start % 32 == 0 for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) in (0, 32)


def test_more_ranks_than_blocks_are_refused(root: Path) -> None:
    folder, _, _ = written("mxfp4", root)
    with pytest.raises(LayoutError, match=r"exceeds the 3 runs of 64 that .*gate_up_proj=192 has"):
        Formation(folder, tp=4)


@pytest.mark.parametrize("form", ["16 bit", "mxfp4"])
def test_every_weight_changes_the_outcome(form: str, root: Path) -> None:
    """Sinks and all biases among them: an error in their arithmetic would not go unseen."""
    folder, ids, _ = written(form, root)
    formation = Formation(folder)
    names = {".".join(name.split(".")[-2:]) for name, _ in formation.models[0][0].named_parameters()}
    assert {"sinks.weight", "router.bias", "gate_up_proj.bias", "down_proj.bias", "o_proj.bias", "qkv_proj.bias"} <= names
    assert_every_weight_matters(formation, ids[1], least=5e-3)


def changed(formation: Formation, change: Callable[[Any], None], tokens: Tensor, expected: Tensor) -> float:
    """How far the log probabilities are from transformers' once `change` has been done to each layer."""
    for stage in formation.models:
        for model in stage:
            for layer in model.layers:
                change(layer)
    return float((formation.step([(0, tokens)])[0].log_softmax(-1) - expected.log_softmax(-1)).abs().max())


def without_sinks(layer: Any) -> None:
    layer.self_attn.sinks = None


def all_layers_see_everything(layer: Any) -> None:
    layer.self_attn.window = None


def swapped_windows(layer: Any) -> None:
    layer.self_attn.window = None if layer.self_attn.window else 6


def other_experts(**fields: Any) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.mlp.router.choice = layer.mlp.router.choice._replace(**fields)

    return change


def other_swiglu(**fields: Any) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.mlp.experts.swiglu = layer.mlp.experts.swiglu._replace(**fields)

    return change


def without_swiglu(layer: Any) -> None:
    layer.mlp.experts.swiglu = None


def halves_instead_of_turns(layer: Any) -> None:
    """As if the checkpoint had all gate rows before all up rows."""
    linear = layer.mlp.experts.gate_up_proj
    rows = linear.weight.view(len(linear.local), 2, -1, linear.weight.shape[1])
    linear.weight = torch.nn.Parameter(rows.transpose(1, 2).reshape_as(linear.weight), requires_grad=False)


def bias_of_down_on_each_rank(layer: Any) -> None:
    linear = layer.mlp.experts.down_proj
    if linear.bias is None:
        linear.bias = torch.nn.Parameter(torch.full((linear.weight.shape[0],), 0.3), requires_grad=False)


def bias_of_o_proj_on_each_rank(layer: Any) -> None:
    layer.self_attn.o_proj._own_bias = lambda: layer.self_attn.o_proj.bias


def no_router_bias(layer: Any) -> None:
    layer.mlp.router.bias.zero_()


TRAPS = {
    "no sinks": without_sinks,
    "no windows": all_layers_see_everything,
    "windows in the other layers": swapped_windows,
    "softmax before top-k": other_experts(renormalize=False),
    "silu(gate) * up": without_swiglu,
    "no alpha": other_swiglu(alpha=1.0),
    "no limit": other_swiglu(limit=1e9),
    "gate and up in halves": halves_instead_of_turns,
    "the bias of down on each rank": bias_of_down_on_each_rank,
    "the bias of o_proj on each rank": bias_of_o_proj_on_each_rank,
    "no bias of the router": no_router_bias,
}


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_gives_another_model(trap: str, root: Path) -> None:
    """Beside the tests above, which say that none is fallen into: what falls into it is far from transformers."""
    folder, ids, expected = written("16 bit", root)
    assert changed(Formation(folder, tp=2), lambda layer: None, ids[0], expected[0]) < 3e-4
    assert changed(Formation(folder, tp=2), TRAPS[trap], ids[0], expected[0]) > 0.02


@pytest.mark.parametrize("field", ["truncate", "attention_factor", "rope_type"])
def test_yarn_is_that_of_the_reference(field: str, root: Path, tmp_path: Path) -> None:
    """Its range is not rounded to whole pairs, and its factor multiplies cosines and sines."""
    folder, ids, expected = written("16 bit", root)
    copied = tmp_path / "changed"
    shutil.copytree(folder, copied)
    config = json.loads((copied / "config.json").read_text())
    assert config["rope_parameters"]["truncate"] is False
    other = {"truncate": True, "attention_factor": 1.0, "rope_type": "linear"}
    config["rope_parameters"][field] = other[field]
    (copied / "config.json").write_text(json.dumps(config))
    logits = Formation(copied).step([(0, ids[0])])[0]
    assert (logits.log_softmax(-1) - expected[0].log_softmax(-1)).abs().max() > 0.005


def test_mxfp4_is_dequantized_exactly() -> None:
    """All bytes with all scales of bf16's range, against transformers."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(256, 16, 16).contiguous()
    scales = (torch.arange(256) % 254).to(torch.uint8).view(256, 1).expand(256, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks.view(1, 256, 16, 16), scales.view(1, 256, 16), dtype=torch.float32)[0].t()
    values = reference.dequantize_mxfp4(tiled(packed(blocks.flatten(1))), tiled(scales, SCALES_IN_WORD), torch.float32)
    assert torch.equal(values, expected)
    assert torch.equal(values.bfloat16().float(), values)


@pytest.mark.parametrize(("scale", "why"), [(255, "NaN"), (129, r"values up to 6 \* 2\^1")])
def test_a_scale_that_no_kernel_takes_is_refused(scale: int, why: str, root: Path, tmp_path: Path) -> None:
    folder, _, _ = written("mxfp4", root)
    copied = tmp_path / "changed"
    shutil.copytree(folder, copied)
    stored = load_file(copied / "model.safetensors")
    stored["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = scale
    save_file(stored, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=rf"model\.layers\.1\.mlp\.experts\.down_proj_scales holds a scale of {scale}") as error:
        Formation(copied)
    assert re.search(why, str(error.value))


def test_the_two_forms_are_not_confused(root: Path, tmp_path: Path) -> None:
    stored, _, _ = written("mxfp4", root)
    copied = tmp_path / "changed"
    shutil.copytree(stored, copied)
    config = json.loads((copied / "config.json").read_text())
    del config["quantization_config"]
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match="down_proj_blocks"):
        Formation(copied)


def test_what_does_not_run_is_refused(root: Path) -> None:
    folder, _, _ = written("16 bit", root)
    with pytest.raises(ModelError, match=r"experts of model\.layers\.0 cannot be loaded in FP8"):
        Formation(folder, quantization=ON_LOAD)


@pytest.mark.parametrize("form", ["16 bit", "mxfp4"])
def test_the_catalog_is_what_is_on_disk_and_what_is_read(form: str, root: Path) -> None:
    assert_catalog_is_read(written(form, root)[0])


@pytest.mark.parametrize("form", ["16 bit", "mxfp4"])
def test_random_weights_are_the_same_in_any_layout(form: str, root: Path) -> None:
    folder, _, _ = written(form, root)
    tokens = torch.arange(5, 25)
    logits = []
    for tp, moe_ep in ((1, 1), (2, 1), (2, 2)):
        formation = Formation(folder, tp=tp, moe_ep=moe_ep)
        formation.randomize(seed=4)
        logits.append(formation.step([(0, tokens)])[0])
        scale = formation.models[0][0].layers[0].mlp.tensors()
        if form == "mxfp4":
            values = reference.dequantize_mxfp4(scale.gate_up, scale.gate_up_scale, torch.float32)
            assert 0.6 < float(values.std()) * 64**0.5 < 1.5
    assert_same(logits[1], logits[0])
    assert_same(logits[2], logits[0])


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
@pytest.mark.parametrize(("tp", "moe_ep"), [(1, 1), (2, 1), (4, 1), (4, 4), (8, 2)])
def test_planner_and_engine_count_the_same_bytes(name: str, tp: int, moe_ep: int) -> None:
    """Of weights and of a token in the KV cache, on the rank that has most."""
    shape = ModelShape.from_config(known(name))
    model = registry.build(
        shape, range(shape.num_layers), LayerContext(RankOf(tp), torch.bfloat16, torch.device("meta"), moe_ep=moe_ep)
    )
    layout = Layout(tp=tp, moe_ep=moe_ep)
    nbytes = sum(each.nbytes for each in [*model.parameters(), *(rotary.inv_freq for rotary in model.rotary_embs.values())])
    assert weight_bytes(shape, "bf16", layout) == (nbytes,)
    per_token = token_bytes(model.declared_caches())
    assert tuple(map(token_bytes, stage_caches(shape, "bf16", "bf16", layout))) == (per_token,)
    assert per_token * tp == {"gpt-oss-20b": 49_152, "gpt-oss-120b": 73_728}[name]


def test_the_released_models_take_what_is_published() -> None:
    """65 GB and 73,728 bytes of bf16 KV cache per token; 14 GB and 49,152."""
    for name, total, kv in (("gpt-oss-120b", 65.2e9, 73_728), ("gpt-oss-20b", 13.8e9, 49_152)):
        shape = ModelShape.from_config(known(name))
        assert sum(weight_bytes(shape, "bf16", Layout())) == pytest.approx(total, rel=0.01)
        assert shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 2 == kv
        assert shape.windows[:4] == (128, None, 128, None)
        assert shape.rope.attention_factor == pytest.approx(1.3466, abs=1e-4)
        assert not shape.rope.truncate

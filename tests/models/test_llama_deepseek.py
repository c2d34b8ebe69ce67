# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2, V3 and V3.2, GLM-4.7-Flash, GLM-5 and Mistral Small 4 against transformers: prefill, chunks and paged decode in
mixed batches over tensor, expert and pipeline ranks; and a test for each part of them that is easily got wrong."""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.errors import LayoutError, ModelError, WeightError
from phalanx.kernels.attention import indexer
from phalanx.layout import Layout
from phalanx.layout.cache import token_bytes
from phalanx.layout.families import known
from phalanx.layout.memory import stage_caches
from phalanx.layout.weights import layer_bytes, stage_layers, weight_bytes
from phalanx.models import registry
from phalanx.models.layers.attention import sdpa_latent as latent_backend
from phalanx.models.layers.attention import sparse_rows
from phalanx.models.layers.attention.plain import PlainBackend
from phalanx.models.slices import LayerContext
from tests.support import models_formation, quantized_checkpoints
from tests.support.checkpoints import write_checkpoint
from tests.support.models_deepseek import CASES, written
from tests.support.models_formation import Formation, assert_catalog_is_read, assert_every_weight_matters, run_steps
from tests.support.models_logits import STEPS, RankOf, assert_same, logits_of

LAYOUTS = [(1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 2)]
"""(tp, moe_ep, pp): moe_ep divides tp, since experts are split inside the tensor-parallel group."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek")


@pytest.mark.parametrize(("tp", "moe_ep", "pp"), LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tp: int, moe_ep: int, pp: int, root: Path) -> None:
    folder, ids, expected = written(case, root)
    formation = Formation(folder, tp=tp, pp=pp, moe_ep=moe_ep)
    run_steps(formation, STEPS, ids, expected, assert_same)
    shapes = {tuple(cache["latent"].shape[2:]) for stage in formation.caches for rank in stage for cache in rank}
    assert shapes == {(1, 24 + 8)}, "one tensor per token, the same on each rank"


def test_chosen_latents_are_gathered_a_few_queries_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_rows, "EXPANDED_BYTES", 1)
    monkeypatch.setattr(indexer, "SCORES_BYTES", 1)
    folder, ids, expected = written("v32", root)
    run_steps(Formation(folder), STEPS, ids, expected, assert_same)


def test_a_prompt_in_any_chunks_has_the_same_logits(root: Path) -> None:
    """The 9th token is the first one that does not see all."""
    folder, ids, expected = written("v32", root)
    formation = Formation(folder, blocks=256)
    for first in range(1, 14):
        parts = [formation.step([(first, part)])[0] for part in (ids[2][:first], ids[2][first:]) if len(part)]
        assert_same(torch.cat(parts), expected[2])


def test_no_more_than_topk_tokens_are_dense_attention_exactly(root: Path, tmp_path: Path) -> None:
    """Bit for bit what the back end of a model without an indexer gives; and one token more is another model."""
    folder, ids, _ = written("v32", root)
    short, dense = (
        Formation(with_config(folder, tmp_path / str(topk), index_topk=topk)).step([(0, ids[1]), (1, ids[2])])
        for topk in (25, 10**6)
    )
    assert all(torch.equal(*pair) for pair in zip(short, dense, strict=True))
    sparse = Formation(with_config(folder, tmp_path / "24", index_topk=24)).step([(0, ids[1]), (1, ids[2])])
    assert_same(sparse[1], dense[1])
    assert_same(sparse[0][:24], dense[0][:24])
    assert not torch.allclose(sparse[0][24], dense[0][24], atol=1e-3)


@pytest.mark.parametrize("kv_cache_dtype", ["model", "fp8"])
def test_the_plain_back_end_chooses_the_same(kv_cache_dtype: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ids, _ = written("v32", root)
    formation = Formation(folder, kv_cache_dtype=kv_cache_dtype)
    cache = formation.caches[0][0][0]
    assert ("index_scale" in cache.tensors) == (cache["index_key"].dtype == torch.float8_e4m3fn) == (kv_cache_dtype == "fp8")
    expected = formation.step([(0, ids[0][:30])])[0], formation.step([(0, ids[0][30:31])])[0]
    monkeypatch.setattr(models_formation, "select_backend", lambda *_: PlainBackend(latent=True, topk=8))
    formation = Formation(folder, kv_cache_dtype=kv_cache_dtype)
    assert_same(formation.step([(0, ids[0][:30])])[0], expected[0])
    assert_same(formation.step([(0, ids[0][30:31])])[0], expected[1])


def test_a_stage_begins_with_an_indexer(root: Path) -> None:
    shape = ModelShape.from_folder(written("glm5-shared", root)[0])
    assert shape.latent.indexer.computes == (True, False, True)
    assert stage_layers(shape, "fp32", 2) == (range(2), range(2, 3))
    with pytest.raises(LayoutError):
        stage_layers(shape, "fp32", 3)


def test_expanded_heads_are_made_a_few_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_backend, "EXPANDED_BYTES", 1)
    folder, ids, expected = written("v3", root)
    run_steps(Formation(folder), STEPS, ids, expected, assert_same)


def test_all_rows_absorbed_and_all_expanded_are_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt token by token, and all of it at once."""
    folder, ids, expected = written("v2", root)
    formation = Formation(folder)
    used: list[str] = []
    for name in ("attend_absorbed", "attend_expanded"):
        real = getattr(latent_backend, name)
        monkeypatch.setattr(latent_backend, name, lambda *args, n=name, f=real: (used.append(n), f(*args))[1])
    one_by_one = torch.cat([formation.step([(0, ids[1][at : at + 1])])[0] for at in range(len(ids[1]))])
    assert set(used) == {"attend_absorbed"}
    used.clear()
    assert_same(one_by_one, formation.step([(1, ids[1])])[0])
    assert set(used) == {"attend_expanded"}
    assert_same(one_by_one, expected[1])


@pytest.mark.parametrize("case", ["v2", "v2-lite", "v3", "glm-lite", "glm5-shared", "mistral4"])
def test_every_weight_changes_the_outcome(case: str, root: Path) -> None:
    folder, ids, _ = written(case, root)
    assert_every_weight_matters(Formation(folder), ids[1], least=2e-3)


Change = Callable[[Any], None]
"""Done to each layer."""


def other_latent(**fields: Any) -> Change:
    def change(layer: Any) -> None:
        layer.self_attn.latent = replace(layer.self_attn.latent, **fields)

    return change


def other_experts(**fields: Any) -> Change:
    def change(layer: Any) -> None:
        if hasattr(layer.mlp, "config"):
            layer.mlp.router.choice = layer.mlp.router.choice._replace(**fields)

    return change


def other_scoring(**fields: Any) -> Change:
    def change(layer: Any) -> None:
        if hasattr(layer.mlp, "config"):
            router = layer.mlp.router
            router.choice = router.choice._replace(scoring=router.choice.scoring._replace(**fields))

    return change


def values_before_keys(layer: Any) -> None:
    up = layer.self_attn.kv_b_proj.weight
    up.copy_(torch.roll(up.clone(), -layer.self_attn.latent.nope, dims=1))


def eps_of_the_model(layer: Any) -> None:
    """That of config.json, which is 0.05 here."""
    layer.self_attn.kv_a_layernorm.eps = layer.self_attn.q_a_layernorm.eps = layer.input_layernorm.eps


def no_norm_of_the_latent(layer: Any) -> None:
    """Values far below eps are left in proportion: their norm is a factor."""
    norm = layer.self_attn.kv_a_layernorm
    norm.eps = 1e6
    norm.weight.mul_(1e3)


def scaled_shared_experts(layer: Any) -> None:
    if hasattr(layer.mlp, "shared_experts"):
        layer.mlp.shared_experts.down_proj.method.weight.mul_(layer.mlp.config.scoring.scale)


def no_shared_experts(layer: Any) -> None:
    if hasattr(layer.mlp, "shared_experts"):
        layer.mlp.shared_experts = None


def shared_experts_on_each_rank(layer: Any) -> None:
    """As if each rank added all of them."""
    if hasattr(layer.mlp, "shared_experts"):
        layer.mlp.shared_experts.down_proj.method.weight.mul_(2.0)


def no_bias(layer: Any) -> None:
    if hasattr(layer.mlp, "router"):
        layer.mlp.router.e_score_correction_bias.zero_()


def other_indexer(**fields: Any) -> Change:
    def change(layer: Any) -> None:
        layer.self_attn.indexer.config = replace(layer.self_attn.indexer.config, **fields)

    return change


def no_bias_of_the_index_keys(layer: Any) -> None:
    layer.self_attn.indexer.k_norm_bias.weight.zero_()


def no_weights_of_the_index_heads(layer: Any) -> None:
    layer.self_attn.indexer.weights_proj.weight.fill_(1.0)


TRAPS: dict[str, tuple[str, Change]] = {
    "neighbours in V3.2's indexer": ("v32", other_indexer(interleaved=True)),
    "halves in GLM-5's indexer": ("glm5", other_indexer(interleaved=False)),
    "no bias of the indexer's keys": ("v32", no_bias_of_the_index_keys),
    "heads of the indexer weighted alike": ("v32", no_weights_of_the_index_heads),
    "softmax scale without YaRN's factor": ("v3", other_latent(softmax_scale=24**-0.5)),
    "softmax scale of the cached width": ("v3", other_latent(softmax_scale=32**-0.5)),
    "halves instead of neighbours": ("v3", other_latent(interleaved=False)),
    "halves instead of neighbours in V2": ("v2", other_latent(interleaved=False)),
    "neighbours instead of halves": ("v3-stacked-one-group", other_latent(interleaved=True)),
    "values before keys in kv_b_proj": ("v3", values_before_keys),
    "eps of config.json in the latents' norms": ("v2", eps_of_the_model),
    "no norm of the latent": ("v3", no_norm_of_the_latent),
    "no routed_scaling_factor": ("v2", other_scoring(scale=1.0)),
    "no routed_scaling_factor in V3": ("v3", other_scoring(scale=1.0)),
    "renormalized weights in V2": ("v2", other_experts(renormalize=True)),
    "no renormalized weights in V3": ("v3", other_experts(renormalize=False)),
    "softmax in V3": ("v3", other_scoring(function="softmax")),
    "sigmoid in V2": ("v2", other_scoring(function="sigmoid")),
    "no groups": ("v2", other_scoring(groups=1, top_groups=1)),
    "no groups in V3": ("v3", other_scoring(groups=1, top_groups=1)),
    "no bias of the choice": ("v3", no_bias),
    "shared experts scaled as the routed": ("v2", scaled_shared_experts),
    "no shared experts": ("v3", no_shared_experts),
    "shared experts on each rank": ("v3", shared_experts_on_each_rank),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_gives_another_model(trap: str, root: Path) -> None:
    """Beside the tests above, which say that none is fallen into: what falls into it is far from transformers."""
    case, change = TRAPS[trap]
    folder, ids, expected = written(case, root)
    formation = Formation(folder, tp=2)
    assert_same(formation.step([(0, ids[0])])[0], expected[0])
    for model in formation.models[0]:
        for layer in model.layers:
            change(layer)
    logits = formation.step([(1, ids[0])])[0]
    assert (logits.log_softmax(-1) - expected[0].log_softmax(-1)).abs().max() > 0.02


def with_config(folder: Path, target: Path, **fields: Any) -> Path:
    """A copy of the checkpoint whose config.json says something else."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


@pytest.mark.parametrize("field", ["mscale", "mscale_all_dim", "rope_type"])
def test_yarn_is_that_of_the_reference(field: str, root: Path, tmp_path: Path) -> None:
    """mscale and mscale_all_dim cancel out in cosines and sines; the latter is in the softmax's scale, squared."""
    folder, ids, expected = written("v3", root)
    shape = ModelShape.from_folder(folder)
    assert shape.rope.attention_factor == 1.0
    assert shape.latent.softmax_scale == pytest.approx(24**-0.5 * (0.1 * 0.7 * 2.0794415 + 1) ** 2)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    other = {**rope, field: {"mscale": 2.1, "mscale_all_dim": 0.0, "rope_type": "linear"}[field]}
    logits = Formation(with_config(folder, tmp_path / "changed", rope_parameters=other)).step([(0, ids[0])])[0]
    assert (logits.log_softmax(-1) - expected[0].log_softmax(-1)).abs().max() > 0.005


def test_the_released_softmax_scales() -> None:
    for name, factor in (("deepseek-v2-lite", 1.5896), ("deepseek-v2", 1.5896), ("deepseek-v3", 1.8739)):
        shape = ModelShape.from_config(known(name))
        assert shape.latent.softmax_scale * 192**0.5 == pytest.approx(factor, abs=1e-4)
        assert shape.rope.attention_factor == 1.0
        assert shape.rotary_in(0).rotated == 64
        assert shape.max_positions == 163_840


def test_the_router_is_in_fp32(root: Path) -> None:
    """Of a model in bf16: from its weight and input, both widened."""
    folder, _, _ = written("v3", root)
    gate = Formation(folder).models[0][0].layers[1].mlp.router.to(torch.bfloat16)
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    logits = gate(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, x.float() @ gate.weight.float().t())
    assert not torch.equal(logits, (x @ gate.weight.t()).float())


def test_the_bias_stays_in_fp32(root: Path) -> None:
    shape = ModelShape.from_folder(written("v3", root)[0])
    model = registry.build(shape, range(3), LayerContext(RankOf(1), torch.bfloat16, torch.device("meta")))
    dtypes = {name.rsplit(".", 1)[-1]: weight.dtype for name, weight in model.named_parameters()}
    assert dtypes == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}


def test_multi_token_prediction_is_skipped_with_a_line(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, ids, expected = written("v3", root)
    copied = Path(shutil.copytree(folder, tmp_path / "mtp"))
    stored = load_file(copied / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(4, 4), "model.layers.3.embed_tokens.weight": torch.zeros(4, 4)}
    save_file({**stored, **extra}, copied / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, logger="phalanx"):
        logits = Formation(copied).step([(0, ids[0])])[0]
    assert_same(logits, expected[0])
    lines = [record.getMessage() for record in caplog.records if "multi-token" in record.getMessage()]
    (line,) = lines
    assert line.startswith("2 tensors of multi-token prediction (model.layers.3) are not loaded with the model")
    without = with_config(copied, tmp_path / "without", num_nextn_predict_layers=0)
    assert_same(Formation(without).step([(0, ids[0])])[0], expected[0])
    save_file({**stored, "model.layers.4.mlp.up_proj.weight": torch.zeros(4, 4)}, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=r"model\.layers\.4\.mlp\.up_proj\.weight.*num_hidden_layers=3"):
        Formation(copied)


@pytest.mark.parametrize(("case", "fields", "message"), [
    ("v2", {"norm_topk_prob": True}, "norm_topk_prob=true"),
    ("v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc', which is not supported"),
    ("v3", {"topk_method": "greedy"}, "topk_method='greedy'.*it may be 'noaux_tc'"),
    ("v3", {"scoring_func": "softmax"}, "scoring_func='softmax'.*it may be 'sigmoid'"),
    ("v3", {"n_group": 3}, "n_group=3 and topk_group=2 for 8 experts"),
    ("v3", {"n_group": 8}, "n_group=8 and topk_group=2 for 8 experts"),
    ("v3", {"topk_group": 1}, "num_experts_per_tok=3"),
    ("v3", {"attention_bias": True}, "attention_bias=True"),
    ("v32", {"q_lora_rank": None}, "q_lora_rank=null"),
    ("v32", {"index_head_dim": 6}, "index_head_dim=6"),
    ("glm5-shared", {"indexer_types": ["shared", "full", "full"]}, "indexer_types.*no layer before it"),
    ("glm5-shared", {"indexer_types": ["full", "half", "full"]}, "half among them"),
    ("glm5-shared", {"indexer_types": None, "index_topk_pattern": "FF"}, "index_topk_pattern='FF'"),
    ("v3", {"num_key_value_heads": 2}, "num_key_value_heads=2, and num_attention_heads=4"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused(case: str, fields: dict[str, Any], message: str, root: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        ModelShape.from_folder(with_config(written(case, root)[0], tmp_path / "changed", **fields))


def test_fp16_and_more_ranks_than_heads_are_refused(root: Path) -> None:
    folder, _, _ = written("v3", root)
    shape = ModelShape.from_folder(folder)
    with pytest.raises(ModelError, match="cannot run in fp16"):
        registry.build(shape, range(3), LayerContext(RankOf(1), torch.float16, torch.device("cpu")))
    with pytest.raises(LayoutError, match="tensor_parallel_size=8 does not divide num_attention_heads=4"):
        Formation(folder, tp=8)


def test_layers_are_dense_as_config_says(root: Path, tmp_path: Path) -> None:
    folder, _, _ = written("v3", root)
    for fields, dense in (({}, (0,)), ({"first_k_dense_replace": 2}, (0, 1)), ({"moe_layer_freq": 2}, (0, 1))):
        shape = ModelShape.from_folder(with_config(folder, tmp_path / "-".join(["x", *fields]), **fields))
        assert shape.experts.dense_layers == dense


@pytest.mark.parametrize("case", CASES)
def test_the_catalog_is_what_is_on_disk_and_what_is_read(case: str, root: Path) -> None:
    stacked = "stacked" in case or case.startswith("mistral4")  # experts in two tensors of a layer, as released
    assert_catalog_is_read(written(case, root)[0], is_on_disk=not stacked)


FP8_SIZES: dict[str, Any] = {
    "hidden_size": 144, "moe_intermediate_size": 192, "n_shared_experts": 1, "qk_nope_head_dim": 36, "v_head_dim": 24, "std": 0.1,
}  # fmt: skip


@functools.cache
def in_fp8(family: str, root: Path) -> tuple[Path, list[Tensor], list[Tensor]]:
    """As `written`, in blocks of 128 x 128; the logits are those of the dequantized checkpoint. A block ends within the third head
    of kv_b_proj, which has 60 rows for each, 36 of keys; and within its 136 columns."""
    plain = write_checkpoint(root / f"{family}-fp8-plain", family, num_hidden_layers=3, kv_lora_rank=136, **FP8_SIZES)
    stored, meant = quantized_checkpoints.rewrite_by_128(plain, root / f"{family}-fp8")
    return stored, *logits_of(meant)


@pytest.mark.parametrize(("tp", "moe_ep", "pp"), LAYOUTS)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "deepseek_v32"])
def test_block_scaled_fp8_is_the_dequantized_model(family: str, tp: int, moe_ep: int, pp: int, root: Path) -> None:
    """With 16-bit activations. Ranks hold parts of blocks: of an expert 96 or 48 of 192 columns, of kv_b_proj 120 or 60 of 240
    rows, of o_proj 48 or 24 of 96 columns; kv_a_proj_with_mqa's 144 rows end in an eighth of a block."""
    folder, ids, expected = in_fp8(family, root)
    formation = Formation(folder, tp=tp, moe_ep=moe_ep, pp=pp, fp8_gemm=False)
    attention = formation.models[0][0].layers[0].self_attn
    assert attention.qkv_a_proj.method.weight.dtype == torch.float8_e4m3fn
    assert attention.kv_b_proj.weight.dtype == torch.float32
    run_steps(formation, STEPS, ids, expected, assert_same)


def test_kv_b_proj_is_dequantized_before_it_is_split(root: Path) -> None:
    """The trap of its blocks: the rows of the second of two ranks begin 8 rows before a block ends, and not with a block."""
    folder, _, _ = in_fp8("deepseek_v3", root)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.kv_b_proj"
    scale, values = stored[f"{name}.weight_scale_inv"], stored[f"{name}.weight"].float()
    assert scale.shape == (2, 2)
    meant = values * scale.repeat_interleave(128, 0)[:240].repeat_interleave(128, 1)[:, :136]
    ups = [model.layers[0].self_attn.kv_b_proj.weight for model in Formation(folder, tp=2, fp8_gemm=False).models[0]]
    assert torch.equal(torch.cat(ups).view(240, 136), meant)
    by_first_block = values[120:] * scale[0].repeat_interleave(128)[:136]
    assert not torch.allclose(ups[1].view(120, 136), by_first_block, rtol=0.01)


@pytest.mark.parametrize("form", ["modelopt", "compressed dynamic", "one scale"])
def test_other_forms_of_fp8_are_the_dequantized_model(form: str, tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "deepseek_v3", num_hidden_layers=2, **FP8_SIZES)
    stored, meant = quantized_checkpoints.rewrite(plain, tmp_path, form)
    tokens = torch.arange(5, 30)
    expected = Formation(meant).step([(0, tokens)])[0]
    for tp in (1, 2):
        assert_same(Formation(stored, tp=tp, fp8_gemm=False).step([(0, tokens)])[0], expected)


def test_fp8_gemms_and_an_fp8_cache_stay_near(root: Path) -> None:
    folder, ids, expected = in_fp8("deepseek_v3", root)
    for options in ({"fp8_gemm": True}, {"fp8_gemm": False, "kv_cache_dtype": "fp8"}):
        formation = Formation(folder, tp=2, **options)
        logits = formation.step([(0, ids[0][:30])])[0]
        logits = torch.cat([logits, formation.step([(0, ids[0][30:31])])[0]])
        error = (logits.log_softmax(-1) - expected[0][:31].log_softmax(-1)).abs().mean()
        assert 1e-3 < error < 0.3
    assert formation.caches[0][0][0]["latent"].dtype == torch.float8_e4m3fn


def test_weights_quantized_on_load_stay_near(root: Path) -> None:
    in_fp8("deepseek_v3", root)
    folder = root / "deepseek_v3-fp8-plain"
    ids, expected = logits_of(folder)
    formation = Formation(folder, tp=2, quantization=ON_LOAD, fp8_gemm=False)
    assert formation.models[0][0].layers[0].self_attn.kv_b_proj.weight.dtype == torch.float32
    error = (formation.step([(0, ids[0])])[0].log_softmax(-1) - expected[0].log_softmax(-1)).abs().mean()
    assert 1e-3 < error < 0.3


def test_random_weights_are_the_same_in_any_layout(root: Path) -> None:
    folder, _, _ = written("v3", root)
    tokens = torch.arange(5, 25)
    logits = []
    for tp, moe_ep in ((1, 1), (2, 1), (2, 2)):
        formation = Formation(folder, tp=tp, moe_ep=moe_ep)
        formation.randomize(seed=4)
        logits.append(formation.step([(0, tokens)])[0])
    assert_same(logits[1], logits[0])
    assert_same(logits[2], logits[0])


KV_BYTES = {
    "deepseek-v2-lite": 31_104, "deepseek-v2": 69_120, "deepseek-v3": 70_272, "deepseek-v3.2": 85_888, "glm-5": 109_824,
    "glm-5.2": 95_232,
}  # fmt: skip
"""Of a token's cache in bf16: 576 elements for each layer, and 128 for one with an indexer."""


@pytest.mark.parametrize("name", KV_BYTES)
@pytest.mark.parametrize(("tp", "moe_ep"), [(1, 1), (2, 1), (4, 4), (8, 2)])
def test_planner_and_engine_count_the_same_bytes(name: str, tp: int, moe_ep: int) -> None:
    """Of weights and of a token in the KV cache, on the rank that has most. The cache is the same on all ranks."""
    shape = ModelShape.from_config(known(name))
    layers = range(min(shape.num_layers, 6))  # the rest are like the last of them
    model = registry.build(shape, layers, LayerContext(RankOf(tp), torch.bfloat16, torch.device("meta"), moe_ep=moe_ep))
    layout = Layout(tp=tp, moe_ep=moe_ep)
    nbytes = [sum(weight.nbytes for weight in layer.parameters()) for layer in model.layers]
    assert nbytes == [layer_bytes(shape, layer, "bf16", layout) for layer in layers]
    caches = model.declared_caches()
    assert tuple(map(token_bytes, stage_caches(shape, "bf16", "bf16", layout))) == (KV_BYTES[name],)
    if name != "glm-5.2":
        assert token_bytes(caches[:1]) * shape.num_layers == KV_BYTES[name]
        assert len(set(caches)) == 1


def test_the_released_models_take_what_is_published() -> None:
    """671 B parameters, in FP8 but for embedding, head and what is absorbed: 673 GB; V2 in 16 bit 471 GB, V2-Lite 31 GB."""
    for name, total in (("deepseek-v3", 673e9), ("deepseek-v2", 471e9), ("deepseek-v2-lite", 31.4e9)):
        shape = ModelShape.from_config(known(name))
        assert sum(weight_bytes(shape, "bf16", Layout())) == pytest.approx(total, rel=0.04)

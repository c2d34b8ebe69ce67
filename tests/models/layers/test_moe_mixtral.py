# SPDX-License-Identifier: Apache-2.0
"""Families with experts against transformers: prefill, chunks and paged decode in mixed batches, over tensor, expert and pipeline
ranks, in both forms that checkpoints have on disk."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx import kernels
from phalanx.comm import tuned_group
from phalanx.comm.group import Group
from phalanx.comm.sequence_parallel import unshard
from phalanx.config.quantization import ON_LOAD
from phalanx.errors import ModelError, WeightError
from phalanx.kernels.moe import reference
from tests.support import quantized_checkpoints
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.models_formation import Formation, ShardedFormation, run_steps
from tests.support.models_logits import STEPS, assert_same, logits_of

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral-stacked-window": ("mixtral", {"stacked": True, "sliding_window": 7, "num_experts_per_tok": 1}),
    "qwen3": ("qwen3_moe", {}),
    "qwen3-dense-layers-as-they-are": ("qwen3_moe", {
        "stacked": True, "norm_topk_prob": False, "mlp_only_layers": [1], "num_experts_per_tok": 8,
    }),
    "qwen3-every-second": ("qwen3_moe", {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6}),
}  # fmt: skip
LAYOUTS = [(1, 1, 1), (2, 1, 2), (4, 2, 1), (4, 4, 2)]
"""(tp, moe_ep, pp)"""


@functools.cache
def written(case: str, root: Path) -> tuple[Path, list[Tensor], list[Tensor]]:
    """(folder, token ids per sequence, transformers' logits per sequence)."""
    family, overrides = CASES[case]
    folder = write_checkpoint(root / case, family, num_hidden_layers=3, **overrides)
    return folder, *logits_of(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.mark.parametrize(("tp", "moe_ep", "pp"), LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tp: int, moe_ep: int, pp: int, root: Path) -> None:
    folder, ids, expected = written(case, root)
    formation = Formation(folder, tp=tp, pp=pp, moe_ep=moe_ep)
    run_steps(formation, STEPS, ids, expected, assert_same)
    sparse = [layer.mlp for stage in formation.models for layer in stage[0].layers if hasattr(layer.mlp, "load")]
    shape = formation.shape
    assert len(sparse) == shape.num_layers - len(shape.experts.dense_layers)
    tokens = sum(sum(step.values()) for step in STEPS)  # padding reaches no expert
    loads = [
        sum(int(rank.layers[i].mlp.load.sum()) for rank in stage[:: tp // moe_ep])
        for stage in formation.models
        for i, layer in enumerate(stage[0].layers)
        if hasattr(layer.mlp, "load")
    ]
    assert loads == [tokens * shape.experts.per_token] * len(sparse)


def test_on_disk_each_form_is_what_it_says(root: Path) -> None:
    for case, name in (
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("mixtral-stacked-window", "model.layers.0.mlp.experts.down_proj"),
    ):
        with safe_open(written(case, root)[0] / "model.safetensors", framework="pt") as reader:
            assert name in set(reader.keys())


@pytest.mark.parametrize("shares", ["nothing", "one token", "everything"])
def test_experts_without_and_with_all_tokens(shares: str, tmp_path: Path) -> None:
    """An expert that no token reaches, experts that one token reaches, and experts that all reach."""
    top_k = 1 if shares == "nothing" else 2
    folder = write_checkpoint(tmp_path, "mixtral", num_hidden_layers=2, num_experts_per_tok=top_k)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(".gate.weight")]:
        if shares == "everything":  # ties go to the first experts, here; elsewhere to any, so that all are alike
            weights[name].zero_()
        if shares == "nothing":
            weights[name][3] = weights[name][:3].mean(0)  # never the largest
    if shares == "everything":
        for name in [name for name in weights if ".experts." in name]:
            weights[name] = weights[re.sub(r"experts\.\d", "experts.0", name)].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids, expected = logits_of(folder)
    formation = Formation(folder, tp=2, moe_ep=2)
    sequences = range(1) if shares == "one token" else range(3)
    for sequence in sequences:
        tokens = ids[sequence][:1] if shares == "one token" else ids[sequence]
        assert_same(formation.step([(sequence, tokens)])[0], expected[sequence][: len(tokens)])
    load = torch.cat([model.layers[0].mlp.load for model in formation.models[0]])
    if shares == "one token":
        assert sorted(load.tolist()) == [0, 0, 1, 1]
    elif shares == "everything":
        assert load.tolist() == [78, 78, 0, 0]
    else:
        assert load[3] == 0
        assert load.sum() == 78


def test_a_router_that_is_not_renormalized_gives_other_logits(root: Path, tmp_path: Path) -> None:
    """The trap of norm_topk_prob: the same weights, read with the other value, are another model."""
    folder, ids, expected = written("qwen3", root)
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in folder.iterdir():
        text = file.read_bytes()
        (changed / file.name).write_bytes(text.replace(b'"norm_topk_prob": true', b'"norm_topk_prob": false'))
    logits = Formation(changed).step([(0, ids[1])])[0]
    assert (logits.log_softmax(-1) - expected[1].log_softmax(-1)).abs().max() > 0.1


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mixtral")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight is missing"):
        Formation(folder)


@pytest.mark.parametrize("form", ["modelopt", "compressed static", "compressed dynamic", "one scale", "blocks"])
def test_a_checkpoint_in_fp8_gives_what_its_values_mean(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16-bit activations: exactly the model of the dequantized weights. gate and up have scales of their own, and ranks hold
    parts of blocks: 192 inner columns are one and a half, 96 of a rank three quarters of one."""
    monkeypatch.setattr(quantized_checkpoints, "BLOCK", (128, 128))
    monkeypatch.setitem(quantized_checkpoints.FORMS["blocks"][0], "weight_block_size", [128, 128])
    sizes = {"hidden_size": 144, "moe_intermediate_size": 192, "num_attention_heads": 4, "std": 0.1}
    plain = write_checkpoint(tmp_path / "plain", "qwen3_moe", **sizes)
    stored, meant = quantized_checkpoints.rewrite(plain, tmp_path, form)
    tokens = torch.randint(0, VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(1))
    expected = Formation(meant).step([(0, tokens)])[0]
    for tp, moe_ep in ((1, 1), (2, 1), (2, 2), (4, 2)):
        assert_same(Formation(stored, tp=tp, moe_ep=moe_ep, fp8_gemm=False).step([(0, tokens)])[0], expected)


def test_fp8_gemms_of_experts_stay_near(root: Path) -> None:
    """One layer's experts, quantized on load: what they give in 16 bit and in FP8, beside their dequantized weights."""
    folder, _, _ = written("mixtral", root)
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(5))
    for fp8_gemm in (False, True):
        block = Formation(folder, quantization=ON_LOAD, fp8_gemm=fp8_gemm).models[0][0].layers[0].mlp
        tensors = block.tensors()
        assert tensors.fp8_gemm == fp8_gemm
        plain = replace(
            tensors, gate_up=kernels.dequantize(tensors.gate_up, tensors.gate_up_scale, torch.float32), gate_up_scale=None,
            down=kernels.dequantize(tensors.down, tensors.down_scale, torch.float32), down_scale=None, fp8_gemm=False,
        )  # fmt: skip
        expected = reference.fused_experts(x, plain, reference.topk_softmax(block.router(x), 2, True))
        error = (block.partial_sum(x) - expected).norm() / expected.norm()
        assert error < 1e-6 if not fp8_gemm else 1e-3 < error < 0.06


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("tp", "moe_ep"), [(2, 1), (4, 2)])
def test_the_residual_stays_sharded_around_experts_in_fp8(
    family: str, tp: int, moe_ep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm before a router is needed in 16 bit and in FP8: sequence parallelism gives both, and no layer gathers the
    residual. Logits are those without it, to the last bit."""
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 12, "num_key_value_heads": 12}
    sizes |= {"moe_intermediate_size": 192} if family == "qwen3_moe" else {}
    folder = write_checkpoint(tmp_path, family, num_hidden_layers=3, **sizes)
    gathered = list[object]()

    def unsharded(x: Tensor, group: Group) -> Tensor:
        gathered.append(x)
        return unshard(x, group)

    monkeypatch.setattr(tuned_group, "unshard", unsharded)
    options = {"tp": tp, "moe_ep": moe_ep, "quantization": ON_LOAD, "fp8_gemm": True}
    plain, sharded = Formation(folder, **options), ShardedFormation(folder, **options)
    tokens = torch.arange(11) % 7
    for step in ([(0, tokens), (1, tokens[:3])], [(0, tokens[:1]), (1, tokens[:2])], [(1, tokens[:1])]):
        for logits, wanted in zip(sharded.step(step, padding=1), plain.step(step, padding=1), strict=True):
            assert torch.equal(logits, wanted)
    assert not gathered, f"{len(gathered)} residuals were gathered"
    calls = sharded.groups[0].calls
    assert calls["RS_NORM_AG/RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE"] == 3 * 3, calls


def test_blocks_of_another_width_are_refused(tmp_path: Path) -> None:
    stored, _ = quantized_checkpoints.rewrite(write_checkpoint(tmp_path / "plain", "qwen3_moe"), tmp_path, "blocks")
    with pytest.raises(ModelError, match="a scale for each 20 columns"):
        Formation(stored)

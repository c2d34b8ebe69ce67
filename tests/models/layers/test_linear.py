# SPDX-License-Identifier: Apache-2.0
"""Split layers are the whole layer: over ranks, with the residual and the norm that follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.config.quantization import ON_LOAD
from phalanx.layout import shard
from phalanx.layout.families import WeightTensor
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint
from tests.support.models_formation import Formation, ShardedFormation
from tests.support.models_layers import columns_of, declared, fill

CPU = torch.device("cpu")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_row_parallel_adds_its_bias_once(tp: int, bias: bool, normed: bool) -> None:
    tensors = {"o.weight": torch.randn(12, 16), "o.bias": 5 * torch.randn(12), "n.weight": torch.rand(12)}
    x, residual = torch.randn(5, 16), torch.randn(5, 12)

    def act(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        context, local = LayerContext(group, torch.float32, CPU), shard.even("inputs", 16, group.size, group.rank)
        layer, norm = (
            RowParallelLinear(columns_of("o", 16, 12, local), bias=bias, context=context),
            RmsNorm("n", 12, 1e-5, context=context),
        )
        fill(layer, tensors)
        fill(norm, tensors)
        done: tuple[torch.Tensor, torch.Tensor] = layer(x[:, local.start : local.stop], residual, norm if normed else None)
        return done

    total = residual + F.linear(x, tensors["o.weight"], tensors["o.bias"] if bias else None)
    expected = F.rms_norm(total, (12,), tensors["n.weight"], 1e-5) if normed else total
    with torch.inference_mode():
        for out, new_residual in LocalWorld(tp).run(act):
            torch.testing.assert_close(new_residual, total, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("q", "kv", "tp"), [(12, 3, 4), (12, 3, 2), (6, 2, 3), (8, 1, 4), (4, 4, 2)])
def test_qkv_holds_the_heads_of_its_rank(q: int, kv: int, tp: int) -> None:
    names = {"a.q_proj": q, "a.k_proj": kv, "a.v_proj": kv}
    tensors = {f"{name}.weight": torch.randn(heads * 4, 10) for name, heads in names.items()}
    tensors |= {f"{name}.bias": torch.randn(heads * 4) for name, heads in names.items()}
    weights = [
        WeightTensor(
            name, tuple(each.shape), "heads" if "q_proj" in name else "kv_heads", "attention", heads=q, kv_heads=kv
        )
        for name, each in tensors.items()
    ]  # fmt: skip
    x = torch.randn(3, 10)
    full = [F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]).view(3, -1, 4) for name in names]

    def act(group: Group) -> None:
        heads_here = shard.heads(q, kv, tp, group.rank)
        context = declared(LayerContext(group, torch.float32, CPU), *weights)
        layer = ColumnParallelLinear.of(*names, context=context)
        fill(layer, tensors)
        out = layer(x).view(3, -1, 4)
        picked = [
            full[0][:, heads_here.q.start : heads_here.q.stop],
            full[1][:, list(heads_here.kv)],
            full[2][:, list(heads_here.kv)],
        ]
        torch.testing.assert_close(out, torch.cat(picked, dim=1), rtol=1e-5, atol=1e-5)

    with torch.inference_mode():
        LocalWorld(tp).run(act)


class _GemmRs(ShardedFormation):
    """GEMM outputs of three tokens and more are written to the ranks that sum them; other values are NaN."""

    gemm_rs_min_tokens = 3


@pytest.mark.parametrize(("family", "tp", "pp"), [("llama", 2, 1), ("llama", 4, 2), ("qwen2", 2, 2), ("qwen3", 3, 1)])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_model_whose_rows_have_owners_says_the_same(family: str, tp: int, pp: int, fp8: bool, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 96, "intermediate_size": 192}
    folder = write_checkpoint(tmp_path, family, **heads)
    options = {"quantization": ON_LOAD if fp8 else None, "fp8_gemm": fp8}
    unsharded = Formation(folder, tp=tp, pp=pp, **options)
    owning = ShardedFormation(folder, tp=tp, pp=pp, **options)
    tokens = torch.arange(11) % 7
    for step in ([(0, tokens), (1, tokens[:3])], [(0, tokens[:1]), (1, tokens[:2])], [(1, tokens[:1])]):
        for logits, wanted in zip(owning.step(step, padding=1), unsharded.step(step, padding=1), strict=True):
            assert not logits.isnan().any()
            assert torch.equal(logits, wanted)
    calls = owning.groups[0].calls
    assert any("RS_NORM_AG" in name and ("FP8" in name) == fp8 for name in calls), calls


@pytest.mark.parametrize(("family", "tp", "pp"), [("llama", 2, 1), ("qwen3", 3, 2)])
def test_a_model_with_gemm_rs_gives_the_same(family: str, tp: int, pp: int, tmp_path: Path) -> None:
    """But for the order of sums in a GEMM of fewer rows on a CPU. Steps of two tokens run RS_NORM_AG."""
    folder = write_checkpoint(
        tmp_path, family, num_attention_heads=12, num_key_value_heads=12, hidden_size=96, intermediate_size=192
    )
    plain, gemm_rs = Formation(folder, tp=tp, pp=pp), _GemmRs(folder, tp=tp, pp=pp)
    tokens = torch.arange(11) % 7
    for step in ([(0, tokens), (1, tokens[:3])], [(0, tokens[:1]), (1, tokens[:1])], [(1, tokens[:4])]):
        for logits, wanted in zip(gemm_rs.step(step), plain.step(step), strict=True):
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert set(gemm_rs.groups[0].calls) >= {"RS_NORM_AG/RESIDUAL_RMS_NORM", "GEMM_RS/RESIDUAL_RMS_NORM"}

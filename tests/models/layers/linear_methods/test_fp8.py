# SPDX-License-Identifier: Apache-2.0
"""Layers in FP8: who quantizes what, and that it does not matter who does."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx import kernels
from phalanx.comm.group import Group, ResidualRmsNorm, Solo
from phalanx.comm.local import LocalWorld
from phalanx.comm.sequence_parallel import unshard
from phalanx.config.quantization import ON_LOAD, Quantization
from phalanx.kernels import reference
from phalanx.kernels.gemm import block_gemm
from phalanx.kernels.scaled_tensors import Quantized, Unscaled
from phalanx.layout import shard
from phalanx.models import weights
from phalanx.models.layers.activation import NormAndQuantized
from phalanx.models.layers.embedding import VocabParallelEmbedding
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.linear_methods import fp8
from phalanx.models.layers.linear_methods.choose import describe
from phalanx.models.layers.linear_methods.fp8_block import Fp8Block
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext, Sliced, WeightPart
from tests.support.checkpoints import write_checkpoint
from tests.support.comm_poisoned import poisoned
from tests.support.models_formation import CPU, Formation
from tests.support.models_layers import columns_of, merged, rows_of

CONTEXT = LayerContext(Solo(), torch.float32, CPU, ON_LOAD, fp8_gemm=True)


def fill(*layers: Sliced) -> None:
    for layer in layers:
        for part in weights.slices(layer):
            generator = torch.Generator().manual_seed(len(part.name))
            tensor = torch.rand(part.shape, generator=generator) - (0.5 if len(part.shape) == 2 else 0.0)
            part.store(tensor.narrow(part.dim, part.begin, part.target.shape[part.dim]))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_the_norm_behind_a_sum_quantizes_for_the_next_layer(static: bool, tp: int, bias: bool) -> None:
    """(values, scale, residual) come from the all-reduce, and the output of the next layer is that of the plain norm, quantized
    then."""
    x, residual = torch.randn(5, 64), torch.randn(5, 32)
    quantization = replace(ON_LOAD, activations="static" if static else "token")

    def act(group: Group) -> None:
        context = replace(CONTEXT, group=group, quantization=quantization)
        local = shard.even("inputs", 64, tp, group.rank)
        out, norm = (
            RowParallelLinear(columns_of("o", 64, 32, local), bias=bias, context=context),
            RmsNorm("n", 32, 1e-5, context=context),
        )
        after = merged(context, bias=True)
        fill(out, norm, after)
        for layer in (out, after):
            if static:
                layer.method.input_scale.fill_(0.011)
        plain, plain_residual = out(x[:, local.start : local.stop], residual, norm)
        assert isinstance(plain, torch.Tensor)
        norm.set_quantizer(after.method.input_quantizer)
        fused, new_residual = out(x[:, local.start : local.stop], residual, norm)
        assert isinstance(fused, Quantized)
        assert torch.equal(plain_residual, new_residual)
        values, scale = kernels.quantize_fp8(plain, after.method.input_scale)
        assert torch.equal(fused.values.float(), values.float())
        assert torch.equal(fused.scale, scale.expand(5, 1))
        weight = after.method.dequantized()
        torch.testing.assert_close(after(fused), (values.float() * scale) @ weight.t() + after.bias, rtol=1e-5, atol=1e-5)
        assert torch.equal(after(fused), after(plain))
        assert isinstance(norm(residual), Quantized)

    with torch.inference_mode():
        LocalWorld(tp).run(act)


def test_what_the_norm_asks_of_the_all_reduce() -> None:
    norm, layer = RmsNorm("n", 32, 1e-5, context=CONTEXT), merged(CONTEXT, bias=True)
    assert norm.fusion(torch.zeros(1, 32)).quant == "none"
    norm.set_quantizer(layer.method.input_quantizer)
    fusion: ResidualRmsNorm = norm.fusion(torch.zeros(1, 32))
    assert (fusion.quant, fusion.scale) == ("fp8", None)
    norm.set_quantizer(merged(replace(CONTEXT, fp8_gemm=False), bias=True).method.input_quantizer)
    assert norm.fusion(torch.zeros(1, 32)).quant == "none"


def test_a_norm_that_keeps_both_gives_both_wherever_it_stands() -> None:
    """Behind a sum, behind the embedding, and alone, as before the first layer of a pipeline stage."""
    norm, layer = RmsNorm("n", 32, 1e-5, context=CONTEXT), merged(CONTEXT, bias=True)
    embedding = VocabParallelEmbedding("e", 9, 32, context=CONTEXT)
    fill(norm, layer, embedding)
    ids = torch.tensor([3, 8, 0])
    with torch.inference_mode():
        plain, vectors = embedding(ids, norm)
        norm.set_quantizer(layer.method.input_quantizer, keep_norm=True)
        zeros = torch.zeros_like(vectors)
        for both in (norm(vectors), norm.of_sum(vectors, zeros)[0], embedding(ids, norm)[0]):
            assert isinstance(both, NormAndQuantized)
            torch.testing.assert_close(both.norm, plain, rtol=1e-6, atol=1e-6)
            values, scale = kernels.quantize_fp8(plain, None)
            assert torch.equal(both.quantized.values.float(), values.float())
            torch.testing.assert_close(both.quantized.scale, scale.expand(3, 1), rtol=1e-6, atol=0)


def test_sizes_that_fp8_gemms_cannot_have(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="phalanx"):
        layer = merged(CONTEXT, 40)
    assert "128 x 40" in caplog.text
    assert "multiples of 16" in caplog.text
    assert not layer.method.multiplies_fp8
    fill(layer)
    x = torch.randn(3, 40)
    assert torch.equal(layer(x), x @ layer.method.dequantized().t())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_model_with_its_seams_is_the_model_without(tp: int, tmp_path: Path) -> None:
    """Bit for bit: each layer quantizing what it is given, against norms and SiLU doing it for the next layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "std": 0.15}
    folder = write_checkpoint(tmp_path / "m", "qwen3", **sizes)
    ids = torch.randint(0, 384, (9,))
    fused = Formation(folder, tp=tp, quantization=ON_LOAD, fp8_gemm=True)
    apart = Formation(folder, tp=tp, quantization=ON_LOAD, fp8_gemm=True)
    for model in apart.models[0]:
        for layer in model.layers:
            layer.input_layernorm.set_quantizer(None)
            layer.post_attention_layernorm.set_quantizer(None)
    assert torch.equal(fused.step([(0, ids)])[0], apart.step([(0, ids)])[0])
    widened = Formation(folder, tp=tp, quantization=ON_LOAD, fp8_gemm=False)
    assert not torch.equal(fused.step([(1, ids)])[0], widened.step([(1, ids)])[0])


@pytest.mark.parametrize(("family", "tp", "left"), [("llama", 1, 4), ("qwen3", 1, 4), ("qwen2", 1, 2), ("llama", 2, 2 * 8)])
def test_scales_are_left_to_what_reads_a_product(
    family: str, tp: int, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the SiLU of each layer, to rope (and the norm of heads before it) where no bias stands between, and to the
    sums of several ranks; with the same logits."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "std": 0.15}
    model = Formation(write_checkpoint(tmp_path / "m", family, **sizes), tp=tp, quantization=ON_LOAD, fp8_gemm=True)
    ids = torch.randint(0, 384, (9,))
    finished = model.step([(0, ids)])[0]
    outputs_scaled: list[int] = []

    def sums(x: Quantized, weight: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype) -> Unscaled:
        outputs_scaled.append(weight.shape[0])
        return Unscaled((x.values.float() @ weight.float().t()).to(dtype), x.scale, scale)

    monkeypatch.setattr(fp8, "unscaled_mm", sums)
    torch.testing.assert_close(model.step([(1, ids)])[0], finished, rtol=1e-3, atol=2e-2)
    assert len(outputs_scaled) == left


BLOCKS = Quantization("fp8", "block", "token", block=(128, 128), scale_name="weight_scale_inv")


@pytest.mark.parametrize("rank", [0, 1])
def test_scales_by_block_where_rows_begin_with_one(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuBLAS takes them: of merged layers, and of slices of layers, as they come from a checkpoint."""
    monkeypatch.setattr(block_gemm, "_cublas_scales_by_block", lambda device: True)
    context = replace(CONTEXT, quantization=BLOCKS)

    def layer_of(*runs: WeightPart) -> ColumnParallelLinear:
        layer = ColumnParallelLinear(runs, bias=False, context=context)
        for scale in weights.scales(layer):  # of a checkpoint: block (r, c) of a layer has 10 r + c, and the second layer 100 more
            rows, columns = scale.shapes[0]
            scale.store(torch.arange(rows)[:, None] * 10.0 + torch.arange(columns) + 100 * ("b" in scale.name))
        return layer

    aligned = layer_of(
        rows_of("a", 512, 512, range(256 * rank, 256 * rank + 256)), rows_of("b", 512, 256, range(128 * rank, 128 * rank + 128))
    )
    assert isinstance(aligned.method, Fp8Block)
    assert aligned.method.whole_blocks
    first = torch.tensor([2 * rank, 2 * rank + 1, 10 + rank])[:, None] * 10.0
    scale_per_block = aligned.method._scale_per_block()
    assert torch.equal(scale_per_block, first + torch.arange(4))
    assert aligned.method._scale_per_block() is scale_per_block
    for runs in (
        (rows_of("a", 512, 512, range(64, 320)),),
        (rows_of("a", 512, 512, range(192)), rows_of("b", 512, 256, range(128))),
        (rows_of("a", 512, 512, range(320)),),
    ):
        layer = layer_of(*runs)
        assert isinstance(layer.method, Fp8Block)
        assert not layer.method.whole_blocks
    monkeypatch.setattr(block_gemm, "_cublas_scales_by_block", lambda device: False)
    plain = layer_of(rows_of("a", 512, 512, range(256))).method
    assert isinstance(plain, Fp8Block)
    assert not plain.whole_blocks


@pytest.mark.parametrize("kind", ["blocks", "widened", "fp32"])
def test_gemms_that_cannot_write_to_targets_return_a_tensor(kind: str) -> None:
    quantization = BLOCKS if kind == "blocks" else ON_LOAD
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    x, residual, scales = torch.randn(7, 64).to(dtype), torch.randn(7, 32).to(dtype), torch.rand(3, 3) + 0.1

    def act(base: Group) -> None:
        group = poisoned(base, gemm_rs_min_tokens=1)
        context = replace(CONTEXT, group=group, quantization=quantization, dtype=dtype, fp8_gemm=kind != "widened")
        local = shard.even("inputs", 64, 2, group.rank)
        out, norm = (
            RowParallelLinear(columns_of("o", 64, 32, local), bias=False, context=context),
            RmsNorm("n", 32, 1e-5, context=context),
        )
        (fill_blocks(out, scales) if kind == "blocks" else fill(out))
        fill(norm)
        out(x[:, local.start : local.stop].contiguous(), residual, norm)
        assert group.calls == {"RS_NORM_AG/RESIDUAL_RMS_NORM": 1}

    with torch.inference_mode():
        LocalWorld(2).run(act)


@pytest.mark.parametrize("static", [False, True])
def test_gemm_rs_gives_the_outputs_of_the_gemm(static: bool) -> None:
    """The rows of each rank go to that rank, with the scales of these rows."""
    x, residual = torch.randn(7, 64).bfloat16(), torch.randn(7, 32).bfloat16()
    x *= torch.logspace(-3, 2, 7)[:, None]  # scales that are far apart
    quantization = replace(ON_LOAD, activations="static" if static else "token")

    def act(base: Group) -> None:
        outputs = []
        for group in (base, poisoned(base, gemm_rs_min_tokens=1)):
            context = replace(CONTEXT, group=group, quantization=quantization, dtype=torch.bfloat16)
            local = shard.even("inputs", 64, 2, group.rank)
            out, norm = (
                RowParallelLinear(columns_of("o", 64, 32, local), bias=False, context=context),
                RmsNorm("n", 32, 1e-5, context=context),
            )
            fill(out, norm)
            if static:
                out.method.input_scale.fill_(0.5)
            norm.weight.fill_(1)
            output, new = out(x[:, local.start : local.stop].contiguous(), residual, norm)
            outputs.append((output, unshard(new, group)))
            if group is not base:
                assert group.calls == {"GEMM_RS/RESIDUAL_RMS_NORM": 1}
        for left, right in zip(*outputs, strict=True):
            torch.testing.assert_close(left, right)

    with torch.inference_mode():
        LocalWorld(2).run(act)


def fill_blocks(layer: RowParallelLinear | ColumnParallelLinear, scales: torch.Tensor) -> None:
    """Weights as `fill` makes them, in e4m3, and of each checkpoint layer the same scales."""
    fill(layer)
    for scale in weights.scales(layer):
        rows, columns = scale.shapes[0]
        scale.store(scales[:rows, :columns].contiguous())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layers_scaled_by_block_quantize_in_the_groups_of_their_blocks(tp: int) -> None:
    """A rank whose columns begin within a block has the groups that the whole layer has, cut; norms hand on what they have."""
    x, residual, scales = torch.randn(5, 320), torch.randn(5, 32), torch.rand(3, 3) + 0.1

    def act(group: Group) -> torch.Tensor:
        context = replace(CONTEXT, group=group, quantization=BLOCKS)
        local = shard.even("inputs", 320, tp, group.rank)
        out, norm = (
            RowParallelLinear(columns_of("o", 320, 32, local), bias=False, context=context),
            RmsNorm("n", 32, 1e-5, context=context),
        )
        after = merged(context, bias=True)
        fill_blocks(out, scales)
        fill_blocks(after, scales)
        fill(norm)
        norm.set_quantizer(after.method.input_quantizer)
        assert out.method.multiplies_fp8
        assert out.method.input_quantizer is None
        assert out.method.weight_scale.shape == (32, -(-local.stop // 128) - local.start // 128)
        output = out.method.multiply(x[:, local.start : local.stop])
        begin, columns = local.start % 128, slice(local.start, local.stop)
        values, x_scale = reference.per_token_group_quant_fp8(x[:, columns], 128, begin)
        meant = reference.dequantize(values, x_scale, torch.float32, block=128, begin=begin)
        torch.testing.assert_close(output, meant @ out.method.dequantized().t(), rtol=1e-5, atol=1e-5)
        normed, _ = out(x[:, columns], residual, norm)
        assert isinstance(normed, torch.Tensor)
        weight = after.method.dequantized()
        values, x_scale = reference.per_token_group_quant_fp8(normed)
        wanted = reference.dequantize(values, x_scale, torch.float32, block=128) @ weight.t() + after.bias
        torch.testing.assert_close(after(normed, may_stay_unscaled=True), wanted, rtol=1e-5, atol=1e-5)
        for token in range(5):  # alone or beside others, but for the order of sums
            torch.testing.assert_close(after(normed[token : token + 1]), wanted[token : token + 1], rtol=1e-5, atol=1e-5)
        return output

    with torch.inference_mode():
        parts = LocalWorld(tp).run(act)
        context = replace(CONTEXT, quantization=BLOCKS, fp8_gemm=False)
        plain = RowParallelLinear(columns_of("o", 320, 32, range(320)), bias=False, context=context)
        fill_blocks(plain, scales)
        assert not plain.method.multiplies_fp8
        wanted = x @ plain.method.dequantized().t()
        assert torch.equal(plain.method.multiply(x), wanted)
        error = (sum(parts) - wanted).norm() / wanted.norm()
    assert 1e-3 < float(error) < 2**-4  # of e4m3, a sixteenth of each activation at most


def test_what_the_log_says_of_blocks(caplog: pytest.LogCaptureFixture) -> None:
    on = LayerContext(Solo(), torch.bfloat16, torch.device("cuda"), fp8_gemm=True)
    off = replace(on, fp8_gemm=False)

    def how(quantization: Quantization, context: LayerContext) -> str | None:
        return describe(replace(context, quantization=quantization))

    assert "a scale per token and 128 columns" in (how(BLOCKS, on) or "")
    none = how(BLOCKS, off) or ""
    assert "run in bfloat16: this cuda has no FP8 GEMM; up to 64 tokens" in none
    assert "blocks have 20 columns" in (how(replace(BLOCKS, block=(24, 20)), on) or "")
    assert "does not quantize activations" in (how(replace(BLOCKS, activations="none"), on) or "")
    assert how(ON_LOAD, on) is None
    assert "does not quantize activations" in (how(replace(ON_LOAD, activations="none"), on) or "")
    with caplog.at_level(logging.INFO, logger="phalanx"):
        context = replace(CONTEXT, quantization=BLOCKS)
        layer = RowParallelLinear(columns_of("o", 64, 32, range(8, 56)), bias=False, context=context)
    assert "from column 8 on" in caplog.text
    assert not layer.method.multiplies_fp8

# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet (arXiv 2412.06464), in the place of attention: what a request keeps is of one size, however long it is."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from phalanx.config.model import ModelShape
from phalanx.kernels.gated_delta.dispatch import count_chunks, gated_delta, max_chunks
from phalanx.kernels.gated_delta.reference import DeltaWeights, StateRows
from phalanx.models.batch import Batch, count_leading_decodes
from phalanx.models.cache import LayerCache
from phalanx.models.layers.activation import NormOutput
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.rope import CosSin
from phalanx.models.slices import LayerContext, TensorPart


class GatedDeltaNet(nn.Module):
    """out_proj(gated norm(gated delta rule(conv(in_proj(x))))); ranks split key heads, each with its value heads."""

    def __init__(self, name: str, shape: ModelShape, *, context: LayerContext) -> None:
        super().__init__()
        gated, tp = shape.gated_delta, context.group.size
        assert gated is not None
        self.heads = replace(gated, key_heads=gated.key_heads // tp, value_heads=gated.value_heads // tp)
        self.in_proj_qkvz, self.in_proj_ba = (
            ColumnParallelLinear(
                [part for tensor in context.of_gemm(name, gemm) for part in context.parts(tensor.name.removesuffix(".weight"))],
                bias=False, context=context,
            )
            for gemm in ("qkvz", "ba")
        )  # fmt: skip
        self.conv1d, self.A_log, self.dt_bias, self.norm = (
            TensorPart(f"{name}.{end}", context=context) for end in ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
        )
        self.eps = shape.rms_norm_eps
        self.o_proj = RowParallelLinear.of(f"{name}.out_proj", context)

    def forward(
        self, x: Tensor, cos_sin: CosSin, batch: Batch, cache: LayerCache, residual: Tensor, norm: RmsNorm | None
    ) -> tuple[NormOutput, Tensor]:  # fmt: skip
        """x and residual [T, hidden] -> (norm(residual + out), residual + out); the states of the rows' requests are brought up to
        date. There are no positions beside the state."""
        weights = DeltaWeights(self.conv1d.weight, self.A_log.weight, self.dt_bias.weight, self.norm.weight, self.eps)
        mixed, ba, conv = self.in_proj_qkvz(x), self.in_proj_ba(x), cache["conv"]
        tails = conv.view(len(conv), -1, sum(self.heads.sections))
        pending = cache["pending"] if self.heads.kept else None
        out = gated_delta(mixed, ba, self.heads, weights, tails, cache["state"], state_rows(batch), pending)
        output: tuple[NormOutput, Tensor] = self.o_proj(out, residual, norm)
        return output

    def set_input_norm(self, norm: RmsNorm) -> None:
        """Its projections take the norm as it is: those of b and a are never quantized."""


def state_rows(batch: Batch) -> StateRows:
    """The rows of a batch as kernels over states take them, made once for all layers."""
    if batch.state_rows is None:
        assert batch.table_rows is not None
        rows, starts = len(batch.kv_lengths_cpu), batch.query_starts_cpu
        decodes = batch.decodes if batch.fixed else count_leading_decodes(starts)
        chunks = max_chunks(len(batch.token_ids), rows - decodes) if batch.fixed else count_chunks(starts, decodes)
        batch.state_rows = StateRows(
            batch.table_rows, batch.query_starts, batch.kv_lengths, batch.kv_slots, decodes, chunks, starts, batch.kv_lengths_cpu
        )
    return batch.state_rows

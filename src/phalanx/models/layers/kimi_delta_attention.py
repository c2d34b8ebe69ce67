# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention, KDA (arXiv 2510.26692): the gated delta rule with a decay by channel, in the place of attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from phalanx.config.model import ModelShape
from phalanx.kernels.gated_delta.dispatch import gated_delta
from phalanx.kernels.gated_delta.reference import DeltaInputs, DeltaWeights
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.activation import NormOutput
from phalanx.models.layers.gated_delta_net import state_rows
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.rope import CosSin
from phalanx.models.slices import LayerContext, TensorPart


class KimiDeltaAttention(nn.Module):
    """o_proj(gated norm(gated delta rule(conv(q, k, v), b, f_b(f_a(x))), g_b(g_a(x)))); ranks split heads, and each has all of f_a
    and g_a."""

    def __init__(self, name: str, shape: ModelShape, *, context: LayerContext) -> None:
        super().__init__()
        gated, tp = shape.gated_delta, context.group.size
        assert gated is not None
        self.heads = replace(gated, key_heads=gated.key_heads // tp, value_heads=gated.value_heads // tp)
        self.qkv_proj = ColumnParallelLinear.of(*(f"{name}.{part}_proj" for part in "qkv"), context=context)
        self.gates_a_proj = ColumnParallelLinear.of(*(f"{name}.{part}_proj" for part in ("b", "f_a", "g_a")), context=context)
        self.f_b_proj, self.g_b_proj = (ColumnParallelLinear.of(f"{name}.{part}_b_proj", context=context) for part in "fg")
        self.conv1d = TensorPart(*(f"{name}.{part}_conv1d.weight" for part in "qkv"), context=context)
        self.A_log, self.dt_bias, self.o_norm = (
            TensorPart(f"{name}.{end}", context=context) for end in ("A_log", "dt_bias", "o_norm.weight")
        )
        self.eps = shape.rms_norm_eps
        self.o_proj = RowParallelLinear.of(f"{name}.o_proj", context)

    def forward(
        self, x: Tensor, cos_sin: CosSin, batch: Batch, cache: LayerCache, residual: Tensor, norm: RmsNorm | None
    ) -> tuple[NormOutput, Tensor]:  # fmt: skip
        """x and residual [T, hidden] -> (norm(residual + out), residual + out); the states of the rows' requests are brought up to
        date. There are no positions beside the state."""
        heads, conv = self.heads, cache["conv"]
        weights = DeltaWeights(self.conv1d.weight, self.A_log.weight, self.dt_bias.weight, self.o_norm.weight, self.eps)
        b, decay, gate = torch.split(self.gates_a_proj(x), [heads.value_heads, heads.key_dim, heads.key_dim], dim=1)
        inputs = DeltaInputs(self.qkv_proj(x), self.g_b_proj(gate.contiguous()), b, self.f_b_proj(decay.contiguous()))
        tails, pending = conv.view(len(conv), -1, sum(heads.sections)), cache["pending"] if heads.kept else None
        out = gated_delta(inputs, heads, weights, tails, cache["state"], state_rows(batch), pending)
        output: tuple[NormOutput, Tensor] = self.o_proj(out, residual, norm)
        return output

    def set_input_norm(self, norm: RmsNorm) -> None:
        """Its projections take the norm as it is, as those of `GatedDeltaNet`."""

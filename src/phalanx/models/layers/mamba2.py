# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (arXiv 2405.21060), in the place of attention: what a request keeps is of one size, however long it is."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from phalanx.config.model import ModelShape
from phalanx.kernels.mamba2.dispatch import mamba2
from phalanx.kernels.mamba2.reference import MambaStates, MambaWeights
from phalanx.layout import shard
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.activation import Activation, NormOutput
from phalanx.models.layers.gated_delta_net import state_rows
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.rope import CosSin
from phalanx.models.slices import LayerContext, TensorPart

_COLUMNS = 8
"""Sums of squares of a message come in multiples of so many, so that every all-reduce strategy takes it."""


class GroupNorm(nn.Module):
    """values / rms(values of the group) * weight, of each group of heads. A group whose heads are on several ranks has an
    all-reduce of its sums of squares."""

    def __init__(self, name: str, shape: ModelShape, *, context: LayerContext) -> None:
        super().__init__()
        mamba, group = shape.mamba, context.group
        assert mamba is not None
        self.weight, self.eps, self.group = TensorPart(f"{name}.weight", context=context), shape.rms_norm_eps, context.group
        self.size, self.dim = mamba.inner // mamba.groups, mamba.head_dim
        own, ratio = shard.heads(mamba.heads, mamba.groups, group.size, group.rank).q, mamba.heads // mamba.groups
        self.own_groups = 0 if mamba.groups % group.size else mamba.groups // group.size
        of_heads = torch.zeros(len(own), -(-mamba.groups // _COLUMNS) * _COLUMNS, device=context.device)
        of_heads[range(len(own)), [head // ratio for head in own]] = 1.0
        self.register_buffer("of_heads", of_heads, persistent=False)

    of_heads: Tensor

    def forward(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """values [T, heads of this rank * head_dim] fp32, which are changed -> the same in dtype."""
        tokens = len(values)
        if self.own_groups:
            groups = values.view(tokens, self.own_groups, -1)
            inverse = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
            groups.mul_(inverse)
        else:
            heads = values.view(tokens, -1, self.dim)
            sums = self.group.all_reduce(heads.square().sum(-1) @ self.of_heads)
            heads.mul_((torch.rsqrt(sums / self.size + self.eps) @ self.of_heads.T).unsqueeze(-1))
        return values.to(dtype).mul_(self.weight.weight)


class MambaMixer(nn.Module):
    """out_proj(norm(silu(z) * mamba2(conv(in_proj(x))))); ranks split heads, and copy the groups that several of them read."""

    def __init__(self, name: str, shape: ModelShape, *, context: LayerContext) -> None:
        super().__init__()
        mamba, group = shape.mamba, context.group
        assert mamba is not None
        own = shard.heads(mamba.heads, mamba.groups, group.size, group.rank)
        self.sizes = replace(mamba, heads=len(own.q), groups=len(own.kv))
        self.in_proj = ColumnParallelLinear.of(f"{name}.in_proj", context=context)
        self.conv1d, self.conv1d_bias, self.A_log, self.D, self.dt_bias = (
            TensorPart(f"{name}.{end}", context=context) for end in ("conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias")
        )
        self.norm = GroupNorm(f"{name}.norm", shape, context=context)
        self.o_proj = RowParallelLinear.of(f"{name}.out_proj", context, multiplier=shape.multipliers.residual)

    def forward(
        self, x: Activation, cos_sin: CosSin, batch: Batch, cache: LayerCache, residual: Tensor, norm: RmsNorm | None
    ) -> tuple[NormOutput, Tensor]:  # fmt: skip
        """x and residual [T, hidden] -> (norm(residual + out), residual + out); the states of the rows' requests are brought up to
        date. There are no positions beside the state."""
        weights = MambaWeights(self.conv1d.weight, self.conv1d_bias.weight, self.A_log.weight, self.D.weight, self.dt_bias.weight)
        before, slots = self.sizes.conv_rows, len(cache["state"])
        states = MambaStates(cache["conv"].view(slots, before, -1), cache["group_conv"].view(slots, before, -1), cache["state"])
        mixed, pending = self.in_proj(x), cache["pending"] if self.sizes.kept else None
        gated = mamba2(mixed, self.sizes, weights, states, state_rows(batch), pending)
        output: tuple[NormOutput, Tensor] = self.o_proj(self.norm(gated, mixed.dtype), residual, norm)
        return output

    def set_input_norm(self, norm: RmsNorm) -> None:
        """The norm before the block: it quantizes for the block's first layer."""
        norm.set_quantizer(self.in_proj.method.input_quantizer)

# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3, R1 among them (arXiv 2405.04434, 2412.19437): multi-head latent attention (MLA), and routed and shared
experts behind dense layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx import kernels
from phalanx.config.latent import Latent
from phalanx.config.model import ModelShape
from phalanx.errors import ModelError
from phalanx.models.batch import Batch, KvCache
from phalanx.models.layers.fp8 import Activation
from phalanx.models.layers.latent_projection import LatentUpProjection
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightRows
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.llama import Attention, CosSin, Llama
from phalanx.models.slices import LayerContext
from phalanx.plan import shard
from phalanx.plan.memory import KvFormat, KvSpec

NORM_EPS = 1e-6
"""Of the norms of queries' and keys' latents: the reference implementations do not take it from config.json."""


class LatentAttention(Attention):
    """MLA: the cache has one latent and one rotated key per token, from which each head's keys and values
    come by `kv_b_proj`. Heads are split over the ranks; each rank has the whole cache."""

    def __init__(self, name: str, shape: ModelShape, latent: Latent, *, context: LayerContext) -> None:
        nn.Module.__init__(self)  # what Attention holds is other tensors here
        self.latent, self.window = latent, None
        hidden, head_dim = shape.hidden_size, latent.nope + latent.rope
        group = context.group
        own = shard.even("num_attention_heads", shape.num_heads, group.size, group.rank)
        heads = WeightRows(f"{name}.q_proj", shape.num_heads * head_dim, own.start * head_dim, len(own) * head_dim)
        down = WeightRows(f"{name}.kv_a_proj_with_mqa", latent.cached, 0, latent.cached)
        first = heads if latent.q_rank is None else WeightRows(f"{name}.q_a_proj", latent.q_rank, 0, latent.q_rank)
        self.q_heads, self.head_dim = len(own), head_dim
        # All that reads the layer's input, as one GEMM: queries or their latents, then the latent and the key that is rotated.
        self.qkv_a_proj = ColumnParallelLinear([first, down], hidden, bias=False, context=context)
        self.q_a_layernorm: RmsNorm | None = None
        if latent.q_rank is not None:
            self.q_a_layernorm = RmsNorm(f"{name}.q_a_layernorm", latent.q_rank, NORM_EPS, context=context)
            rows = WeightRows(f"{name}.q_b_proj", heads.total, heads.begin, heads.count)
            self.q_b_proj = ColumnParallelLinear([rows], latent.q_rank, bias=False, context=context)
            self.q_a_layernorm.set_consumer(self.q_b_proj.fp8)
        self.kv_a_layernorm = RmsNorm(f"{name}.kv_a_layernorm", latent.kv_rank, NORM_EPS, context=context)
        self.kv_b_proj = LatentUpProjection(f"{name}.kv_b_proj", own, shape.num_heads, latent, context=context)
        local = range(own.start * latent.v, own.stop * latent.v)
        self.o_proj = RowParallelLinear(
            f"{name}.o_proj", shape.num_heads * latent.v, hidden, local=local, bias=False, context=context
        )  # fmt: skip

    def set_input_norm(self, norm: RmsNorm) -> None:
        norm.set_consumer(self.qkv_a_proj.fp8)

    def kv_spec(self, kv: KvFormat) -> KvSpec:
        return KvSpec(1, self.latent.cached, kv.itemsize, None, latent_rank=self.latent.kv_rank)

    def forward(
        self, x: Activation, cos_sin: CosSin, batch: Batch, cache: KvCache, residual: Tensor, norm: RmsNorm
    ) -> tuple[Activation, Tensor]:
        """As `Attention`."""
        projected = self.qkv_a_proj(x)
        first, down = projected[:, : -self.latent.cached], projected[:, -self.latent.cached :]
        if self.q_a_layernorm is not None:
            first = self.q_b_proj(self.q_a_layernorm(first))
        query = first.view(x.shape[0], self.q_heads, self.head_dim)
        key_norm = self.kv_a_layernorm
        kernels.latent_rope_store(
            query, down, *cos_sin, key_norm.weight, key_norm.eps, cache.key, batch.kv_slots, interleaved=self.latent.interleaved
        )
        context = batch.attention.forward(query, cache, up=self.kv_b_proj.weight, scale=self.latent.softmax_scale)
        output: tuple[Activation, Tensor] = self.o_proj(context.reshape(x.shape[0], -1), residual, norm)
        return output


class DeepSeek(Llama):
    """Latent attention in all layers; the feed-forward blocks are as config.json says."""

    def __init__(self, shape: ModelShape, *, layers: range, context: LayerContext) -> None:
        if context.dtype == torch.float16:
            raise ModelError(
                f"{shape.architecture} cannot run in fp16", why="its residual stream exceeds fp16's range", next="use dtype='bf16'",
            )  # fmt: skip
        super().__init__(shape, layers=layers, context=context)

    def attention(self, name: str, layer: int) -> Attention:
        latent = self.shape.latent
        assert latent is not None
        return LatentAttention(name, self.shape, latent, context=self.context)

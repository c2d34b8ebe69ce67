# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention, MLA (arXiv 2405.04434), of all keys or of those that an indexer chooses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx import kernels
from phalanx.config.latent import Latent
from phalanx.config.model import ModelShape
from phalanx.errors import ModelError
from phalanx.layout import shard
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.activation import NormAndQuantized, NormOutput
from phalanx.models.layers.indexer import LatentIndexer
from phalanx.models.layers.latent_projection import LatentUpProjection
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.rope import CosSin
from phalanx.models.slices import LayerContext

NORM_EPS = 1e-6
"""Of the norms of queries' and keys' latents: the reference implementations do not take it from config.json."""


class LatentAttention(nn.Module):
    """MLA: the cache has one latent and one rotated key per token, from which each head's keys and values
    come by `kv_b_proj`. Heads are split over the ranks; each rank has the whole cache."""

    def __init__(self, name: str, shape: ModelShape, latent: Latent, layer: int, *, context: LayerContext) -> None:
        super().__init__()
        if context.dtype == torch.float16:
            raise ModelError(
                f"{shape.architecture} cannot run in fp16", why="its residual stream exceeds fp16's range", next="use dtype='bf16'",
            )  # fmt: skip
        self.latent = latent
        self.head_dim = latent.nope + latent.rope
        self.q_heads = len(shard.heads(shape.num_heads, shape.num_heads, context.group.size, context.group.rank).q)
        self.indexer: LatentIndexer | None = None
        if latent.indexer is not None and latent.indexer.computes[layer]:
            self.indexer = LatentIndexer(f"{name}.indexer", latent.indexer, context=context)
        # All that reads the layer's input, as one GEMM: queries or their latents, the indexer's key, the latent, the rotated key.
        first = "q_proj" if latent.q_rank is None else "q_a_proj"
        of_indexer = [] if self.indexer is None else [f"{name}.indexer.wk"]
        self.qkv_a_proj = ColumnParallelLinear.of(
            f"{name}.{first}", *of_indexer, f"{name}.kv_a_proj_with_mqa", context=context
        )  # fmt: skip
        self.q_a_layernorm: RmsNorm | None = None
        if latent.q_rank is not None:
            self.q_a_layernorm = RmsNorm(f"{name}.q_a_layernorm", latent.q_rank, NORM_EPS, context=context)
            of_indexer = [] if self.indexer is None else [f"{name}.indexer.wq_b"]
            self.q_b_proj = ColumnParallelLinear.of(f"{name}.q_b_proj", *of_indexer, context=context)
            self.q_a_layernorm.set_quantizer(self.q_b_proj.method.input_quantizer)
        self.kv_a_layernorm = RmsNorm(f"{name}.kv_a_layernorm", latent.kv_rank, NORM_EPS, context=context)
        self.kv_b_proj = LatentUpProjection(f"{name}.kv_b_proj", latent, context=context)
        self.o_proj = RowParallelLinear.of(f"{name}.o_proj", context)

    def set_input_norm(self, norm: RmsNorm) -> None:
        """The norm before the block: it quantizes for the block's first layer."""
        norm.set_quantizer(self.qkv_a_proj.method.input_quantizer, keep_norm=self.indexer is not None)

    def forward(
        self, x: NormOutput, cos_sin: CosSin, batch: Batch, cache: LayerCache, residual: Tensor, norm: RmsNorm | None
    ) -> tuple[NormOutput, Tensor]:
        """x and residual [T, hidden] -> (norm(residual + attention(x)), residual + attention(x))."""
        plain, x = (x.norm, x.quantized) if isinstance(x, NormAndQuantized) else (x, x)
        projected, latent = self.qkv_a_proj(x), self.latent
        first, down = projected[:, : -latent.cached], projected[:, -latent.cached :]
        index_key = index_query = None
        if self.indexer is not None:
            first, index_key = first[:, : latent.q_rank], first[:, latent.q_rank :]
        if self.q_a_layernorm is not None:
            first = self.q_b_proj(self.q_a_layernorm(first))
        if self.indexer is not None:
            first, index_query = first[:, : -self.indexer.width], first[:, -self.indexer.width :]
        query = first.view(x.shape[0], self.q_heads, self.head_dim)
        key_norm, slots = self.kv_a_layernorm, batch.attention.kv_slots
        kernels.latent_rope_store(
            query, down, *cos_sin[:2], key_norm.weight, key_norm.eps, cache["latent"], slots, interleaved=latent.interleaved,
        )  # fmt: skip
        if cos_sin.temperature is not None:
            query = query.mul_(cos_sin.temperature)
        index = None
        if self.indexer is not None:
            index = self.indexer(plain, index_query, index_key, cos_sin, cache, slots)
        context = batch.attention.forward(query, cache, up=self.kv_b_proj.weight, scale=latent.softmax_scale, index=index)
        output: tuple[NormOutput, Tensor] = self.o_proj(context.reshape(x.shape[0], -1), residual, norm)
        return output

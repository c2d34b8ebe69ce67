# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556)."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx import kernels
from phalanx.config.latent import Indexer
from phalanx.kernels.attention import dispatch
from phalanx.kernels.attention.indexer import IndexQuery
from phalanx.models.cache import LayerCache
from phalanx.models.layers.rope import CosSin
from phalanx.models.slices import LayerContext, TensorPart

NORM_EPS = 1e-6
"""Of the norm of keys: the reference implementation does not take it from config.json."""


class LatentIndexer(nn.Module):
    """Stores each token's key, and makes what its query asks with. `wq_b` and `wk` are in GEMMs of the attention. The reference
    implementation also applies a Hadamard transform to queries and keys before it quantizes them: it is orthogonal, and so the
    scores are those without it."""

    def __init__(self, name: str, indexer: Indexer, *, context: LayerContext) -> None:
        super().__init__()
        self.config = indexer
        self.k_norm, self.k_norm_bias, self.weights_proj = (
            TensorPart(f"{name}.{end}", context=context) for end in ("k_norm.weight", "k_norm.bias", "weights_proj.weight")
        )
        self.scale = (indexer.heads * indexer.head_dim) ** -0.5

    @property
    def width(self) -> int:
        """Elements of a token's queries."""
        return self.config.heads * self.config.head_dim

    def forward(self, x: Tensor, query: Tensor, key: Tensor, cos_sin: CosSin, cache: LayerCache, slots: Tensor) -> IndexQuery:
        """x [T, hidden]: the layer's input; query [T, heads * head_dim], which is rotated in place, and key [T, head_dim]: its
        projections; slots: as of `Batch`."""
        query = query.view(len(query), -1, self.config.head_dim)
        dispatch.index_rope_store(
            query, key, *cos_sin[:2], self.k_norm.weight, self.k_norm_bias.weight, NORM_EPS, cache["index_key"],
            cache.tensors.get("index_scale"), slots, interleaved=self.config.interleaved,
        )  # fmt: skip
        weights = kernels.linear_fp32(x, self.weights_proj.weight) * self.scale
        return IndexQuery(query, weights)

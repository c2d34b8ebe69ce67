# SPDX-License-Identifier: Apache-2.0
"""What a plan needs of a model's config.json: sizes, experts, latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.experts import Experts as Experts
from phalanx.config.latent import Latent as Latent
from phalanx.config.model import ModelShape
from phalanx.config.quantization import Quantization
from phalanx.plan.memory import KvFormat, KvSpec


@dataclass(frozen=True)
class Shape:
    """One model. Lengths in tokens. `dtype`: of the checkpoint's 16-bit or 32-bit weights. windows: as `ModelShape` has them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    tie_word_embeddings: bool = False
    quantization: Quantization | None = None
    dtype: str = "bf16"
    experts: Experts | None = None
    latent: Latent | None = None

    @classmethod
    def of(cls, shape: ModelShape) -> Shape:
        return cls(
            shape.architecture, shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.num_heads,
            shape.num_kv_heads, shape.head_dim, shape.max_positions, shape.windows or (None,) * shape.num_layers, shape.qkv_bias,
            shape.output_bias, shape.mlp_bias, shape.qk_norm, tie_word_embeddings=shape.tie_word_embeddings,
            quantization=shape.quantization, dtype=shape.dtype, experts=shape.experts, sinks=shape.sinks,
            latent=shape.latent,
        )  # fmt: skip

    def experts_in(self, layer: int) -> Experts | None:
        """The experts of a layer; None where its MLP is dense."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def kv_spec(self, tp: int, kv: KvFormat) -> KvSpec:
        """The KV cache of a layer on one tensor-parallel rank, but for its window; a latent cache is replicated."""
        if self.latent is not None:
            return KvSpec(1, self.latent.cached, kv.itemsize, latent_rank=self.latent.kv_rank)
        from phalanx.plan.shard import heads

        kv_heads = len(heads(self.num_heads, self.num_kv_heads, tp, 0).kv)
        return KvSpec(kv_heads, self.head_dim, kv.itemsize, scale_bytes=kv.scale_bytes)

    def kv_elements(self, tp: int) -> int:
        """Elements of the KV cache per token and layer on one tensor-parallel rank."""
        return self.kv_spec(tp, KvFormat(1)).bytes_per_token

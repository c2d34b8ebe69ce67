# SPDX-License-Identifier: Apache-2.0
"""What a plan needs of a model's config.json: sizes, experts, latent attention. Also of models that no layer runs yet."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.model import ModelShape
from phalanx.config.quantization import Quantization


@dataclass(frozen=True)
class Experts:
    """The experts of the layers that have them; `dense_layers` have one dense MLP of the model's intermediate_size instead.

    count: routed experts; per_token: how many of them a token reaches. intermediate: width of one. shared: width of the experts
    that every token reaches, all together; 0 for none. scoring_bias: a bias of the router's scores (V3); biases: of router and
    GEMMs (gpt-oss). mxfp4: the routed experts' weights are stored in 4 bits with a scale of 8 for each 32.
    """

    count: int
    per_token: int
    intermediate: int
    shared: int = 0
    dense_layers: tuple[int, ...] = ()
    scoring_bias: bool = False
    biases: bool = False
    mxfp4: bool = False

    def touched(self, tokens: float) -> float:
        """Distinct experts that so many tokens reach, in the mean, each routed uniformly: E (1 - (1 - k/E)^T)."""
        return float(self.count * (1 - (1 - self.per_token / self.count) ** tokens))


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks and head dims in elements. q_rank: None without."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    v: int


@dataclass(frozen=True)
class Shape:
    """One model. Lengths in tokens. `dtype`: of the checkpoint's 16-bit or 32-bit weights. windows: as `ModelShape` has them.

    served: the engine runs this architecture; a plan for another one is an estimate of what it would take.
    """

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
    served: bool = False

    @classmethod
    def of(cls, shape: ModelShape) -> Shape:
        """Of a model that the engine runs."""
        return cls(
            shape.architecture, shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.num_heads,
            shape.num_kv_heads, shape.head_dim, shape.max_positions, shape.windows or (None,) * shape.num_layers, shape.qkv_bias,
            shape.output_bias, shape.mlp_bias, shape.qk_norm, tie_word_embeddings=shape.tie_word_embeddings,
            quantization=shape.quantization, dtype=shape.dtype, served=True,
        )  # fmt: skip

    def experts_in(self, layer: int) -> Experts | None:
        """The experts of a layer; None where its MLP is dense."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def kv_elements(self, layer: int, tp: int) -> int:
        """Elements of the KV cache per token and layer on one tensor-parallel rank; a latent cache is replicated."""
        del layer
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope
        from phalanx.plan.shard import heads

        return 2 * len(heads(self.num_heads, self.num_kv_heads, tp, 0).kv) * self.head_dim

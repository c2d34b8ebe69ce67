# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA: DeepSeek-V2, arXiv 2405.04434) of config.json. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.json_fields import JsonFields
from phalanx.config.rope import Rope
from phalanx.errors import ModelError


@dataclass(frozen=True)
class Latent:
    """Ranks and head dims, in elements. A token's cache entry is its normed latent of `kv_rank`, then the rotated key of `rope`
    that all heads share.

    q_rank: of the queries' down-projection; None without one. nope, rope: a head's query and key, the part without and with
    positions; v: its value. softmax_scale: of a head's scores, YaRN's factor included. interleaved: RoPE's pairs are neighbours in
    the projections' output, not halves apart.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    v: int
    softmax_scale: float
    interleaved: bool = True

    @property
    def cached(self) -> int:
        """Elements of a token's cache entry."""
        return self.kv_rank + self.rope


def read_latent(fields: JsonFields, rope: Rope) -> Latent:
    """The latent attention of DeepSeek-V2 and V3. Raises ModelError for fewer KV heads than heads."""
    heads = fields.count("num_attention_heads")
    if fields.count("num_key_value_heads", heads) != heads:
        raise ModelError(
            f"{fields.file} has num_key_value_heads={fields.values.get('num_key_value_heads')}, and num_attention_heads={heads}",
            why="with latent attention each head has keys and values of its own",
        )  # fmt: skip
    nope, rope_dim = fields.count("qk_nope_head_dim", 128), fields.count("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise ModelError(f"{fields.file} has qk_rope_head_dim={rope_dim}, which is odd", why="RoPE rotates pairs of values")
    return Latent(
        # null means none; a file without the field means the default of the reference implementation.
        None if fields.values.get("q_lora_rank", 1536) is None else fields.count("q_lora_rank", 1536),
        fields.count("kv_lora_rank", 512), nope, rope_dim, fields.count("v_head_dim", 128),
        softmax_scale=(nope + rope_dim) ** -0.5 * rope.softmax_factor, interleaved=fields.flag("rope_interleave", True),
    )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA: DeepSeek-V2, arXiv 2405.04434) of config.json. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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


class LatentDefaults(NamedTuple):
    """Sizes that a file need not state, as in `Latent`: those of DeepSeek-V2 and V3."""

    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    v: int = 128


DEEPSEEK = LatentDefaults()


def read_latent(fields: JsonFields, rope: Rope, sizes: LatentDefaults = DEEPSEEK) -> Latent:
    """The fields of DeepSeek-V2 and V3; sizes: by default. A family may say by partial_rotary_factor, too, which part of a head is
    rotated (Mistral Small 4). Raises ModelError for fewer KV heads than heads, and where that part is another."""
    heads = fields.count("num_attention_heads")
    if fields.count("num_key_value_heads", heads) != heads:
        raise ModelError(
            f"{fields.file} has num_key_value_heads={fields.values.get('num_key_value_heads')}, and num_attention_heads={heads}",
            why="with latent attention each head has keys and values of its own",
        )  # fmt: skip
    nope, rope_dim = fields.count("qk_nope_head_dim", sizes.nope), fields.count("qk_rope_head_dim", sizes.rope)
    if rope_dim % 2:
        raise ModelError(f"{fields.file} has qk_rope_head_dim={rope_dim}, which is odd", why="RoPE rotates pairs of values")
    if rope.portion not in (1.0, rope_dim / (nope + rope_dim)):
        raise ModelError(
            f"{fields.file} has partial_rotary_factor={rope.portion}", why="the two contradict each other",
            held=f"qk_rope_head_dim={rope_dim} of the {nope + rope_dim} elements of a head",
        )  # fmt: skip
    return Latent(
        # null means none; a file without the field means the default of the reference implementation.
        None if fields.values.get("q_lora_rank", sizes.q_rank) is None else fields.count("q_lora_rank", sizes.q_rank),
        fields.count("kv_lora_rank", sizes.kv_rank), nope, rope_dim, fields.count("v_head_dim", sizes.v),
        softmax_scale=(nope + rope_dim) ** -0.5 * rope.softmax_factor, interleaved=fields.flag("rope_interleave", True),
    )  # fmt: skip

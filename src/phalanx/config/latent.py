# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA: DeepSeek-V2, arXiv 2405.04434) of config.json, and what chooses its keys where it is sparse
(DeepSeek-V3.2, arXiv 2512.02556). No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from phalanx.config.json_fields import JsonFields
from phalanx.config.rope import Rope
from phalanx.errors import ModelError


@dataclass(frozen=True)
class Indexer:
    """What chooses the keys of sparse attention: beside its latent a token has one key of `head_dim` elements and `heads` queries.
    It attends to the `topk` tokens with the best scores.

    interleaved: as of `Latent`, of the first elements of these queries and keys, which are rotated.
    computes: whether a layer has an indexer; one without attends to what the last one before it chose (GLM-5.2, arXiv 2603.12201).
    """

    heads: int
    head_dim: int
    topk: int
    interleaved: bool
    computes: tuple[bool, ...]


@dataclass(frozen=True)
class Latent:
    """Ranks and head dims, in elements. A token's cache entry is its normed latent of `kv_rank`, then the rotated key of `rope`
    that all heads share.

    q_rank: of the queries' down-projection; None without one. nope, rope: a head's query and key, the part without and with
    positions; v: its value. softmax_scale: of a head's scores, YaRN's factor included. interleaved: RoPE's pairs are neighbours in
    the projections' output, not halves apart. indexer: None where a query attends to all tokens before it.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    v: int
    softmax_scale: float
    interleaved: bool = True
    indexer: Indexer | None = None

    def may_begin_stage(self, layer: int) -> bool:
        """Whether a pipeline stage may begin with this layer: it needs nothing that the layer before it chose."""
        return self.indexer is None or self.indexer.computes[layer]

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


GLM5 = LatentDefaults(2048, nope=192, v=256)


def read_sparse_latent(
    fields: JsonFields, rope: Rope, sizes: LatentDefaults = DEEPSEEK, *, heads: int = 64, interleaved: bool = False
) -> Latent:  # fmt: skip
    """The fields of DeepSeek-V3.2 and GLM-5: those of `read_latent`, and the indexer's. heads, interleaved: of it, by default.
    Raises ModelError for queries without a latent, of which the indexer's are made."""
    latent = read_latent(fields, rope, sizes)
    if latent.q_rank is None:
        raise ModelError(f"{fields.file} has q_lora_rank=null", why="the indexer's queries are made of the queries' latent")
    head_dim = fields.count("index_head_dim", 128)
    if head_dim < latent.rope:
        raise ModelError(
            f"{fields.file} has index_head_dim={head_dim}", held=f"qk_rope_head_dim={latent.rope}",
            why="so many elements of the indexer's keys are rotated",
        )  # fmt: skip
    return replace(latent, indexer=Indexer(
        fields.count("index_n_heads", heads), head_dim, fields.count("index_topk", 2048),
        fields.flag("indexer_rope_interleave", interleaved), _computing(fields),
    ))  # fmt: skip


def _computing(fields: JsonFields) -> tuple[bool, ...]:
    """The layers with an indexer: as indexer_types says, or index_topk_pattern; or each index_topk_freq-th layer behind the first
    index_skip_topk_offset ones, and these."""
    layers = fields.count("num_hidden_layers")
    if not fields.reads("indexer_types"):
        return (True,) * layers
    kinds, name = fields.by_layer("indexer_types", ("full", "shared")), "indexer_types"
    if kinds is None and (pattern := fields.value("index_topk_pattern")) is not None:
        name = "index_topk_pattern"
        letters = {"F": "full", "S": "shared"}
        kinds = [letters.get(each, each) for each in pattern]
        if len(kinds) != layers or set(kinds) - {"full", "shared"}:
            raise ModelError(
                f"{fields.file} has index_topk_pattern={pattern!r}",
                why=f"there must be F (full) or S (shared) for each of num_hidden_layers={layers}",
            )  # fmt: skip
    if kinds is None:
        interval, first = fields.count("index_topk_freq", 1), int(fields.number("index_skip_topk_offset", 2))
        name = "index_skip_topk_offset"
        kinds = ["shared" if max(layer - first + 1, 0) % interval else "full" for layer in range(layers)]
    if kinds[0] != "full":
        raise ModelError(
            f"{fields.file} has {name}={fields.values.get(name)!r}",
            why="the first layer has no layer before it that chose its keys",
        )
    return tuple(kind == "full" for kind in kinds)

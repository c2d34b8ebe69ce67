# SPDX-License-Identifier: Apache-2.0
"""Layers of the gated delta rule (arXiv 2412.06464) in config.json, as Qwen3-Next and Qwen3.5 have them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.json_fields import JsonFields
from phalanx.config.rope import FULL
from phalanx.errors import ModelError

CHUNK = 64
"""Tokens of a prompt that are computed at a time: their products with one another are GEMMs, and a state is read once for them."""
LINEAR = "linear_attention"
FULL_INTERVAL = 4


class VerifiedState:
    """Sizes of a request's state whose last tokens may be rejected. conv: tokens that the causal convolution covers; drafts: of a
    row, at most."""

    conv: int
    drafts: int

    @property
    def kept(self) -> int:
        """Tokens of a request that are kept behind its state, since they may be rejected."""
        return self.drafts + 1 if self.drafts else 0

    @property
    def conv_rows(self) -> int:
        """Of a request: the inputs that the convolution still covers; those of the tokens that are kept, and the position of the
        state."""
        return self.conv - 1 + (self.kept + 1 if self.kept else 0)


@dataclass(frozen=True)
class GatedDelta(VerifiedState):
    """The layers that keep a state for each request in place of keys and values, and the sizes of their heads, in elements.

    layers: their numbers.
    key_heads, value_heads: each key head serves value_heads / key_heads neighbouring value heads.
    key_dim, value_dim: of a head. A value head's state is a matrix [key_dim, value_dim] in fp32.
    conv: tokens that the causal convolution of queries, keys and values covers.
    drafts: that a row of a step verifies, at most: what is computed of them must be taken back where they are rejected.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    drafts: int = 0

    @property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def sections(self) -> tuple[int, int, int]:
        """Channels of all queries, keys and values."""
        return self.key_heads * self.key_dim, self.key_heads * self.key_dim, self.value_heads * self.value_dim

    @property
    def widths(self) -> tuple[int, int]:
        """Values of a token between the projections and the output, and those that chunks of a prompt keep beside them."""
        values = self.sections[2]
        return 2 * sum(self.sections) + 2 * values, self.value_heads * (self.key_dim + self.value_dim + CHUNK)

    @property
    def flops(self) -> float:
        """Of a token of a prompt: products with the chunk's other tokens, and with the state."""
        of_chunk = 2.0 * CHUNK * (3 * self.key_dim + 2 * self.value_dim)
        return self.value_heads * (of_chunk + 6.0 * self.key_dim * self.value_dim)

    @property
    def split(self) -> tuple[str, int]:
        """What ranks split, by its name in messages."""
        return "linear_num_key_heads", self.key_heads


def read_gated_delta(fields: JsonFields) -> GatedDelta:
    """Raises ModelError for layers of unknown types, and impossible sizes."""
    kinds = fields.by_layer("layer_types", (LINEAR, FULL))
    if kinds is None:
        interval = fields.count("full_attention_interval", FULL_INTERVAL)
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(fields.count("num_hidden_layers"))]
    heads, value_heads = fields.count("linear_num_key_heads", 16), fields.count("linear_num_value_heads", 32)
    if value_heads % heads:
        raise ModelError(
            f"{fields.file}: linear_num_key_heads={heads} does not divide linear_num_value_heads={value_heads}",
            why="each key head serves the same number of value heads",
        )  # fmt: skip
    conv = fields.count("linear_conv_kernel_dim", 4)
    if conv < 2:
        raise ModelError(f"{fields.file} has linear_conv_kernel_dim={conv}", why="a convolution covers 2 tokens at least")
    return GatedDelta(
        tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR), heads, value_heads,
        fields.count("linear_key_head_dim", 128), fields.count("linear_value_head_dim", 128), conv,
    )  # fmt: skip

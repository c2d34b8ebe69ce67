# SPDX-License-Identifier: Apache-2.0
"""Layers of Mamba-2 (arXiv 2405.21060) in config.json, as Granite 4 and Nemotron-H have them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.config.gated_delta import CHUNK, LINEAR, VerifiedState
from phalanx.config.json_fields import JsonFields
from phalanx.config.rope import FULL
from phalanx.errors import ModelError

_KINDS = {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL}
"""The types of layers, as released files and as transformers 5 name them."""


@dataclass(frozen=True)
class Mamba2(VerifiedState):
    """The layers that keep a state for each request in place of keys and values, and the sizes of their heads, in elements.

    layers: their numbers.
    heads, groups: each group has one B and one C (keys and queries, in terms of attention), which heads / groups neighbouring heads
    share. The gated norm is over a group's heads.
    head_dim, state_dim: a head's state is a matrix [state_dim, head_dim] in fp32.
    conv: tokens that the causal convolution of x, B and C covers.
    drafts: as of `GatedDelta`.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv: int
    drafts: int = 0

    @property
    def inner(self) -> int:
        """Channels of x, of all heads."""
        return self.heads * self.head_dim

    @property
    def sections(self) -> tuple[int, int, int]:
        """Channels of all x, B and C."""
        return self.inner, self.groups * self.state_dim, self.groups * self.state_dim

    @property
    def widths(self) -> tuple[int, int]:
        """Values of a token between the projections and the output, and those in fp32 beside them, as two each."""
        return 2 * sum(self.sections) + 2 * self.inner + self.heads, 2 * self.inner

    @property
    def flops(self) -> float:
        """Of a token of a prompt: products with the chunk's other tokens, and with the state."""
        return self.heads * (2.0 * CHUNK * (self.state_dim + self.head_dim) + 4.0 * self.state_dim * self.head_dim)

    @property
    def split(self) -> tuple[str, int]:
        """What ranks split, by its name in messages."""
        return "mamba_heads", self.heads


def read_granite_hybrid(fields: JsonFields) -> Mamba2 | None:
    """Granite 4's fields; None for a model without such a layer. Raises ModelError for layers of unknown types, and impossible
    sizes."""
    kinds = fields.by_layer(fields.either("layer_types", "layers_block_type"), tuple(_KINDS))
    layers = tuple(range(fields.count("num_hidden_layers")))
    if kinds is not None:
        layers = tuple(layer for layer in layers if _KINDS[kinds[layer]] == LINEAR)
    if not layers:
        return None
    heads, inner = fields.count("mamba_n_heads", 128), fields.count("mamba_expand", 2) * fields.count("hidden_size")
    auto = fields.value("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if auto else fields.count("mamba_d_head")
    if heads * head_dim != inner:
        raise ModelError(
            f"{fields.file}: mamba_n_heads={heads} heads of mamba_d_head={head_dim} are not mamba_expand * hidden_size={inner}",
            why="the heads have all channels between the projections",
        )  # fmt: skip
    return _checked(fields, Mamba2(
        layers, heads, head_dim, fields.count("mamba_n_groups", 1), fields.count("mamba_d_state", 256),
        fields.count("mamba_d_conv", 4),
    ), "mamba_n_groups", "mamba_d_conv")  # fmt: skip


Block = Literal["mamba", "attention", "mlp", "experts"]
_LETTERS: dict[str, Block] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}
_TYPES: dict[str, Block] = {
    "mamba": "mamba", LINEAR: "mamba", "attention": "attention", FULL: "attention", "mlp": "mlp", "moe": "experts",
}  # fmt: skip


def read_blocks(fields: JsonFields) -> tuple[Block, ...]:
    """The one block of each layer of Nemotron-H, by hybrid_override_pattern or, as transformers 5 writes it, by a list of types.
    Raises ModelError for unknown ones, and for two that differ."""
    types = fields.optional_texts(fields.either("layers_block_type", "layer_types"))
    pattern = fields.text("hybrid_override_pattern", "")
    stated = [[_LETTERS.get(letter) for letter in pattern], [_TYPES.get(kind) for kind in types or ()]]
    first = next(filter(None, stated), [_LETTERS[letter] for letter in "ME*-"])
    blocks = tuple(block for block in first if block is not None)
    if len(blocks) < len(first) or any(other not in ([], first) for other in stated):
        raise ModelError(
            f"{fields.file} has hybrid_override_pattern={pattern!r} and layers_block_type={types}",
            held=f"letters of the pattern: {', '.join(f'{letter} ({block})' for letter, block in _LETTERS.items())}",
            why="they must say which block each layer has, and both the same",
        )  # fmt: skip
    if fields.value("num_hidden_layers") not in (None, len(blocks)):
        raise ModelError(
            f"{fields.file} has num_hidden_layers={fields.value('num_hidden_layers')}",
            why=f"by hybrid_override_pattern or layers_block_type there are {len(blocks)}",
        )  # fmt: skip
    return blocks


def read_nemotron_h(fields: JsonFields) -> Mamba2 | None:
    """Nemotron-H's fields; None for a model without such a layer. Raises as `read_granite_hybrid` does."""
    layers = tuple(layer for layer, block in enumerate(read_blocks(fields)) if block == "mamba")
    if not layers:
        return None
    groups, conv = fields.either("n_groups", "mamba_n_groups"), fields.either("conv_kernel", "mamba_d_conv")
    return _checked(fields, Mamba2(
        layers, fields.count("mamba_num_heads", 128), fields.count("mamba_head_dim", 64), fields.count(groups, 8),
        fields.count("ssm_state_size", 128), fields.count(conv, 4),
    ), groups, conv)  # fmt: skip


def _checked(fields: JsonFields, sizes: Mamba2, groups: str, conv: str) -> Mamba2:
    """groups, conv: the names of these fields. Raises ModelError where groups do not divide the heads, and where a convolution
    covers one token."""
    if sizes.heads % sizes.groups:
        raise ModelError(
            f"{fields.file}: {groups}={sizes.groups} does not divide {sizes.heads} heads",
            why="each group serves the same number of heads",
        )  # fmt: skip
    if sizes.conv < 2:
        raise ModelError(f"{fields.file} has {conv}={sizes.conv}", why="a convolution covers 2 tokens at least")
    return sizes

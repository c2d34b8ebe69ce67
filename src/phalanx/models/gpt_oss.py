# SPDX-License-Identifier: Apache-2.0
"""gpt-oss (arXiv 2508.10925): biases on all projections, sinks in each head's softmax, a sliding window in every second layer, and
experts whose SwiGLU is clamped."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx.config.model import ModelShape
from phalanx.errors import ModelError
from phalanx.models.layers.biased_moe import BiasedMoe
from phalanx.models.llama import Attention, Llama
from phalanx.models.slices import LayerContext, Slice, Sliced


class Sinks(Sliced):
    """weight [q_heads of this rank]: a logit of each head that every query sees, and that has no value."""

    def __init__(self, name: str, heads: range, total: int, *, context: LayerContext) -> None:
        super().__init__()
        self.name, self.heads, self.total = name, heads, total
        self.weight = context.weight(len(heads))

    def slices(self) -> Iterator[Slice]:
        yield Slice(self.name, (self.total,), self.weight, self.heads.start)


class SinkAttention(Attention):
    """Attention whose heads may attend to nothing: to their sink."""

    def __init__(self, name: str, shape: ModelShape, *, window: int | None, context: LayerContext) -> None:
        super().__init__(name, shape, window=window, context=context)
        self.sinks = Sinks(f"{name}.sinks", self.qkv_proj.heads.q, shape.num_heads, context=context)

    def head_sinks(self) -> Tensor:
        return self.sinks.weight


class GptOss(Llama):
    """16-bit attention, with experts in 16 bit or in MXFP4."""

    def __init__(self, shape: ModelShape, *, layers: range, context: LayerContext) -> None:
        if context.quantization is not None:
            raise ModelError(
                "gpt-oss cannot be loaded in FP8", held="its experts have 16 bits, or 4 in MXFP4",
                why="GEMMs in FP8 have no biases of experts", next="use dtype='auto' or 'bf16'",
            )  # fmt: skip
        super().__init__(shape, layers=layers, context=context)

    def attention(self, name: str, layer: int) -> Attention:
        return SinkAttention(name, self.shape, window=self.shape.windows[layer], context=self.context)

    def feed_forward(self, prefix: str, layer: int) -> BiasedMoe:
        experts = self.shape.experts
        assert experts is not None
        return BiasedMoe(f"{prefix}.mlp", self.shape.hidden_size, experts, layer, context=self.context)

# SPDX-License-Identifier: Apache-2.0
"""From an architecture's name to its model.

A family whose layers are not Llama's with other traits has a file of its own, and a line here.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.model import ModelShape
from phalanx.config.quantization import loaded_as
from phalanx.log import get_logger
from phalanx.models.decoder import Decoder
from phalanx.models.gemma4 import Gemma4
from phalanx.models.layers.linear_methods.choose import describe
from phalanx.models.llama import Llama
from phalanx.models.nemotron_h import NemotronH
from phalanx.models.slices import LayerContext

logger = get_logger(__name__)

MODELS: dict[str, type[Decoder]] = {"Gemma4ForCausalLM": Gemma4, "NemotronHForCausalLM": NemotronH}
"""The families whose arithmetic the traits of a `ModelShape` do not say. All others are `Llama`."""


def build(shape: ModelShape, layers: range, context: LayerContext) -> Decoder:
    """The part of a model that holds `layers` on rank `context.group.rank`, with uninitialized weights (`weights.load` fills them).

    It is the first stage if `layers` starts at 0, the last if it ends at shape.num_layers. The quantization is the checkpoint's,
    where it has one, and else the context's. Raises LayoutError when the size of the group does not divide the heads or the
    intermediate size.
    """
    if not (0 <= layers.start < layers.stop <= shape.num_layers and layers.step == 1):
        raise ValueError(f"{layers} is not a run of the model's {shape.num_layers} layers")
    context = replace(context, quantization=loaded_as(shape.quantization, context.quantization))
    line = describe(context)
    if line is not None:
        logger.info(line)
    if shape.rope.kind == "longrope":
        logger.info(
            "LongRoPE: the factors of contexts of %s %d tokens count, as max_seq_len allows",
            "more than" if shape.rope.long else "up to", shape.rope.original_max_positions,
        )  # fmt: skip
    return MODELS.get(shape.architecture, Llama)(shape, layers, context).eval()

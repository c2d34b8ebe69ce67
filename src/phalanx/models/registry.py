# SPDX-License-Identifier: Apache-2.0
"""From an architecture's name to its model.

A new family: a file beside this one, a line here, and a line in `config.model.FAMILIES`.
"""

from __future__ import annotations

import torch

from phalanx.comm.group import Group
from phalanx.config.model import ModelShape
from phalanx.models.llama import Llama
from phalanx.models.mistral import Mistral
from phalanx.models.qwen2 import Qwen2
from phalanx.models.qwen3 import Qwen3
from phalanx.models.slices import Seat

Model = Llama
"""What every family is: `forward(batch, caches, hidden)`, `kv_specs()`, and the `shape` that it was built from."""

MODELS: dict[str, type[Model]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}


def build(shape: ModelShape, *, group: Group, layers: range, dtype: torch.dtype, device: torch.device) -> Model:
    """The part of a model that holds `layers` on rank `group.rank`, with uninitialized weights (`weights.load` fills them).

    It is the first stage if `layers` starts at 0, the last if it ends at shape.num_layers. Raises LayoutError when group.size does
    not divide the heads or the intermediate size.
    """
    if not (0 <= layers.start < layers.stop <= shape.num_layers and layers.step == 1):
        raise ValueError(f"{layers} is not a run of the model's {shape.num_layers} layers")
    model = MODELS[shape.architecture](shape, layers=layers, seat=Seat(group, dtype, device))
    return model.eval()

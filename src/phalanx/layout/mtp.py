# SPDX-License-Identifier: Apache-2.0
"""The multi-token prediction module in the checkpoint of DeepSeek-V3 (arXiv 2412.19437) or GLM-4.5: `Mtp`. Its tensors are those of
a decoder layer behind the last one, and four more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.config.model import ModelShape
from phalanx.errors import OptionError
from phalanx.layout.families import WeightTensor, layer_tensors

MTP_ARCHITECTURES = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")


@dataclass(frozen=True)
class Mtp:
    """shape: the target's, continued behind the module's layer, so that this one is neither first nor last. layer: its number."""

    shape: ModelShape
    layer: int
    reads_target = True

    @property
    def layers(self) -> range:
        return range(self.layer, self.layer + 1)

    @property
    def inner_layers(self) -> tuple[int, ...]:
        return (self.layer,)

    @classmethod
    def of(cls, target: ModelShape) -> Mtp:
        """Raises OptionError where the target has none that can be run."""
        if target.architecture not in MTP_ARCHITECTURES or target.mtp_layers != 1:
            raise OptionError(
                "speculative_config: method 'mtp' does not work with this model",
                held=f"it is a {target.architecture} with {target.mtp_layers} modules of multi-token prediction",
                why=f"modules are read of {' and '.join(MTP_ARCHITECTURES)}, one of each", next="use another method",
            )  # fmt: skip
        layers = target.num_layers
        shape = replace(target, num_layers=layers + 2, windows=(*target.windows, *target.windows[-1:] * 2))
        return cls(shape, layers)

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.layer}"

    def own_tensors(self) -> Iterator[WeightTensor]:
        """What the module has beside its decoder layer. Its embedding and its head are copies of the target's, and not read."""
        hidden = self.shape.hidden_size
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield WeightTensor(f"{self.prefix}.{name}.weight", (hidden,), "replicated", "norm")
        yield WeightTensor(f"{self.prefix}.eh_proj.weight", (hidden, 2 * hidden), "replicated", "mlp", "eh_proj", kept="16 bit")

    def tensors(self) -> Iterator[WeightTensor]:
        """All that are read."""
        yield from self.own_tensors()
        yield from layer_tensors(self.shape, self.layer)

# SPDX-License-Identifier: Apache-2.0
"""The multi-token prediction module in the checkpoint of DeepSeek-V3 (arXiv 2412.19437), GLM-4.5, or Qwen3-Next and Qwen3.5: `Mtp`.
Its tensors are those of a decoder layer behind the last one, and four more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.config.model import ModelShape
from phalanx.errors import OptionError
from phalanx.layout.families import WeightTensor, layer_tensors


@dataclass(frozen=True)
class Names:
    """A checkpoint's. before: what stands before the names of the module's own tensors, and layer: before those of its decoder
    layer, behind the model's last one. norms: of the token's embedding, of the state, and before the LM head. joined: what joins
    the first two. normed: a state is given to the module, and to its next pass, as the last norm leaves it."""

    before: str
    layer: str
    norms: tuple[str, str, str]
    joined: str
    normed: bool = False


_DEEPSEEK = Names("model.layers.{layer}.", "model.layers.{layer}.", ("enorm", "hnorm", "shared_head.norm"), "eh_proj")
_QWEN = Names("mtp.", "mtp.layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "fc", normed=True)
MTP_ARCHITECTURES = {
    "DeepseekV3ForCausalLM": _DEEPSEEK, "DeepseekV32ForCausalLM": _DEEPSEEK, "GlmMoeDsaForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK, "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "Qwen3NextForCausalLM": _QWEN, "Qwen3_5ForCausalLM": _QWEN, "Qwen3_5MoeForCausalLM": _QWEN,
}  # fmt: skip


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
        """Raises OptionError where the target has none that can be run. Qwen3-Next's config does not say whether it has one."""
        names = MTP_ARCHITECTURES.get(target.architecture)
        if names is None or (names is not _QWEN and target.mtp_layers != 1):
            raise OptionError(
                "speculative_config: method 'mtp' does not work with this model",
                held=f"it is a {target.architecture} with {target.mtp_layers} modules of multi-token prediction",
                why=f"modules are read of {', '.join(MTP_ARCHITECTURES)}, one of each", next="use another method",
            )  # fmt: skip
        layers = target.num_layers
        latent = target.latent
        if latent is not None and latent.indexer is not None:  # the module's layer has one, whether or not the model's last one has
            latent = replace(latent, indexer=replace(latent.indexer, computes=(*latent.indexer.computes, True, True)))
        windows = (*target.windows, *target.windows[-1:] * 2)
        shape = replace(target, num_layers=layers + 2, windows=windows, latent=latent)
        return cls(shape, layers)

    @property
    def names(self) -> Names:
        return MTP_ARCHITECTURES[self.shape.architecture]

    def in_model(self, name: str) -> str:
        """The name of a tensor of the checkpoint, if it is the module's: as one of the layer behind the model's last one."""
        for start in (self.names.layer, self.names.before):
            if name.startswith(start := start.format(layer=self.layer)):
                return f"{self.prefix}.{name.removeprefix(start)}"
        return name

    @property
    def prefix(self) -> str:
        """Of its tensors in the model, as behind its last layer."""
        return f"model.layers.{self.layer}"

    def own_tensors(self) -> Iterator[WeightTensor]:
        """What the module has beside its decoder layer. Its embedding and its head are copies of the target's, and not read."""
        hidden = self.shape.hidden_size
        for name in self.names.norms:
            yield WeightTensor(f"{self.prefix}.{name}.weight", (hidden,), "replicated", "norm")
        joined = self.names.joined
        yield WeightTensor(f"{self.prefix}.{joined}.weight", (hidden, 2 * hidden), "replicated", "mlp", joined, kept="16 bit")

    def tensors(self) -> Iterator[WeightTensor]:
        """All that are read."""
        yield from self.own_tensors()
        yield from layer_tensors(self.shape, self.layer)

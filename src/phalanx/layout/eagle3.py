# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head (arXiv 2503.01840) as its config.json gives it, and its tensors: `Eagle3`.

Three formats are read. SafeAILab's and SpecForge's have the fields of a Llama and the head's beside each other, and the layer's
tensors as "midlayer."; speculators' has the layer's fields in transformer_layer_config, and its tensors as "layers.0.".

Which inner states of the target a head was trained with is written in two ways, that differ by one: as the layers before which they
are, or as those whose output they are. No field says which. SpecForge counts outputs, and its first is always that of layer 1;
speculators and NVIDIA count boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config.json_fields import JsonFields
from phalanx.config.model import CONFIG, ModelShape, load_config
from phalanx.errors import ModelError
from phalanx.layout.families import WeightTensor
from phalanx.layout.families.dense import attention, gated_mlp
from phalanx.log import get_logger

log = get_logger(__name__)

LAYERS, SPECULATORS = "eagle_aux_hidden_state_layer_ids", "speculators_model_type"
_OF_HEAD = (
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "eagle_config",
    LAYERS, "target_model_type", "draft_model_type",
)  # fmt: skip
_REFUSED = ("fc_norm", "enable_sp_ulysses")


@dataclass(frozen=True)
class Eagle3:
    """shape: of its layer, as of a Llama; the vocabulary is the target's. draft_vocab: tokens that it can propose.
    target_hidden: of one inner state. inner_layers: the layers of the target before which these are; its number of layers stands
    for the end of the last one.

    norm_before_residual: what is added to the block's output is the normed state. norm_before_fc: the inner states are normed
    together. norm_output: the state that a pass gives to the next one is normed. own_embedding: it does not share the target's.
    """

    shape: ModelShape
    draft_vocab: int
    target_hidden: int
    inner_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    layers = range(1)
    reads_target = True

    @classmethod
    def from_folder(cls, folder: Path, target: ModelShape, *, quiet: bool = False) -> Eagle3:
        """Read a head for this target. Raises ModelError where it is none, is not for this target, or has traits that are not
        built."""
        file, config = str(folder / CONFIG), load_config(folder)
        if not _is_head(config):
            raise ModelError(
                f"{file} is of no EAGLE-3 head", held=f"architectures={config.get('architectures')}",
                why="a head has draft_vocab_size, or an architecture named after EAGLE-3",
                next="give the folder of a head, or the method that this model is for",
            )  # fmt: skip
        fields = JsonFields(config, file=file)
        for name in _REFUSED:
            if fields.flag(name, False):
                raise ModelError(f"{file} has {name}=true", why="heads with this trait are not built", next="use another head")
        of_layer = dict(config["transformer_layer_config"] if SPECULATORS in config else config)
        plain = {name: value for name, value in of_layer.items() if name not in _OF_HEAD}
        if (kind := plain.get("model_type", "llama")) != "llama" or plain.get("num_hidden_layers", 1) != 1:
            raise ModelError(
                f"{file} has model_type={kind!r} and num_hidden_layers={plain.get('num_hidden_layers', 1)}",
                why="only heads of one layer of Llama are built", next="use another head",
            )  # fmt: skip
        defaults = {"vocab_size": target.vocab_size, "num_hidden_layers": 1}
        shape = ModelShape.from_config(
            {**defaults, **plain, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}, file=file, quiet=quiet
        )
        head = cls(
            shape=shape, draft_vocab=fields.count("draft_vocab_size", shape.vocab_size),
            target_hidden=fields.count("target_hidden_size", shape.hidden_size), inner_layers=_inner_layers(config, file, target),
            norm_before_residual=fields.flag("norm_before_residual", False), norm_before_fc=fields.flag("norm_before_fc", False),
            norm_output=fields.flag("norm_output", False),
        )  # fmt: skip
        if head.target_hidden != target.hidden_size:
            raise ModelError(
                f"{file} is of a head for another target", held=f"it reads states of {head.target_hidden} values",
                why=f"those of this target have {target.hidden_size}", next="use a head that was trained for this target",
            )  # fmt: skip
        if not quiet:
            log.info("%s: the head reads the states before layers %s", file, ", ".join(map(str, head.inner_layers)))
        return head

    def with_embedding(self, own: bool) -> Eagle3:
        """The same head, whose checkpoint has an embedding, or has none. Raises ModelError where it cannot share the target's."""
        if not own and self.shape.hidden_size != self.target_hidden:
            raise ModelError(
                "the EAGLE-3 head has no embedding", held=f"its states have {self.shape.hidden_size} values",
                why=f"the target's embedding has {self.target_hidden}, so that it cannot be shared", next="use another head",
            )  # fmt: skip
        return replace(self, own_embedding=own)

    def tensors(self) -> Iterator[WeightTensor]:
        """Those of the checkpoint that are read. The first layer takes the embedding beside the state."""
        shape, hidden = self.shape, self.shape.hidden_size
        inner = len(self.inner_layers) * self.target_hidden
        yield WeightTensor("fc.weight", (hidden, inner), "replicated", "mlp", "fc")
        if self.norm_before_fc:
            yield WeightTensor("input_norm.weight", (inner,), "replicated", "norm")
        yield WeightTensor("layers.0.hidden_norm.weight", (hidden,), "replicated", "norm")
        for tensor in attention(shape, "layers.0"):
            doubled = tensor.gemm == "qkv"
            yield replace(tensor, shape=(tensor.shape[0], 2 * hidden)) if doubled else tensor
        yield from gated_mlp("layers.0.mlp", hidden, shape.intermediate_size, "mlp", bias=shape.mlp_bias)
        yield WeightTensor("norm.weight", (hidden,), "replicated", "norm")
        yield WeightTensor("lm_head.weight", (self.draft_vocab, hidden), "vocabulary", "head", "head")
        if self.own_embedding:
            yield WeightTensor("embed_tokens.weight", (shape.vocab_size, hidden), "vocabulary", "embedding")


def _is_head(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or []
    stated = config.get(SPECULATORS) == "eagle3" or any("eagle3" in str(name).lower() for name in names)
    return stated or (SPECULATORS not in config and "draft_vocab_size" in config)


def _inner_layers(config: Mapping[str, Any], file: str, target: ModelShape) -> tuple[int, ...]:
    """The layers before which the head's inner states are, the first one first."""
    of_eagle, layers = config.get("eagle_config") or {}, target.num_layers
    if of_eagle.get("use_aux_hidden_state") is False:
        raise ModelError(f"{file} has use_aux_hidden_state=false", why="heads without inner states are not built")
    stated = config.get(LAYERS) or of_eagle.get(LAYERS)
    ids = sorted(int(layer) for layer in stated) if stated else [2, layers // 2, layers - 3]
    outputs = bool(stated) and SPECULATORS not in config and ids[0] == 1
    inner = tuple(layer + 1 for layer in ids) if outputs else tuple(ids)
    if len(set(inner)) < len(inner) or not 0 <= inner[0] <= inner[-1] <= layers:
        raise ModelError(
            f"{file}: the head reads the states before layers {', '.join(map(str, inner))}", held=f"the target has {layers} layers",
            why=f"{LAYERS} are for another target" if stated else f"without {LAYERS} these are the published default",
            next="use a head that was trained for this target",
        )  # fmt: skip
    return inner

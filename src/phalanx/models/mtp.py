# SPDX-License-Identifier: Apache-2.0
"""The multi-token prediction module of DeepSeek-V3 (arXiv 2412.19437), GLM-4.5, and Qwen3-Next: a decoder layer that predicts
tokens from the target's last state, and then from its own; embedding and head are the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.errors import WeightError
from phalanx.layout import weight_tensors as catalog
from phalanx.layout.cache import Cache
from phalanx.layout.mtp import Mtp
from phalanx.models import registry
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.checkpoint import by_model_names, locate_tensors, require_known, text_tensors
from phalanx.models.decoder import Decoder
from phalanx.models.layers.linear import ColumnParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext
from phalanx.models.weights import Progress, read_parts


class MtpHead(nn.Module):
    """A `Drafter`. target: the last stage of the model, with the embedding."""

    reads_next = True

    def __init__(self, mtp: Mtp, target: Decoder, context: LayerContext) -> None:
        super().__init__()
        assert target.embed_tokens is not None
        assert target.lm_head is not None
        self.mtp, self.context, shape = mtp, context, mtp.shape
        self.inner_layers, self.width = mtp.inner_layers, shape.hidden_size
        self._shared = target.embed_tokens, target.lm_head  # in a tuple: they are no parts of the module
        own = replace(context, declared={tensor.name: tensor for tensor in mtp.own_tensors()})
        assert target.norm is not None
        self._target_norm = (target.norm,)
        self.enorm, self.hnorm, self.norm = (
            RmsNorm(f"{mtp.prefix}.{name}", shape.hidden_size, shape.rms_norm_eps, offset=shape.norm_offset, context=own)
            for name in mtp.names.norms
        )
        self.eh_proj = ColumnParallelLinear.of(f"{mtp.prefix}.{mtp.names.joined}", context=own)
        self.layer = registry.build(shape, range(mtp.layer, mtp.layer + 1), context)

    def declared_caches(self) -> list[Cache]:
        """As `Drafter`."""
        return self.layer.declared_caches()

    def first_states(self, inner: Tensor | None) -> Tensor | None:
        """As `Drafter`: the target's last state, before the final norm or behind it."""
        if not self.mtp.names.normed or inner is None:
            return inner
        normed: Tensor = self._target_norm[0](inner)
        return normed

    def hidden_states(self, batch: Batch, caches: Sequence[LayerCache], states: Tensor | None) -> Tensor:
        """As `Drafter`."""
        assert states is not None
        embedded, _ = self._shared[0](batch.token_ids, self.enorm)
        output = self.layer.hidden_states(batch, caches, self.eh_proj(torch.cat([embedded, self.hnorm(states)], 1)))
        return self.norm(output) if self.mtp.names.normed else output

    def most_likely(self, states: Tensor) -> Tensor:
        """As `Drafter`."""
        lm_head = self._shared[1]
        return lm_head.argmax(lm_head.local(states if self.mtp.names.normed else self.norm(states)))

    def load(self, folder: Path, progress: Progress | None = None) -> None:
        """Read the module's tensors from the target's checkpoint. Raises WeightError, as `weights.load`."""
        shape, prefix = self.mtp.shape, f"{self.mtp.prefix}."
        known = {tensor.name for tensor in self.mtp.own_tensors()} | catalog.layer_tensors(shape, self.mtp.layer).keys()
        known |= catalog.fused_experts(shape, self.mtp.layer).keys() | catalog.scales(shape)
        located = locate_tensors(folder)
        if shape.wrapper is not None and not self.mtp.names.normed:
            located = text_tensors(located, shape.wrapper)
        copies = (f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight")
        located = {self.mtp.in_model(name): place for name, place in located.items()}
        named = by_model_names(located, known, tied=shape.tie_word_embeddings)
        files = {name: place for name, place in named.items() if name.startswith(prefix) and name not in copies}
        if not files:
            raise WeightError(
                f"{folder} holds no {self.mtp.names.before.format(layer=self.mtp.layer)}*",
                held=f"config.json says that there are {shape.mtp_layers} such modules" if shape.mtp_layers else "",
                why="tools that convert checkpoints often leave multi-token prediction out",
                next="use the published checkpoint, or speculate without method 'mtp'",
            )  # fmt: skip
        require_known(files, known, shape.num_layers)
        read_parts(self, files, folder, progress)

# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head (arXiv 2503.01840): one layer that predicts tokens from the target's inner states, and then from its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.layout.cache import Cache
from phalanx.layout.eagle3 import Eagle3
from phalanx.layout.families import layer_cache
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.checkpoint import Located, locate_tensors, require_known
from phalanx.models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from phalanx.models.layers.grouped_query_attention import GroupedQueryAttention
from phalanx.models.layers.linear import ColumnParallelLinear
from phalanx.models.layers.mlp import GatedMlp
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.rope import Rotary
from phalanx.models.slices import LayerContext, Slice, Sliced
from phalanx.models.weights import Progress, read_parts


class DraftVocabulary(Sliced):
    """d2t [draft_vocab] int64: what is added to a draft's id to give the target's; zeros where the checkpoint has none, since the
    two vocabularies are one."""

    def __init__(self, size: int, target_size: int, device: torch.device) -> None:
        super().__init__()
        self._may_be_absent = size == target_size
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64, device=device))

    def forward(self, drafts: Tensor) -> Tensor:
        """Ids of the target, for drafts [S] int64."""
        return drafts + self.d2t[drafts.clamp(0, len(self.d2t) - 1)]

    def slices(self) -> Iterator[Slice]:
        absent: Callable[[], None] | None = (lambda: None) if self._may_be_absent else None
        yield Slice("d2t", tuple(self.d2t.shape), self.d2t, dtypes=("I64", "I32"), absent=absent)

    def dummy_slices(self) -> Iterator[Slice]:
        """None: without a checkpoint the first tokens of the vocabulary are those that can be drafted."""
        return iter(())


class Eagle3Head(nn.Module):
    """A `Drafter`. embedding: the target's, which it shares unless it has its own."""

    reads_next = True

    def __init__(self, head: Eagle3, embedding: VocabParallelEmbedding, context: LayerContext) -> None:
        super().__init__()
        self.head, shape = head, head.shape
        self.inner_layers, self.width = head.inner_layers, shape.hidden_size
        self.context = context = replace(context, declared={tensor.name: tensor for tensor in head.tensors()})
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.own_embedding: VocabParallelEmbedding | None = None
        if head.own_embedding:
            self.own_embedding = VocabParallelEmbedding("embed_tokens", shape.vocab_size, hidden, context=context)
        self._embedding = (self.own_embedding or embedding,)  # in a tuple: the target's is no part of the head
        self.input_norm: RmsNorm | None = None
        if head.norm_before_fc:
            self.input_norm = RmsNorm("input_norm", len(head.inner_layers) * head.target_hidden, eps, context=context)
        self.fc = ColumnParallelLinear.of("fc", context=context)
        self.hidden_norm = RmsNorm("layers.0.hidden_norm", hidden, eps, context=context)
        self.input_layernorm = RmsNorm("layers.0.input_layernorm", hidden, eps, context=context)
        self.self_attn = GroupedQueryAttention("layers.0.self_attn", shape, 0, context=context)
        self.post_attention_layernorm = RmsNorm("layers.0.post_attention_layernorm", hidden, eps, context=context)
        self.mlp = GatedMlp("layers.0.mlp", context=context)
        self.norm = RmsNorm("norm", hidden, eps, context=context)
        self.lm_head = ParallelLMHead("lm_head", head.draft_vocab, hidden, tied=None, context=context)
        self.draft_vocabulary = DraftVocabulary(head.draft_vocab, shape.vocab_size, context.device)
        self.rotary_emb = Rotary(*shape.rotary_in(0), context.device)

    def declared_caches(self) -> list[Cache]:
        """As `Drafter`."""
        return [layer_cache(self.head.shape, 0, self.context.kv_dtype, self.context.group.size)]

    def first_states(self, inner: Tensor | None) -> Tensor | None:
        """As `Drafter`: the inner states of a token become one state."""
        assert inner is not None
        states: Tensor = self.fc(inner if self.input_norm is None else self.input_norm(inner))
        return states

    def hidden_states(self, batch: Batch, caches: Sequence[LayerCache], states: Tensor | None) -> Tensor:
        """As `Drafter`."""
        assert states is not None
        embedded, _ = self._embedding[0](batch.token_ids, self.input_layernorm)
        normed = self.hidden_norm(states)
        x, residual = self.self_attn(
            torch.cat([embedded, normed], 1), self.rotary_emb(batch.positions), batch, caches[0],
            normed if self.head.norm_before_residual else states, self.post_attention_layernorm,
        )  # fmt: skip
        _, residual = self.mlp(x, residual, None, batch)
        output: Tensor = self.norm(residual) if self.head.norm_output else residual
        return output

    def most_likely(self, states: Tensor) -> Tensor:
        """As `Drafter`."""
        normed = states if self.head.norm_output else self.norm(states)
        tokens: Tensor = self.draft_vocabulary(self.lm_head.argmax(self.lm_head.local(normed)))
        return tokens

    def load(self, folder: Path, progress: Progress | None = None) -> None:
        """Read its checkpoint. Raises WeightError, as `weights.load`."""
        files = head_tensors(folder)
        require_known(files, {tensor.name for tensor in self.head.tensors()} | {"d2t", "t2d"}, 1)
        read_parts(self, files, folder, progress)


def head_tensors(folder: Path) -> Located:
    """The tensors of a head, by the names of `Eagle3.tensors`."""
    located = locate_tensors(folder)
    return {name.removeprefix("model.").replace("midlayer.", "layers.0.", 1): place for name, place in located.items()}

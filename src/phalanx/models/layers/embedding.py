# SPDX-License-Identifier: Apache-2.0
"""The vocabulary at both ends, split by rows: token ids to vectors, and vectors to logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from phalanx import kernels
from phalanx.kernels.sampling import sampling
from phalanx.layout import shard
from phalanx.models.layers.activation import NormOutput
from phalanx.models.layers.linear_methods.batch_invariant import batch_invariant
from phalanx.models.layers.linear_methods.choose import linear_method
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext, Slice, Sliced, WeightPart


class VocabParallelEmbedding(Sliced):
    """The rows of a lookup table, split over the ranks: each looks up the ids that it holds and gives zeros for the others; their
    sum is the result.

    multiplier: of the vectors (Granite, Gemma), in their dtype, which no kernel fuses. weight [local_vocab, hidden]; rows at or
    beyond the vocabulary's size are padding and zero.
    """

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, *, multiplier: float = 1.0, context: LayerContext
    ) -> None:  # fmt: skip
        super().__init__()
        self.multiplier = torch.tensor(multiplier, dtype=context.dtype, device="cpu").item()
        self.name, self.vocab_size, self.context = name, vocab_size, context
        self.local = shard.vocabulary(vocab_size, context.group.size, context.group.rank)
        self.weight = context.weight(len(self.local), hidden_size)
        self.weight[self.num_tokens :].zero_()

    @property
    def num_tokens(self) -> int:
        """How many of the local rows are tokens; the others are padding."""
        return max(0, min(self.local.stop, self.vocab_size) - self.local.start)

    def forward(
        self, token_ids: Tensor, norm: RmsNorm | None, last: tuple[Tensor, Tensor] | None = None
    ) -> tuple[NormOutput, Tensor]:  # fmt: skip
        """token_ids [T] int64 -> (norm(vectors), vectors), of [T, hidden]; without a norm the latter twice. last: see
        `Batch.last`."""
        group = self.context.group
        if norm is None or not norm.fuses:
            vectors, _ = kernels.embed(token_ids, self.weight, self.local.start, last)
            vectors = group.all_reduce(self._multiplied(vectors))
            return vectors if norm is None else norm(vectors), vectors
        if group.size == 1 and self.multiplier == 1.0 and not norm.keep_norm:
            fusion = norm.fusion(self.weight)  # there is no residual: the other fields count
            return norm.unpack(
                kernels.embed_norm(token_ids, self.weight, last, fusion.weight, fusion.eps, fusion.quant, fusion.scale)
            )  # fmt: skip
        vectors, zeros = kernels.embed(token_ids, self.weight, self.local.start, last)
        return norm.unpack(group.all_reduce(self._multiplied(vectors), norm.fusion(zeros)))

    def _multiplied(self, vectors: Tensor) -> Tensor:
        return vectors if self.multiplier == 1.0 else vectors.mul_(self.multiplier)

    def slices(self) -> Iterator[Slice]:
        if self.num_tokens:
            shape = (self.vocab_size, self.weight.shape[1])
            yield Slice(f"{self.name}.weight", shape, self.weight[: self.num_tokens], self.local.start)


class QuantizedVocabulary(Sliced):
    """The rows of a quantized output head on this rank, as `VocabParallelEmbedding` splits them. method: of the rows of tokens;
    None on a rank that has padding alone."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.name, self.dtype, self.device = name, context.dtype, context.device
        self.local = shard.vocabulary(vocab_size, context.group.size, context.group.rank)
        rows = range(min(self.local.start, vocab_size), min(self.local.stop, vocab_size))
        self.num_tokens, self.method = len(rows), None
        if rows:
            part = WeightPart(name, (vocab_size, hidden_size), rows, range(hidden_size))
            self.method = batch_invariant(linear_method([part], context), context)

    def logits(self, states: Tensor, out: Tensor | None) -> Tensor:
        """states [S, hidden] -> [S, local], in `out` where that is given; 0 for padding."""
        if not len(states):  # of a step of parts of prompts: no GEMM of quantized weights expects that
            return torch.empty(0, len(self.local), dtype=self.dtype, device=self.device)
        if out is None and self.method is not None and self.num_tokens == len(self.local):
            return self.method.multiply(states)
        out = torch.empty(len(states), len(self.local), dtype=self.dtype, device=self.device) if out is None else out
        if self.method is not None:
            out[:, : self.num_tokens] = self.method.multiply(states)
        out[:, self.num_tokens :] = 0.0
        return out

    def slices(self) -> Iterator[Slice]:
        """None: `method` reads the weight."""
        return iter(())


class ParallelLMHead(nn.Module):
    """Logits: each rank computes those of its rows of the vocabulary, [S, local_vocab]. `gather` collects all of them; `argmax` and
    `sample` exchange a few words per row only.

    `tied` is the embedding on this rank whose weight the head shares, if it does. A tied head on another pipeline stage than its
    embedding holds a copy of the weight: `name` is then the embedding's. cap: c of c * tanh(logits / c) (Gemma-2). quantized: the
    checkpoint has the head so, by its configuration.
    """

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, *, tied: VocabParallelEmbedding | None, multiplier: float = 1.0,
        cap: float | None = None, quantized: bool = False, context: LayerContext,
    ) -> None:  # fmt: skip
        super().__init__()
        self.multiplier, self.cap, self.row_by_row = multiplier, cap, context.row_by_row
        self.batch_invariant = context.batch_invariant
        self.vocab_size, self.group = vocab_size, context.group
        self._plain = partial(VocabParallelEmbedding, name, vocab_size, hidden_size, context=context)
        self.table: VocabParallelEmbedding | QuantizedVocabulary
        if quantized:
            self.table = QuantizedVocabulary(name, vocab_size, hidden_size, context)
        else:
            self.table = self._plain() if tied is None else tied

    def take_plain(self) -> None:
        """Make room for a head in 16 bit, before weights are read, where files have it against their configuration."""
        self.table = self._plain()

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """hidden [T, hidden], rows [S] int64 -> logits of those rows [S, vocab_size] fp32."""
        return self.gather(self.local(hidden, rows)).float()

    @property
    def width(self) -> int:
        """Columns of this rank's logits; the last ranks' last ones may be padding."""
        return len(self.table.local)

    def local(self, hidden: Tensor, rows: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """hidden [T, hidden], rows [S] int64 (None: all) -> this rank's logits of those rows [S, width], in the model's dtype."""
        states = hidden if rows is None else hidden.index_select(0, rows)
        if self.multiplier != 1.0:  # of the logits; rows of the input are shorter
            states = states * self.multiplier
        output = self._logits(states, out)
        return output if self.cap is None else output.div_(self.cap).tanh_().mul_(self.cap)

    def _logits(self, states: Tensor, out: Tensor | None) -> Tensor:
        table = self.table
        if isinstance(table, QuantizedVocabulary):
            if self.row_by_row and len(states) > 1:
                return torch.cat([table.logits(row.unsqueeze(0), None) for row in states])
            return table.logits(states, out)
        weight = table.weight
        if out is None:  # captured in a graph or not, one GEMM: the same bits
            out = torch.empty(len(states), len(weight), dtype=weight.dtype, device=weight.device)
        if self.row_by_row:
            for row, result in zip(states, out, strict=True):
                result.copy_(kernels.linear(row.clone().unsqueeze(0), weight)[0])
        elif self.batch_invariant:
            from phalanx.kernels.batch_invariant import batch_invariant_gemm

            batch_invariant_gemm(states, weight, out=out)
        elif len(states):
            kernels.linear(states, weight, out=out)
        return out

    def gather(self, local: Tensor) -> Tensor:
        """This rank's logits [S, width] -> those of the whole vocabulary [S, vocab_size], in the same dtype. Collective."""
        return self.group.all_gather(local, dim=-1)[:, : self.vocab_size]

    def argmax_keys(self, local: Tensor) -> Tensor:
        """This rank's logits [S, width] -> all ranks' keys [ranks, S, parts] int64: see `sampling.packed_argmax_keys`.
        Collective."""
        keys = sampling.packed_argmax_keys(local, self.table.local.start, self.table.num_tokens)
        return self.group.all_gather(keys.unsqueeze(0), dim=0)

    def argmax(self, local: Tensor) -> Tensor:
        """This rank's logits [S, width] -> the token with the highest logit of each row [S] int64, the lowest id of equals.
        Collective."""
        return self._decode(self.argmax_keys(local))

    def sample(self, local: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
        """This rank's logits [S, width] -> a token for each row [S] int64, as `sampling.sample` draws it from the logits of the
        whole vocabulary. Collective."""
        table = self.table
        keys = sampling.gumbel_max(local, table.local.start, table.num_tokens, self.argmax_keys(local), temperature, noise)
        return self._decode(self.group.all_gather(keys.unsqueeze(0), dim=0))

    def _decode(self, keys: Tensor) -> Tensor:
        tokens = torch.empty(keys.shape[1], dtype=torch.int64, device=keys.device)
        sampling.decode_keys(keys, tokens)
        return tokens

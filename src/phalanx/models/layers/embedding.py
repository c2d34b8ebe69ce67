# SPDX-License-Identifier: Apache-2.0
"""The vocabulary at both ends, split by rows: token ids to vectors, and vectors to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from phalanx import kernels
from phalanx.models.slices import Seat, Slice, Sliced
from phalanx.plan import shard


class VocabParallelEmbedding(Sliced):
    """Rows of a lookup table over the ranks: each looks up the ids that it holds, gives zeros for the others, and the sum is whole.

    weight [local_vocab, hidden]; rows at or beyond the vocabulary's size are padding and zero.
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, *, seat: Seat) -> None:
        super().__init__()
        self.name, self.vocab_size, self.seat = name, vocab_size, seat
        self.local = shard.vocabulary(vocab_size, seat.group.size, seat.group.rank)
        self.weight = seat.weight(len(self.local), hidden_size)
        self.weight[self.held :].zero_()

    @property
    def held(self) -> int:
        """How many of the local rows are tokens, not padding."""
        return max(0, min(self.local.stop, self.vocab_size) - self.local.start)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, hidden]."""
        group = self.seat.group
        if group.size == 1:
            return F.embedding(token_ids, self.weight)
        row = token_ids - self.local.start
        elsewhere = (row < 0) | (row >= len(self.local))
        found = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        return group.all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0))

    def slices(self) -> Iterator[Slice]:
        if self.held:
            yield Slice(f"{self.name}.weight", (self.vocab_size, self.weight.shape[1]), self.weight[: self.held], self.local.start)


class ParallelHead(Sliced):
    """Logits: each rank computes those of its rows of the vocabulary, and all get all of them.

    `tied` is the embedding on this rank whose weight it shares, if it does. A tied head on another pipeline stage than its
    embedding holds a copy: `name` is then the embedding's.
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, *, tied: VocabParallelEmbedding | None, seat: Seat) -> None:
        super().__init__()
        self.vocab_size, self.group = vocab_size, seat.group
        self.table = VocabParallelEmbedding(name, vocab_size, hidden_size, seat=seat) if tied is None else tied

    def forward(self, hidden: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [T, hidden], rows [S] int64 -> logits of those rows [S, vocab_size] fp32, in `out` where one is given."""
        local = kernels.linear(hidden.index_select(0, rows), self.table.weight)
        logits = self.group.all_gather(local, dim=-1)[:, : self.vocab_size]
        return logits.float() if out is None else out.copy_(logits)

    def slices(self) -> Iterator[Slice]:
        """None: what it reads, its table reads."""
        return iter(())

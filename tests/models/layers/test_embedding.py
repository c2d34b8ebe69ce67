# SPDX-License-Identifier: Apache-2.0
"""The vocabulary at both ends, over ranks: vectors and their norm, logits, and argmax without gathering the logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext
from tests.support.models_layers import fill

CPU = torch.device("cpu")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [65, 100, 256])
def test_the_vocabulary_at_both_ends(tp: int, tied: bool, vocab: int) -> None:
    tensors = {"e.weight": torch.randn(vocab, 8), "h.weight": torch.randn(vocab, 8), "n.weight": torch.rand(8)}
    ids, rows = torch.randint(0, vocab, (20,)), torch.tensor([3, 19, 3])
    last_tokens, slots = torch.randint(0, vocab, (30,)), torch.randperm(30)[:20]
    unknown = torch.where(torch.arange(20) % 3 == 0, -1, ids)

    def act(group: Group) -> tuple[torch.Tensor, ...]:
        context = LayerContext(group, torch.float32, CPU)
        embedding, norm = VocabParallelEmbedding("e", vocab, 8, context=context), RmsNorm("n", 8, 1e-5, context=context)
        head = ParallelLMHead("h", vocab, 8, tied=embedding if tied else None, context=context)
        for layer in (embedding, head.table, norm):
            fill(layer, tensors)
        normed, vectors = embedding(ids, norm)
        known = embedding(unknown, norm, (last_tokens, slots))[1]
        local = head.local(vectors)
        assert local.shape == (20, head.width)
        assert head.argmax_keys(local).shape == (group.size, 20, 1)
        return vectors, normed, known, head(vectors, rows), head.argmax(local), head.local(vectors[:0])

    vectors = tensors["e.weight"][ids]
    table = tensors["e.weight" if tied else "h.weight"]
    with torch.inference_mode():
        for embedded, normed, known, computed, tokens, none in LocalWorld(tp).run(act):
            assert torch.equal(embedded, vectors)
            torch.testing.assert_close(normed, F.rms_norm(vectors, (8,), tensors["n.weight"], 1e-5), rtol=1e-5, atol=1e-5)
            assert torch.equal(known, tensors["e.weight"][torch.where(unknown < 0, last_tokens[slots], ids)])
            assert computed.shape == (3, vocab)
            torch.testing.assert_close(computed, vectors[rows] @ table.T, rtol=1e-5, atol=1e-5)
            assert torch.equal(tokens, (vectors @ table.T).argmax(-1))
            assert len(none) == 0


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_lowest_of_equals_wins_on_every_rank(tp: int) -> None:
    """In bf16, where equals are common; the same tokens as from all logits."""
    table = torch.randn(200, 16).round().bfloat16()
    table[150:] = table[20:70]
    hidden = torch.randn(40, 16).round().bfloat16()

    def act(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        head = ParallelLMHead("h", 200, 16, tied=None, context=LayerContext(group, torch.bfloat16, CPU))
        fill(head.table, {"h.weight": table})
        local = head.local(hidden)
        return head.argmax(local), head.gather(local)

    with torch.inference_mode():
        for tokens, logits in LocalWorld(tp).run(act):
            assert logits.dtype == torch.bfloat16
            best = logits.float().amax(-1, keepdim=True)
            assert ((logits == best).sum(-1) > 1).any()
            assert tokens.tolist() == [int((row == top).nonzero()[0]) for row, top in zip(logits, best, strict=True)]

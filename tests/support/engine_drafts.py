# SPDX-License-Identifier: Apache-2.0
"""Drafts for the fake ranks: `proposer`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from phalanx.engine.fake import FakeProposer, fake_tokens
from phalanx.engine.messages import NO_DRAFT, SlotAssignment
from tests.support.engine_grammar import VOCAB


def proposer(chance: random.Random, luck: float) -> FakeProposer:
    """Drafts of which so many are what follows; some have no draft in their place, or are few."""

    def propose(assignment: SlotAssignment, tokens: Sequence[int]) -> list[int]:
        count, right = chance.choice([8, 8, 8, 0, 1, 2]), list(tokens)
        for _ in range(count):
            (token,) = fake_tokens(right, assignment.params, seed=assignment.seed, vocab_size=VOCAB, count=1)
            # The grammar of these tests takes even tokens, and the next one of them is sampled then.
            right.append((token + token % 2) % VOCAB if assignment.params.structured_output is not None else token)
        wrong = [chance.choice([NO_DRAFT, (token + 1) % VOCAB]) for token in right]
        return [token if chance.random() < luck else other for token, other in zip(right, wrong, strict=True)][len(tokens) :]

    return propose

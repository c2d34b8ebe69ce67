# SPDX-License-Identifier: Apache-2.0
"""Requests whose decode rows may be drafts, for kernels over states: the outputs of the tokens that are right are those without."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.kernels.gated_delta.dispatch import count_chunks
from phalanx.kernels.gated_delta.reference import StateRows

DRAFTS, LENGTH = 3, 40


def require_alike(
    texts: Sequence[Sequence[Tensor]], wanted: Sequence[Tensor], garbage: Callable[[int], Sequence[Tensor]],
    run: Callable[[Sequence[Tensor], StateRows], Tensor], dtype: torch.dtype, device: str, seed: int, absent: int,
) -> None:  # fmt: skip
    """Two requests of which some drafts are right, in steps with prompts beside them, with absent rows, and a third that takes a
    slot; one is computed on from its last decode row as a prompt is, as behind a state that was kept.

    texts: the inputs of three requests of LENGTH tokens; wanted: their outputs without drafts; garbage: inputs of so many drafts
    that are wrong; run: a step of inputs and rows, over two slots."""
    chance = random.Random(seed)
    done, slots, pairs = [0, 0, LENGTH], [0, 1, 0], list[tuple[Tensor, Tensor]]()
    for step in range(60):
        if step == 30:
            done[0], done[2] = LENGTH, 0
        rows = list[tuple[int, int, int, int]]()  # (request, tokens, those that are right, decode rows)
        for request in range(3):
            left = LENGTH - done[request]
            if not left or chance.random() < 0.2:
                continue
            if not done[request] or step % 11 == 10:
                count = min(left, chance.randrange(2, 9))
                rows += [(request, count, count, 0)] if count > 1 else []
                continue
            count = chance.randrange(1, DRAFTS + 2)
            rows.append((request, count, min(left, chance.randrange(1, count + 1)), count))
        rows.sort(key=lambda row: not row[3])
        if not rows:
            continue
        lengths, starts, places, kv = list[int](), [0], list[int](), list[int]()
        parts: list[list[Tensor]] = [[] for _ in texts[0]]
        for request, count, right, decodes in rows:
            for part, text, other in zip(parts, texts[request], garbage(count - right), strict=True):
                part += [text[done[request] : done[request] + right], other]
            each = range(count) if decodes else [count - 1]
            lengths += [done[request] + number + 1 for number in each]
            starts += [starts[-1] + (1 if decodes else count) * (number + 1) for number in range(len(each))]
            places += [slots[request]] * len(each)
            stored = chance.randrange(right, count + 1)
            kv += [1] * stored + [-1] * (count - stored)
        decodes = sum(row[3] for row in rows)
        for _ in range(absent):  # of slot 0, without a token
            lengths.insert(decodes, 0)
            places.insert(decodes, 0)
            starts.insert(decodes, decodes)
        decodes += absent
        state_rows = StateRows(
            torch.tensor(places, device=device), torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device), torch.tensor(kv, device=device), decodes,
            count_chunks(starts, decodes), starts, lengths,
        )  # fmt: skip
        out = run([torch.cat(part).to(device) for part in parts], state_rows)
        begin = 0
        for request, count, right, _ in rows:
            pairs.append((out[begin : begin + right].cpu(), wanted[request][done[request] : done[request] + right]))
            begin, done[request] = begin + count, done[request] + right
    assert done[1:] == [LENGTH, LENGTH]
    outs, right = (torch.cat(each).float() for each in zip(*pairs, strict=True))
    if dtype == torch.float32:
        torch.testing.assert_close(outs, right, rtol=5e-4, atol=5e-4)
    else:  # a norm enlarges the error of what is nearly 0: all of them together are close
        assert (outs - right).norm() / right.norm() < 0.015

# SPDX-License-Identifier: Apache-2.0
"""Logits of two runs of the same steps, beside each other: KL divergence and top-1 agreement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.worker.sampler import Masks, Rows, Sampler, ShardSampling
from phalanx.worker.sampler_output import PromptScores, SampledTokens
from phalanx.worker.speculation.verification import Verification


class LogitsRecorder(Sampler):
    """A sampler that keeps the logits of all positions in host memory, in the order of the steps: of each position that samples,
    and of each prompt token. keeps: on the other ranks it only takes part."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, *, keeps: bool) -> None:
        super().__init__(slots, vocab_size, device)
        self._keeps, self._logits = keeps, list[Tensor]()

    def take(self) -> Tensor:
        """The logits [P, V] fp32 since the last call."""
        taken, self._logits = self._logits, []
        return torch.cat(taken) if taken else torch.empty(0, self._vocab_size)

    def shard_sampling(
        self, slots: Rows, positions: Rows, masks: Masks, verification: Verification | None = None
    ) -> ShardSampling | None:
        """None: all logits are wanted."""
        return None

    def sample(
        self, logits: Tensor, slots: Rows, positions: Rows, masks: Masks, verification: Verification | None = None
    ) -> SampledTokens:
        self._recorded(logits)
        return super().sample(logits, slots, positions, masks, verification)

    def score_prompt(self, logits: Callable[[slice], Tensor], targets: Sequence[int], counts: Sequence[int]) -> PromptScores:
        return super().score_prompt(lambda part: self._recorded(logits(part)), targets, counts)

    def _recorded(self, logits: Tensor) -> Tensor:
        if self._keeps:
            self._logits.append(logits.float().cpu())
        return logits


@dataclass(frozen=True)
class Agreement:
    """Of `positions` positions: the mean of KL(reference || own) in nats, and the fraction whose most likely token is the same.
    worst: the kind of step with the largest mean, and that mean. finite: no logit of either run is NaN or infinite."""

    positions: int
    kl: float
    top1: float
    worst: str
    worst_kl: float
    finite: bool = True

    def within(self, bound: float) -> bool:
        """Whether each kind of step is within this bound of KL."""
        return self.finite and self.worst_kl <= bound


Run = Sequence[tuple[str, Tensor]]
"""Of each step: its kind, and its logits [P, V]."""


def agreement(own: Run, reference: Run) -> Agreement:
    """How far a run is from the reference."""
    divergences: dict[str, list[Tensor]] = defaultdict(list)
    same, finite = 0, True
    for (kind, logits), (_, expected) in zip(own, reference, strict=True):
        if not len(logits):
            continue
        finite = finite and bool(logits.isfinite().all()) and bool(expected.isfinite().all())
        same += int((logits.argmax(-1) == expected.argmax(-1)).sum())
        divergences[kind].append(_kl(expected, logits))
    kinds = {kind: torch.cat(parts) for kind, parts in divergences.items()}
    means = {kind: float(each.mean()) for kind, each in kinds.items()}
    worst = max(means, key=lambda kind: means[kind])
    every = torch.cat(list(kinds.values()))
    return Agreement(len(every), float(every.mean()), same / len(every), worst, means[worst], finite)


def _kl(expected: Tensor, logits: Tensor) -> Tensor:
    """KL(expected || logits) of each row [P]; fp64, since those of a right engine are far below the rounding of fp32."""
    expected, logits = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (expected.exp() * (expected - logits)).sum(-1).clamp(min=0.0)

# SPDX-License-Identifier: Apache-2.0
"""How near a path's log probabilities are to the true ones, and the verdict on two paths that ought to be equal.

What is seen of a path are the likeliest tokens at each position, with their log probabilities. The truth is fp32 on CPU
(`true_logprobs`), and so is the yardstick: the same arithmetic rounded to 16 bit there. So no path has a say in its own bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

TOP = 20  # tokens that are seen at each position
FOLDS = 20  # parts of the requests, each left out once to see how sure a figure is
FLOOR = 1e-3  # nats: distances are no smaller than this when they are compared


@dataclass(frozen=True)
class Limits:
    """What a path may be. over_yardstick, over_plain: its mean distance to the truth, over that of rounding on CPU, and over that
    of the plain path. surely: standard errors by which a ratio or a scale may miss its limit before it fails. scale: by how much
    the scale of a product may seem off. margin: by how many times the largest error that rounding makes in the margin between two
    tokens a position's margin must be larger before another likeliest token there is wrong. positions: fewer say nothing about
    scales."""

    over_yardstick: float = 1.25
    over_plain: float = 1.10
    surely: float = 2.0
    scale: float = 0.01
    margin: float = 2.0
    positions: int = 1000


@dataclass(frozen=True)
class Seen:
    """Of N positions: at [N] int64, which of the truth's; request [N] int64, which request it belongs to; ids [N, TOP] int64 and
    logprobs [N, TOP] fp64, the likeliest first."""

    at: Tensor
    request: Tensor
    ids: Tensor
    logprobs: Tensor

    @classmethod
    def of(cls, whole: Tensor, at: Tensor, request: Tensor) -> Seen:
        """What would be seen of log probabilities [all tokens, vocabulary]."""
        top = whole[at].double().topk(TOP, -1)
        return cls(at, request, top.indices, top.values)


@dataclass(frozen=True)
class Figures:
    """distance: mean difference of log probabilities of the tokens seen, nats; kl: mean KL(truth || path), of the tokens seen and
    all others as one; other: positions with another likeliest token than the truth; wrong: those of them where the truth is sure;
    scales: by how much the scale of each product seems off, and the standard error of that."""

    positions: int
    distance: float
    kl: float
    other: int
    wrong: int
    scales: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Truth:
    """whole, moves: log probabilities [all tokens, vocabulary], and how they move with the scale of each product; rounded: those
    of the yardstick."""

    whole: Tensor
    rounded: Tensor
    moves: Mapping[str, Tensor]

    def distances(self, seen: Seen) -> Tensor:
        """[N]: the mean over the tokens seen."""
        return (seen.logprobs - self._same(self.whole, seen)).abs().mean(-1).clamp(min=FLOOR)

    def figures(self, seen: Seen, sure: float) -> Figures:
        """sure: the margin from which on another likeliest token is wrong."""
        exact = self._same(self.whole, seen)
        mass, theirs = exact.exp(), seen.logprobs.exp()
        rest, others = (1 - mass.sum(-1)).clamp(min=1e-12), (1 - theirs.sum(-1)).clamp(min=1e-12)
        divergence = (mass * (exact - seen.logprobs)).sum(-1) + rest * (rest / others).log()
        best = self.whole[seen.at].topk(2, -1)
        other = best.indices[:, 0] != seen.ids[:, 0]
        wrong = other & (best.values[:, 0] - best.values[:, 1] > sure)
        return Figures(
            len(seen.at), float(self.distances(seen).mean()), float(divergence.mean()), int(other.sum()), int(wrong.sum()),
            self.scales(seen),
        )  # fmt: skip

    def sure(self, at: Tensor, times: float) -> float:
        """`times` the largest error that rounding makes in the margin between the two likeliest tokens."""
        best = self.whole[at].topk(2, -1)
        rounded = self.rounded[at].gather(-1, best.indices)
        margins = [values[:, 0] - values[:, 1] for values in (best.values, rounded)]
        return times * float((margins[0] - margins[1]).abs().max())

    def scales(self, seen: Seen) -> dict[str, tuple[float, float]]:
        """By least squares: the scales that would move the truth to what is seen. Each product moves the log probabilities in
        a direction of its own, so that a small error shows among much noise that has no direction."""
        if not self.moves:
            return {}
        error = seen.logprobs - self._same(self.whole, seen)
        moves = torch.stack([self._same(each, seen) for each in self.moves.values()], -1)
        error, moves = error - error.mean(-1, keepdim=True), moves - moves.mean(1, keepdim=True)
        left = torch.einsum("nki,nkj->nij", moves, moves)
        right = torch.einsum("nki,nk->ni", moves, error)

        def fit(kept: Tensor) -> Tensor:
            # Where two products do the same, as those around a norm of the heads do, they share what is found.
            inverse: Tensor = torch.linalg.pinv(left[kept].sum(0), rtol=1e-5, hermitian=True)
            return inverse @ right[kept].sum(0)

        fold = seen.request % FOLDS
        without = [fold != part for part in range(FOLDS) if bool((fold == part).any())]
        found, unsure = fit(torch.ones_like(fold, dtype=torch.bool)), _jackknife(torch.stack([fit(kept) for kept in without]))
        return {name: (float(found[i]), float(unsure[i])) for i, name in enumerate(self.moves)}

    def _same(self, whole: Tensor, seen: Seen) -> Tensor:
        return whole[seen.at].double().gather(-1, seen.ids)


def _jackknife(again: Tensor) -> Tensor:
    """Standard error of a figure [...] from its values without each fold [folds, ...]."""
    count = len(again)
    return ((again - again.mean(0)).pow(2).sum(0) * (count - 1) / count).sqrt()


def ratio(mine: Tensor, others: Tensor, request: Tensor) -> tuple[float, float]:
    """Of the means of two kinds of distances [N] over the same positions, and its standard error."""
    fold = request % FOLDS
    kept = [fold != part for part in range(FOLDS) if bool((fold == part).any())]
    again = torch.stack([mine[keep].mean() / others[keep].mean() for keep in kept])
    return float(mine.mean() / others.mean()), float(_jackknife(again))


def judge(truth: Truth, plain: Seen, fast: Seen, limits: Limits) -> dict[str, Any]:
    """The figures of both paths and of the yardstick over the same positions, and `faults`: what is beyond the limits, in words."""
    if not (torch.equal(plain.at, fast.at) and torch.equal(plain.request, fast.request)):
        raise ValueError("the two paths were seen at different positions")
    yardstick = Seen.of(truth.rounded, plain.at, plain.request)
    sure = truth.sure(plain.at, limits.margin)
    seen = {"yardstick": yardstick, "plain": plain, "fast": fast}
    figures = {name: truth.figures(each, sure) for name, each in seen.items()}
    distances = {name: truth.distances(each) for name, each in seen.items()}
    faults = []

    def compared(name: str, other: str, most: float) -> tuple[float, float]:
        found, unsure = ratio(distances[name], distances[other], plain.request)
        if not found <= most + limits.surely * unsure:  # nor may it be NaN
            faults.append(
                f"the {name} path is {found:.2f} +- {unsure:.2f} times as far from the truth as the {other}, {most} at most"
            )
        return found, unsure

    ratios = {
        "plain over yardstick": compared("plain", "yardstick", limits.over_yardstick),
        "fast over yardstick": compared("fast", "yardstick", limits.over_yardstick),
        "fast over plain": compared("fast", "plain", limits.over_plain),
    }
    for name in ("plain", "fast"):
        strange = int((~seen[name].logprobs.isfinite()).sum())
        if strange:
            faults.append(f"{strange} log probabilities of the {name} path are no finite numbers")
        if figures[name].wrong:
            faults.append(f"the {name} path has {figures[name].wrong} other likeliest tokens where the margin is above {sure:.2f}")
        for product, (found, unsure) in figures[name].scales.items():
            if len(plain.at) >= limits.positions and not abs(found) <= limits.scale + limits.surely * unsure:
                faults.append(f"the {name} path's {product} seems scaled by {1 + found:.4f} +- {unsure:.4f}")
    return {**{name: asdict(each) for name, each in figures.items()}, "ratios": ratios, "sure_margin": sure, "faults": faults}

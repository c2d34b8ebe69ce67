# SPDX-License-Identifier: Apache-2.0
"""Distance of a path's log probabilities from a reference, and the verdict on two paths that should be equal.

A path reports the most likely tokens at each position with their log probabilities. The reference is computed in fp32 on a CPU
(`reference_logprobs`). The yardstick is the same computation rounded to 16 bit on the CPU, so that no path determines its own
bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

TOP = 20  # tokens that are reported at each position
FOLDS = 20  # parts of the requests; each is left out once to estimate the standard error of a figure
FLOOR = 1e-3  # nats: distances are no smaller than this when they are compared


@dataclass(frozen=True)
class Limits:
    """Limits of a path. over_yardstick, over_plain: its mean distance from the reference, relative to that of the yardstick and of
    the plain path. surely: standard errors by which a ratio or a scale may exceed its limit. scale: by how much the scale of a GEMM
    may seem wrong. margin: another most likely token is wrong where the reference's margin is so many times the largest error of
    margins by rounding. positions: fewer say nothing about scales."""

    over_yardstick: float = 1.25
    over_plain: float = 1.10
    surely: float = 2.0
    scale: float = 0.01
    margin: float = 2.0
    positions: int = 1000


@dataclass(frozen=True)
class Observation:
    """N positions of a path: at [N] int64, the position in the reference; request [N] int64, its request; ids [N, TOP] int64 and
    logprobs [N, TOP] fp64, the most likely first."""

    at: Tensor
    request: Tensor
    ids: Tensor
    logprobs: Tensor

    @classmethod
    def of(cls, logprobs: Tensor, at: Tensor, request: Tensor) -> Observation:
        """The observation of a path with log probabilities [all tokens, vocabulary]."""
        top = logprobs[at].double().topk(TOP, -1)
        return cls(at, request, top.indices, top.values)


@dataclass(frozen=True)
class Figures:
    """distance: mean difference of log probabilities of the reported tokens, nats. kl: mean KL(reference || path), of the reported
    tokens and all others as one. other: positions with another most likely token than the reference; wrong: those of them where
    the reference is sure. scales: by how much the scale of each GEMM seems wrong, and the standard error of that."""

    positions: int
    distance: float
    kl: float
    other: int
    wrong: int
    scales: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Truth:
    """The reference. logprobs: log probabilities [all tokens, vocabulary]. moves: their derivatives by the scale of each GEMM.
    rounded: those of the yardstick."""

    logprobs: Tensor
    rounded: Tensor
    moves: Mapping[str, Tensor]

    def distances(self, observation: Observation) -> Tensor:
        """[N]: the mean over the reported tokens."""
        return (observation.logprobs - self._same(self.logprobs, observation)).abs().mean(-1).clamp(min=FLOOR)

    def figures(self, observation: Observation, sure: float) -> Figures:
        """sure: the margin from which on another most likely token is wrong."""
        exact = self._same(self.logprobs, observation)
        mass, theirs = exact.exp(), observation.logprobs.exp()
        rest, other_rest = (1 - mass.sum(-1)).clamp(min=1e-12), (1 - theirs.sum(-1)).clamp(min=1e-12)
        divergence = (mass * (exact - observation.logprobs)).sum(-1) + rest * (rest / other_rest).log()
        best = self.logprobs[observation.at].topk(2, -1)
        other = best.indices[:, 0] != observation.ids[:, 0]
        wrong = other & (best.values[:, 0] - best.values[:, 1] > sure)
        return Figures(
            len(observation.at), float(self.distances(observation).mean()), float(divergence.mean()), int(other.sum()),
            int(wrong.sum()),
            self.scales(observation),
        )  # fmt: skip

    def sure(self, at: Tensor, times: float) -> float:
        """`times` the largest error of the margin between the two most likely tokens by rounding."""
        best = self.logprobs[at].topk(2, -1)
        rounded = self.rounded[at].gather(-1, best.indices)
        margins = [values[:, 0] - values[:, 1] for values in (best.values, rounded)]
        return times * float((margins[0] - margins[1]).abs().max())

    def scales(self, observation: Observation) -> dict[str, tuple[float, float]]:
        """By least squares: the scales that would move the reference to the observation. Each GEMM moves the log probabilities in a
        direction of its own, so that a small error is visible among noise without a direction."""
        if not self.moves:
            return {}
        error = observation.logprobs - self._same(self.logprobs, observation)
        moves = torch.stack([self._same(each, observation) for each in self.moves.values()], -1)
        error, moves = error - error.mean(-1, keepdim=True), moves - moves.mean(1, keepdim=True)
        left = torch.einsum("nki,nkj->nij", moves, moves)
        right = torch.einsum("nki,nk->ni", moves, error)

        def fit(kept: Tensor) -> Tensor:
            # Two GEMMs with the same effect, as those around a norm of the heads, share the result.
            inverse: Tensor = torch.linalg.pinv(left[kept].sum(0), rtol=1e-5, hermitian=True)
            return inverse @ right[kept].sum(0)

        fold = observation.request % FOLDS
        without = [fold != part for part in range(FOLDS) if bool((fold == part).any())]
        value, unsure = fit(torch.ones_like(fold, dtype=torch.bool)), _jackknife(torch.stack([fit(kept) for kept in without]))
        return {name: (float(value[i]), float(unsure[i])) for i, name in enumerate(self.moves)}

    def _same(self, logprobs: Tensor, observation: Observation) -> Tensor:
        return logprobs[observation.at].double().gather(-1, observation.ids)


def _jackknife(again: Tensor) -> Tensor:
    """Standard error of a figure [...] from its values without each fold [folds, ...]."""
    count = len(again)
    return ((again - again.mean(0)).pow(2).sum(0) * (count - 1) / count).sqrt()


def ratio(distances: Tensor, reference_distances: Tensor, request: Tensor) -> tuple[float, float]:
    """The ratio of the means of two kinds of distances [N] over the same positions, and its standard error."""
    fold = request % FOLDS
    kept = [fold != part for part in range(FOLDS) if bool((fold == part).any())]
    again = torch.stack([distances[keep].mean() / reference_distances[keep].mean() for keep in kept])
    return float(distances.mean() / reference_distances.mean()), float(_jackknife(again))


def judge(truth: Truth, plain: Observation, fast: Observation, limits: Limits) -> dict[str, Any]:
    """The figures of both paths and of the yardstick over the same positions, and `faults`: a list of exceeded limits."""
    if not (torch.equal(plain.at, fast.at) and torch.equal(plain.request, fast.request)):
        raise ValueError("the two paths were observed at different positions")
    yardstick = Observation.of(truth.rounded, plain.at, plain.request)
    sure = truth.sure(plain.at, limits.margin)
    observations = {"yardstick": yardstick, "plain": plain, "fast": fast}
    figures = {name: truth.figures(each, sure) for name, each in observations.items()}
    distances = {name: truth.distances(each) for name, each in observations.items()}
    faults = []

    def compared(name: str, other: str, most: float) -> tuple[float, float]:
        value, unsure = ratio(distances[name], distances[other], plain.request)
        if not value <= most + limits.surely * unsure:  # nor may it be NaN
            faults.append(
                f"the {name} path is {value:.2f} +- {unsure:.2f} times as far from the truth as the {other}, {most} at most"
            )
        return value, unsure

    ratios = {
        "plain over yardstick": compared("plain", "yardstick", limits.over_yardstick),
        "fast over yardstick": compared("fast", "yardstick", limits.over_yardstick),
        "fast over plain": compared("fast", "plain", limits.over_plain),
    }
    for name in ("plain", "fast"):
        strange = int((~observations[name].logprobs.isfinite()).sum())
        if strange:
            faults.append(f"{strange} log probabilities of the {name} path are not finite")
        if figures[name].wrong:
            faults.append(
                f"the {name} path has {figures[name].wrong} other most likely tokens where the margin is above {sure:.2f}"
            )
        for gemm, (value, unsure) in figures[name].scales.items():
            if len(plain.at) >= limits.positions and not abs(value) <= limits.scale + limits.surely * unsure:
                faults.append(f"the {name} path's {gemm} seems scaled by {1 + value:.4f} +- {unsure:.4f}")
    return {**{name: asdict(each) for name, each in figures.items()}, "ratios": ratios, "sure_margin": sure, "faults": faults}

# SPDX-License-Identifier: Apache-2.0
"""Dispatches and combines of tokens between ranks, and what must come out of them: every rank can make what any rank sends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.comm.one_sided import OneSided
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.scaled_tensors import FP8, Quantized

EXPERTS = 24


class Case(NamedTuple):
    """counts: tokens of each rank. rows: of each rank. scale: of payloads in e4m3, "static", "token" or "block"; None: they are in
    `dtype`, as sums are. to: the first of the experts that every token has; None: they are random, and some are missing."""

    counts: tuple[int, ...]
    rows: int
    dtype: torch.dtype
    scale: str | None = None
    hidden: int = 48
    top_k: int = 3
    to: int | None = None
    seed: int = 0

    @property
    def world(self) -> int:
        return len(self.counts)

    def payload(self, rank: int) -> Tensor | Quantized:
        maker, count = self._maker(rank), self.counts[rank]
        x = torch.randn(count, self.hidden, generator=maker)
        if self.scale is None:
            return x.to(self.dtype)
        blocks = -(-self.hidden // 128) + 1
        shapes = {"static": (), "token": (count, 1), "block": (blocks, count)}
        scale = torch.rand(shapes[self.scale], generator=self._maker(99))
        return Quantized(x.to(FP8), scale.t() if self.scale == "block" else scale)

    def routing(self, rank: int) -> Routing:
        maker, count, top_k = self._maker(10 + rank), self.counts[rank], self.top_k
        weights = torch.rand(count, top_k, generator=maker)
        if self.to is not None:
            return Routing(weights, (self.to + torch.arange(top_k)).expand(count, top_k).int().contiguous())
        ids = torch.rand(count, EXPERTS, generator=maker).argsort(dim=1)[:, :top_k]
        return Routing(weights, ids.masked_fill(torch.rand(count, top_k, generator=maker) < 0.2, -1).int())

    def reached(self, source: int, rank: int) -> Tensor:
        """[T]: which tokens of `source` have an expert of `rank`."""
        ids = self.routing(source).ids
        return ((ids >= 0) & (ids // (EXPERTS // self.world) == rank)).any(1)

    def sums(self, rank: int) -> Tensor:
        """What the experts of a rank give: any numbers."""
        return torch.randn(self.world * self.rows, self.hidden, generator=self._maker(20 + rank)).to(self.dtype)

    def check_dispatch(self, rank: int, received: Tensor | Quantized, routing: Routing) -> None:
        values = received.values if isinstance(received, Quantized) else received
        for source, count in enumerate(self.counts):
            begin, own, payload = source * self.rows, self.routing(source), self.payload(source)
            tokens, what = slice(begin, begin + count), f"{self}: from rank {source} on rank {rank}"
            assert torch.equal(routing.ids[tokens].cpu(), own.ids), what
            assert torch.equal(routing.weights[tokens].cpu(), own.weights), what
            assert (routing.ids[begin + count : begin + self.rows] == -1).all(), what
            here = self.reached(source, rank)
            sent = payload.values if isinstance(payload, Quantized) else payload
            assert torch.equal(values[tokens].cpu().view(torch.uint8)[here], sent.view(torch.uint8)[here]), what
            if isinstance(payload, Quantized):
                assert isinstance(received, Quantized), what
                scale = received.scale[tokens] if payload.scale.dim() else received.scale
                assert torch.equal(scale.cpu()[here], payload.scale[here]) if payload.scale.dim() else scale == payload.scale, what

    def check_combine(self, rank: int, out: Tensor) -> None:
        wanted = torch.zeros(self.counts[rank], self.hidden)
        for source in range(self.world):
            part = self.sums(source)[rank * self.rows :][: self.counts[rank]].float()
            wanted += torch.where(self.reached(rank, source)[:, None], part, 0.0)
        assert torch.equal(out.cpu(), wanted.to(self.dtype)), f"{self}: sums of rank {rank}"

    def run(self, exchange: OneSided, rank: int, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """On one of the ranks: both, checked. Returns what came out, as bytes."""
        payload, own = self.payload(rank), Routing(*(part.to(device) for part in self.routing(rank)))
        payload = Quantized(*(part.to(device) for part in payload)) if isinstance(payload, Quantized) else payload.to(device)
        received, routing = exchange.dispatch(payload, own, self.rows, EXPERTS)
        self.check_dispatch(rank, received, routing)
        out = exchange.combine(self.sums(rank).to(device), own, routing, EXPERTS)
        self.check_combine(rank, out)
        return routing.weights, routing.ids, out

    def _maker(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + number)


def random_cases(world: int, count: int, dtype: torch.dtype, *, hidden: int = 48, most: int = 9) -> list[Case]:
    """Any counts, of which some are 0, with spare rows; some with all tokens to one rank."""
    maker = torch.Generator().manual_seed(world)

    def draw(stop: int) -> int:
        return int(torch.randint(0, stop, (), generator=maker))

    cases = []
    for seed in range(count):
        counts = tuple(draw(most) * (draw(4) > 0) for _ in range(world))
        rows, to = max(*counts, 1) + draw(3), None if draw(4) else EXPERTS // world * draw(world)
        top_k = 1 + draw(EXPERTS // world)
        cases.append(Case(counts, rows, dtype, hidden=hidden, top_k=top_k, to=to, seed=seed + 1))
    return cases

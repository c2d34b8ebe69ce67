# SPDX-License-Identifier: Apache-2.0
"""A group whose rows have owners, over any other group, and with NaN in what a rank does not own: whoever reads it is found out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.comm import nccl
from phalanx.comm.choose import Chooser, Rules
from phalanx.comm.group import Group, ResidualRmsNorm, finish, with_scales
from phalanx.comm.sequence_parallel import ShardedResidual, gathered, rank_rows, same_sharding
from phalanx.comm.tuned_group import Runner, TunedGroup
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.tables.strategy import Strategy


class Poisoned:
    """`Owners` over any group. at_once: rows of a chunk, by which rows have owners; lands_from: tokens from which products are
    asked for in pieces."""

    def __init__(self, base: Group, at_once: int, lands_from: int) -> None:
        self.base, self._at_once, self._lands_from = base, at_once, lands_from
        self._landed: Tensor | None = None

    def at_once(self, x: Tensor) -> int:
        return self._at_once

    def all_reduce_norm(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        return self._own(nccl.all_reduce(with_scales(x), self.base), fusion, self._at_once)

    def pieces(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> list[tuple[slice, Tensor]] | None:
        if tokens < self._lands_from:
            return None
        assert self._landed is None, "the last product was not finished"
        self._landed = torch.full((tokens, hidden), float("nan"), dtype=fusion.residual.dtype)
        depth = -(-tokens // self.base.size)
        cuts = [slice(first, min(first + depth, tokens)) for first in range(0, tokens, depth)]
        return [(cut, self._landed[cut]) for cut in reversed(cuts)]

    def landed_norm(self, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        landed, self._landed = self._landed, None
        assert landed is not None
        return self._own(nccl.all_reduce(landed, self.base), fusion, len(landed))

    def _own(self, sums: Tensor, fusion: ResidualRmsNorm, at_once: int) -> tuple[Tensor, ...]:
        base, residual, tokens = self.base, fusion.residual, len(sums)
        if isinstance(residual, ShardedResidual):
            assert same_sharding(tokens, residual.at_once, at_once)
            residual = residual.held
        mine = torch.tensor([row for rows in rank_rows(tokens, at_once, base.rank, base.size) for row in rows], dtype=torch.int64)
        *outputs, new = finish(sums[mine], replace(fusion, residual=residual[mine]))
        codes = [out.view(torch.uint8) if out.dtype.itemsize == 1 else out for out in outputs]  # which any group gathers
        spread = [gathered(_spread(each, mine, tokens), at_once, base) for each in codes]
        whole = [each.view(out.dtype) for each, out in zip(spread, outputs, strict=True)]
        foreign = torch.full_like(sums, float("nan"))
        foreign[mine] = new
        return (*whole, ShardedResidual.of(foreign, at_once))


def poisoned(
    base: Group, *, at_once: int = 5, sp_min_tokens: int = 1, lands_from: int = 1 << 30, forced: Strategy | None = Strategy.TWOSHOT
) -> TunedGroup:
    """See `Poisoned`."""

    def total(x: Tensor | Unscaled) -> Tensor:
        return nccl.all_reduce(with_scales(x), base)

    def norm(x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        return finish(total(x), fusion)

    runners = {Strategy.NCCL: Runner(total, norm), Strategy.TWOSHOT: Runner(total, norm, Poisoned(base, at_once, lands_from))}
    rules = Rules(Fingerprint(0, "shm", base.size), {}, None, forced, sp_min_tokens=sp_min_tokens)
    return TunedGroup(base, Chooser(rules), runners, "seed")


def _spread(rows: Tensor, mine: Tensor, tokens: int) -> Tensor:
    made = rows.new_zeros(tokens, rows.shape[1])
    made[mine] = rows
    return made

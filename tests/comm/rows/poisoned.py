# SPDX-License-Identifier: Apache-2.0
"""A group whose rows have owners, over any other group, and with NaN in what a rank does not own: whoever reads it is found out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.comm import nccl
from phalanx.comm.choose import Chooser, Rules
from phalanx.comm.group import Group, ResidualRmsNorm, finish, with_scales
from phalanx.comm.rows import OwnedRows, gathered, own_rows
from phalanx.comm.tuned_group import Runner, TunedGroup
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.reference import Unscaled
from phalanx.tables.strategy import Strategy


def poisoned(base: Group, *, at_once: int = 5, owned_from: int = 1, forced: Strategy | None = Strategy.TWOSHOT) -> TunedGroup:
    """at_once: rows of a chunk, by which rows have owners."""

    def total(x: Tensor | Unscaled) -> Tensor:
        return nccl.all_reduce(with_scales(x), base)

    def norm(x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        return finish(total(x), fusion)

    def owned(x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        sums, residual = total(x), fusion.residual
        if isinstance(residual, OwnedRows):
            assert residual.at_once == at_once
            residual = residual.held
        tokens = len(sums)
        mine = torch.tensor([row for rows in own_rows(tokens, at_once, base.rank, base.size) for row in rows], dtype=torch.int64)
        *outputs, new = finish(sums[mine], replace(fusion, residual=residual[mine]))
        codes = [out.view(torch.uint8) if out.dtype.itemsize == 1 else out for out in outputs]  # which any group gathers
        spread = [gathered(_spread(each, mine, tokens), at_once, base) for each in codes]
        whole = [each.view(out.dtype) for each, out in zip(spread, outputs, strict=True)]
        foreign = torch.full_like(sums, float("nan"))
        foreign[mine] = new
        return (*whole, OwnedRows.of(foreign, at_once))

    runners = {Strategy.NCCL: Runner(total, norm), Strategy.TWOSHOT: Runner(total, norm, owned)}
    rules = Rules(Fingerprint(0, "shm", base.size), {}, None, forced, owned_from=owned_from)
    return TunedGroup(base, Chooser(rules), runners, "seed")


def _spread(rows: Tensor, mine: Tensor, tokens: int) -> Tensor:
    made = rows.new_zeros(tokens, rows.shape[1])
    made[mine] = rows
    return made

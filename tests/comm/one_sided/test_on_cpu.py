# SPDX-License-Identifier: Apache-2.0
"""The one-sided exchange between CPU ranks: processes over shared memory, against plain indexing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.comm import one_sided
from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.errors import RankStalled
from tests.support import comm_cpu_ranks
from tests.support.one_sided_cases import Case

pytestmark = pytest.mark.usefixtures("forked_python")

_BODY = """
from phalanx.comm import one_sided
from tests.support.one_sided_cases import Case, random_cases
exchange, results["reason"] = one_sided.form(
    group, torch.device("cpu"), hidden=272, top_k=24, dtype=torch.float32, rows=4000, timeout=60
)
cases = random_cases(world, 24, torch.float32) + random_cases(world, 24, torch.bfloat16, most=40)
cases += [Case((3,) * world, 4, torch.bfloat16, scale, hidden=272) for scale in ("static", "token", "block")]
cases.append(Case((3000,) + (0,) * (world - 1), 3000, torch.float32, hidden=272))  # in several posts
assert exchange._memory.rows_at_once(272 * 4 * world, torch.uint8) < 3000
once = [case.run(exchange, rank) for case in cases]
for case, first in zip(cases, once):
    for one, two in zip(first, case.run(exchange, rank)):
        assert torch.equal(one, two), case
"""


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_routing(world: int, tmp_path: Path) -> None:
    """Also from ranks without tokens, of one token, and to one rank alone; the same bits again."""
    for results in comm_cpu_ranks.run(world, _BODY, tmp_path):
        assert results["reason"] == "for up to 4000 tokens of each index"


def test_a_rank_that_does_not_come_is_named() -> None:
    world, case = LocalWorld(2), Case((1, 1), 1, torch.float32)

    def act(group: Group) -> None:
        exchange, _ = one_sided.form(
            group, torch.device("cpu"), hidden=48, top_k=3, dtype=torch.float32, rows=1, timeout=0.2 if group.rank == 0 else 60
        )  # fmt: skip
        assert exchange is not None
        if group.rank == 0:
            case.run(exchange, 0)

    with pytest.raises(RankStalled, match=r"^rank 1 did not join an exchange of tokens within 0 s"):
        world.run(act)

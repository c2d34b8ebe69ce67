# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from phalanx.config.options import EngineOptions
from phalanx.engine.ranks.host import Host, host_of
from phalanx.errors import LayoutError


def asked(tp: int, pp: int, nodes: int) -> EngineOptions:
    return EngineOptions(model="x", tensor_parallel_size=tp, pipeline_parallel_size=pp, nnodes=nodes)


def test_ranks_are_spread_evenly_in_order() -> None:
    assert [host_of(asked(2, 2, 2), node).ranks for node in (0, 1)] == [range(2), range(2, 4)]


def test_each_process_of_torchrun_is_a_node_with_one_rank_on_its_own_gpu() -> None:
    assert host_of(asked(4, 1, 4), 3, local_rank=1) == Host(3, range(3, 4), 1)
    assert host_of(asked(4, 1, 2), 1, local_rank=1) == Host(1, range(2, 4), 2)


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"3 ranks.*2 nodes"):
        host_of(asked(3, 1, 2), 0)
    with pytest.raises(LayoutError, match="node_rank=2"):
        host_of(asked(2, 1, 2), 2)

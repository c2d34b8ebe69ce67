# SPDX-License-Identifier: Apache-2.0
"""Writing words into a table: in Triton's interpreter against the reference, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def check_index_put() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops.index_put import index_put_

    places = torch.full((300,), -1)
    places[[3, 255, 256, 299]] = torch.tensor([70, 0, 5, 69])
    tables = []
    for store in (index_put_, reference.index_put_):
        table = torch.full((71,), -7, dtype=torch.int32)
        store(table, places, torch.arange(300))
        tables.append(table.tolist())
    assert tables[0] == tables[1]
    assert [(at, word) for at, word in enumerate(tables[0]) if word != -7] == [(0, 255), (5, 256), (69, 299), (70, 3)]


CHECKS = [check_index_put]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.gpu1
@pytest.mark.parametrize("check", CHECKS)
def test_on_gpu(check: Callable[[], None]) -> None:
    with torch.device("cuda"):
        check()


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles(arch: int) -> None:
    from phalanx.kernels.ops import index_put

    signature = {"table": "*i32", "places": "*i64", "values": "*i64", "count": "i32"}
    compiled(index_put._index_put, signature, {"BLOCK": index_put.BLOCK}, arch)

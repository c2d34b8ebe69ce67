# SPDX-License-Identifier: Apache-2.0
"""The delta of adapters: in Triton's interpreter against the reference, the reference against a product of whole matrices, and
compiled for three generations of GPUs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from phalanx.kernels.adapters import reference
from phalanx.kernels.adapters.rows import FEW, FEW_ROWS, MANY, AdapterRows
from tests.support.kernels_adapters import WIDTHS, factors_of
from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytestmark = pytest.mark.usefixtures("forked_python")


def check_like_the_reference() -> None:
    """Ranks below, at and above a program's; parts without an adapter; a slot that no token has; splits of the inputs."""
    from phalanx.kernels.adapters.expand import expand
    from phalanx.kernels.adapters.shrink import shrink

    ranks = [[16, 0, 3], [40, 8, 20], [1, 1, 1]]
    for dtype, inputs, total in ((torch.float32, 200, 40), (torch.float16, 2100, 9)):
        factors = factors_of(ranks, inputs, 48, dtype)
        slots = np.array([(1, -1, 0, 1, 1)[at % 5] for at in range(total)])
        rows = AdapterRows.of(slots, factors.ranks.device)
        assert rows is not None
        x, out = torch.randn(total, inputs).to(dtype), torch.randn(total, sum(WIDTHS)).to(dtype)
        wanted = reference.add_delta(out.clone(), x, factors, rows)
        output = expand(out.clone(), shrink(x, factors, rows), factors, rows)
        assert torch.equal(output[slots < 0], out[slots < 0])
        bound = {"rtol": 1e-5, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.2}
        torch.testing.assert_close(output, wanted, **bound)
        tiles, order = torch.cat([rows.tiles, rows.tiles.new_zeros(4, 3)]), torch.cat([rows.order, rows.order.new_zeros(5)])
        graphs = AdapterRows(total, order, tiles, rows.tile)  # with room for more rows
        assert torch.equal(expand(out, shrink(x, factors, graphs), factors, graphs), output)


def check_many_tokens() -> None:
    """Tiles of more tokens, whose last one is not full."""
    from phalanx.kernels.adapters.expand import expand
    from phalanx.kernels.adapters.shrink import shrink

    factors = factors_of([[16], [5]], 130, 16, torch.float32)
    slots = np.array([1] * FEW_ROWS + [0] * (MANY + 1))
    rows = AdapterRows.of(slots, factors.ranks.device)
    assert rows is not None
    assert rows.tile == MANY
    x, out = torch.randn(len(slots), 130), torch.randn(len(slots), WIDTHS[0])
    wanted = reference.add_delta(out.clone(), x, factors, rows)
    torch.testing.assert_close(expand(out, shrink(x, factors, rows), factors, rows), wanted, rtol=1e-5, atol=1e-3)


CHECKS = [check_like_the_reference, check_many_tokens]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.gpu1
@pytest.mark.parametrize("check", CHECKS)
def test_on_gpu(check: Callable[[], None]) -> None:
    with torch.device("cuda"):
        check()


@pytest.mark.parametrize(("dtype", "arch"), [("bf16", 80), ("bf16", 90), ("bf16", 100), ("fp32", 90)])
def test_compiles(dtype: str, arch: int) -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.adapters import expand, shrink
    from phalanx.kernels.adapters.rows import COLUMNS

    sizes = dict.fromkeys(("tokens", "inputs", "outputs", "parts", "room"), "i32")
    kinds = sizes | dict.fromkeys(("x", "a", "b", "out"), f"*{dtype}") | {"low": "*fp32", "order": "*i64"}
    kinds |= dict.fromkeys(("tiles", "columns", "ranks"), "*i32")
    itemsize = 4 if dtype == "fp32" else 2
    for tile in (FEW, MANY):
        width, block = shrink.tile_sizes(tile, 48, itemsize)
        compiled(shrink._shrink, kinds, {"TILE": tile, "RANKS": width, "BLOCK": block, "SPLIT": 1024}, arch)
        compiled(expand._expand, kinds, {"TILE": tile, "RANKS": expand.RANKS, "COLUMNS": COLUMNS, "SPLITS": 8, "ALIGNED": 16}, arch)


def test_the_reference_is_the_product_of_whole_matrices() -> None:
    torch.manual_seed(0)
    factors = factors_of([[7, 0, 4], [2, 9, 0]], 32, 16, torch.float32)
    slots = np.array([0, -1, 1, 0, 1, 1])
    rows = AdapterRows.of(slots, torch.device("cpu"))
    assert rows is not None
    x, out = torch.randn(6, 32), torch.randn(6, sum(WIDTHS))
    wanted = out.clone()
    for token, slot in enumerate(slots):
        for part, begin, end in factors.columns if slot >= 0 else []:
            rank = factors.ranks_cpu[slot][part]
            delta = factors.b[slot, begin:end, :rank] @ factors.a[slot, part * 16 : part * 16 + rank]
            wanted[token, begin:end] += delta @ x[token]
    torch.testing.assert_close(reference.add_delta(out, x, factors, rows), wanted, rtol=1e-5, atol=1e-4)


def test_tokens_are_grouped_by_adapter() -> None:
    slots = np.array([2, -1, 0, 2, -1, *[2] * (FEW + 1)])
    rows = AdapterRows.of(slots, torch.device("cpu"))
    assert rows is not None
    assert rows.order.tolist() == [2, 0, 3, *range(5, len(slots))]
    assert rows.slots == [0, 2]
    assert rows.tiles.tolist() == [[0, 0, 1], [2, 1, 1 + FEW], [2, 1 + FEW, FEW + 4]]
    assert AdapterRows.of(np.array([-1, -1]), torch.device("cpu")) is None


def test_no_kernel_is_compiled_for_a_number_of_tokens() -> None:
    """Triton compiles another variant where an argument becomes 1, or a multiple of 16."""
    pytest.importorskip("triton")
    from phalanx.kernels.adapters import expand, shrink

    for kernel in (shrink._shrink, expand._expand):
        (tokens,) = (each for each in kernel.params if each.name == "tokens")
        assert tokens.do_not_specialize

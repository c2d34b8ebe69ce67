# SPDX-License-Identifier: Apache-2.0
"""How rows are divided into splits on the device: in Triton's interpreter against plain Python, and compiled for three
generations."""

from __future__ import annotations

import random

import pytest
import torch

from phalanx.kernels.attention.heuristics import MAX_SPLITS_PER_ROW, ROW_CLASSES, DecodeTiling, row_class
from tests.support.kernels_compiled import by_generation, compiled_as
from tests.support.kernels_interpreted import interpreted

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def wanted(
    lengths: list[int], slots: list[int] | None, extra_splits: int, tiles: int, tile: int, window: int | None, run: int
) -> list[list[int]]:  # fmt: skip
    """The fields of each split."""
    low = [0 if window is None else max(0, length - window) for length in lengths]
    begins = [first // run * run for first in low]
    counts = [-(-(length - begin) // tile) for length, begin in zip(lengths, begins, strict=True)]
    size = max(-(-sum(counts) // extra_splits), -(-max(counts) // MAX_SPLITS_PER_ROW), tiles)
    splits: list[list[int]] = []
    for row, length in enumerate(lengths):
        count = max(-(-counts[row] // size), 1)
        each, first = -(-counts[row] // count) * tile, len(splits)
        for split in range(count):
            begin = begins[row] + split * each
            end = min(begin + each, length)
            splits.append([row, first, count, begin, end, low[row], row if slots is None else slots[row]])
    return splits


def check(
    lengths: list[int], extra_splits: int, *, chunk: int = 40, window: int | None = None, block: int = 16, there: bool = True
) -> None:
    from phalanx.kernels.attention.split_kv import FIELDS, plan

    slots = None if there else [5 * row for row in range(len(lengths))]
    rows = None if slots is None else torch.tensor(slots)
    tiling = DecodeTiling(extra_splits, chunk, 32, 1, 3, 168)
    splits = plan(torch.tensor(lengths, dtype=torch.int32), rows, tiling, window=window, block_size=block)
    assert splits.shape == (len(lengths) + extra_splits, FIELDS.value)
    fields = wanted(lengths, slots, extra_splits, -(-chunk // 32), 32, window, 16 if block % 16 == 0 else 1)
    assert len(fields) <= len(splits)
    assert splits[: len(fields), :7].tolist() == fields
    assert (splits[len(fields) :, 6] == -1).all(), "there is a split that belongs to no row"
    firsts = [next(at for at, each in enumerate(fields) if each[0] == row) for row in range(len(lengths))]
    assert splits[: len(lengths), 7].tolist() == firsts


def check_rows_of_any_lengths() -> None:
    rng = random.Random(0)
    for _ in range(60):
        rows, longest = rng.choice([1, 2, 5, 40, 64, 65, 130]), rng.choice([1, 40, 300, 5000])
        lengths = [rng.randint(0, longest) for _ in range(rows)]
        if rng.random() < 0.3:
            lengths[rng.randrange(rows)] = 100_000
        extra_splits, window = rng.choice([1, 3, rows, 7 * rows]), rng.choice([None, None, 1, 50, 4096])
        check(
            lengths,
            extra_splits,
            chunk=rng.choice([1, 40, 512]),
            window=window,
            block=rng.choice([16, 5]),
            there=rng.random() < 0.5,
        )


def check_the_longest_rows_have_the_extra_splits() -> None:
    """One of 16,000 tokens among short ones has as many programs as a row may; rows alike have one each, or as many each."""
    from phalanx.kernels.attention.split_kv import plan

    def programs(lengths: list[int], extra_splits: int, most: int = MAX_SPLITS_PER_ROW) -> list[int]:
        tiling = DecodeTiling(extra_splits, 128, 32, 1, 3, 168, max_splits=most)
        splits = plan(torch.tensor(lengths, dtype=torch.int32), None, tiling, window=None, block_size=16)
        return [int((splits[:, 6] == row).sum()) for row in range(len(lengths))]

    assert programs([200] * 31 + [16000] + [200] * 32, 64) == [1] * 31 + [34] + [1] * 32
    assert programs([200] * 31 + [16000] + [200] * 32, 64, most=32) == [1] * 31 + [32] + [1] * 32
    assert programs([1500] * 64, 64) == [1] * 64
    assert programs([1536] * 64, 256) == [4] * 64
    assert programs([0, 1, 0], 3) == [1, 1, 1]


CHECKS = [check_rows_of_any_lengths, check_the_longest_rows_have_the_extra_splits]


def test_in_the_interpreter() -> None:
    assert interpreted("tests.kernels.attention.test_split_kv").split() == [check.__name__ for check in CHECKS]


@pytest.mark.parametrize(("rows", "arch"), by_generation(ROW_CLASSES, ROW_CLASSES[1:2]))
def test_compiles(rows: int, arch: int) -> None:
    from phalanx.kernels.attention import split_kv

    assert row_class(rows) == row_class(rows // 2 + 1) == rows
    signature = {"lengths": "*i32", "table_rows": "*i64", "splits": "*i32"}
    signature |= dict.fromkeys(("rows", "extra_splits", "min_tiles", "window"), "i32")
    constants = {
        "ROWS": rows,
        "MOST": MAX_SPLITS_PER_ROW,
        "TILE": 32,
        "RUN": 16,
        "WINDOWED": True,
        "SPLITS_PER_PROGRAM": split_kv.SPLITS_PER_PROGRAM,
    }
    kernel = compiled_as(split_kv._plan, signature, constants, arch)
    assert len(kernel.asm["cubin"]) > 0
    assert "griddepcontrol" not in kernel.asm["ptx"], "kernels behind it may not begin before it ends"


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in CHECKS:
        each()
        print(each.__name__)

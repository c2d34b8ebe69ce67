# SPDX-License-Identifier: Apache-2.0
"""How rows are cut into pieces on the device: in Triton's interpreter against plain Python, and compiled for three generations."""

from __future__ import annotations

import random

import pytest
import torch

from phalanx.kernels.attention.heuristics import MAX_SPLITS_PER_ROW, ROWS_CLASSES, Split, rows_class
from tests.support.kernels_interpreted import interpreted

pytest.importorskip("triton")


def wanted(
    lengths: list[int], slots: list[int] | None, split_kv: int, tiles: int, tile: int, window: int | None, run: int
) -> list[list[int]]:  # fmt: skip
    """Of each piece, its facts."""
    low = [0 if window is None else max(0, length - window) for length in lengths]
    begins = [first // run * run for first in low]
    held = [-(-(length - begin) // tile) for length, begin in zip(lengths, begins, strict=True)]
    size = max(-(-sum(held) // split_kv), -(-max(held) // MAX_SPLITS_PER_ROW), tiles)
    found: list[list[int]] = []
    for row, length in enumerate(lengths):
        pieces = max(-(-held[row] // size), 1)
        each, first = -(-held[row] // pieces) * tile, len(found)
        for piece in range(pieces):
            begin = begins[row] + piece * each
            end = min(begin + each, length)
            found.append([row, first, pieces, begin, end, low[row], row if slots is None else slots[row]])
    return found


def check(
    lengths: list[int], split_kv: int, *, chunk: int = 40, window: int | None = None, block: int = 16, there: bool = True
) -> None:
    from phalanx.kernels.attention import split_kv as made

    slots = None if there else [5 * row for row in range(len(lengths))]
    rows = None if slots is None else torch.tensor(slots)
    split = Split(split_kv, chunk, 32, 1, 3, 168)
    pieces = made.cut(torch.tensor(lengths, dtype=torch.int32), rows, split, window=window, block_size=block)
    assert pieces.shape == (len(lengths) + split_kv, made.FACTS.value)
    facts = wanted(lengths, slots, split_kv, -(-chunk // 32), 32, window, 16 if block % 16 == 0 else 1)
    assert len(facts) <= len(pieces)
    assert pieces[: len(facts), :7].tolist() == facts
    assert (pieces[len(facts) :, 6] == -1).all(), "no piece is there that is not of a row"


def check_rows_of_any_lengths() -> None:
    rng = random.Random(0)
    for _ in range(60):
        rows, longest = rng.choice([1, 2, 5, 40, 64, 65, 130]), rng.choice([1, 40, 300, 5000])
        lengths = [rng.randint(0, longest) for _ in range(rows)]
        if rng.random() < 0.3:
            lengths[rng.randrange(rows)] = 100_000
        split_kv, window = rng.choice([1, 3, rows, 7 * rows]), rng.choice([None, None, 1, 50, 4096])
        check(lengths, split_kv, chunk=rng.choice([1, 40, 512]), window=window, block=rng.choice([16, 5]), there=rng.random() < 0.5)


def check_the_longest_rows_have_the_shares() -> None:
    """One of 16,000 tokens among short ones has as many programs as a row may; rows alike have one each, or as many each."""
    from phalanx.kernels.attention import split_kv as made

    def programs(lengths: list[int], split_kv: int) -> list[int]:
        held = torch.tensor(lengths, dtype=torch.int32)
        pieces = made.cut(held, None, Split(split_kv, 128, 32, 1, 3, 168), window=None, block_size=16)
        return [int((pieces[:, 6] == row).sum()) for row in range(len(lengths))]

    assert programs([200] * 31 + [16000] + [200] * 32, 64) == [1] * 31 + [MAX_SPLITS_PER_ROW] + [1] * 32
    assert programs([1500] * 64, 64) == [1] * 64
    assert programs([1536] * 64, 256) == [4] * 64
    assert programs([0, 1, 0], 3) == [1, 1, 1]


CHECKS = [check_rows_of_any_lengths, check_the_longest_rows_have_the_shares]


def test_in_the_interpreter() -> None:
    assert interpreted("tests.kernels.attention.test_shares").split() == [check.__name__ for check in CHECKS]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("rows", ROWS_CLASSES)
def test_compiles(rows: int, arch: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from phalanx.kernels.attention import split_kv

    assert rows_class(rows) == rows_class(rows // 2 + 1) == rows
    signature = {"lengths": "*i32", "table_rows": "*i64", "pieces_of": "*i32"}
    signature |= dict.fromkeys(("rows", "shares", "tiles", "window"), "i32")
    constants = {"ROWS": rows, "MOST": MAX_SPLITS_PER_ROW, "TILE": 32, "RUN": 16, "WINDOWED": True, "AT_ONCE": split_kv.AT_ONCE}
    source = ASTSource(split_kv._cut, signature | dict.fromkeys(constants, "constexpr"), constants)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert len(made.asm["cubin"]) > 0
    assert "griddepcontrol" not in made.asm["ptx"], "what comes behind may not begin before it ends"


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in CHECKS:
        each()
        print(each.__name__)

# SPDX-License-Identifier: Apache-2.0
"""How rows are divided into splits on the device: in Triton's interpreter against plain Python, and compiled for three
generations."""

from __future__ import annotations

import heapq
import random

import pytest
import torch

from phalanx.kernels.attention.heuristics import MAX_SPLITS_PER_ROW, ROW_CLASSES, DecodeTiling, row_class
from tests.support.kernels_compiled import by_generation, compiled_as
from tests.support.kernels_interpreted import interpret

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 (where there is a Triton)

from phalanx.kernels.attention.split_kv import prefill_place, prefill_span  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_python")


@triton.jit
def spans_of(
    items, longest, pairs, spans, programs, waves, KV_HEADS: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr,
    OVERHEAD: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    all_items, keys, all_pairs = tl.load(items + at), tl.load(longest + at), tl.load(pairs + at)
    tl.store(spans + at, prefill_span(all_items, keys, all_pairs, programs, waves, KV_HEADS, KEYS, LEAST, OVERHEAD))


@triton.jit
def places_of(fields, first, items, splits):
    place = tl.program_id(0)
    own, split, result = prefill_place(first + place, place, items, splits)
    tl.store(fields + 3 * place, own)
    tl.store(fields + 3 * place + 1, split)
    tl.store(fields + 3 * place + 2, result)


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


KEYS, LEAST, COST = 128, 512, 384


def prefill_spans(batches: list[list[tuple[int, int]]], programs: int, waves: int, kv_heads: int) -> list[int]:
    """Of batches of rows of (items, keys)."""
    items = torch.tensor([sum(each for each, _ in rows) for rows in batches], dtype=torch.int32)
    longest = torch.tensor([max(keys for _, keys in rows) for rows in batches], dtype=torch.int32)
    pairs = torch.tensor([float(sum(each * keys for each, keys in rows)) for rows in batches])
    spans = torch.empty_like(items)
    spans_of[(len(batches),)](
        items, longest, pairs, spans, programs, waves, KV_HEADS=kv_heads, KEYS=KEYS, LEAST=LEAST, OVERHEAD=COST
    )  # fmt: skip
    return spans.tolist()


def split_by(keys: int, least: int) -> tuple[int, int]:
    """As `prefill_splits`."""
    splits = max(-(-keys // least), 1)
    return splits, -(-keys // splits // KEYS) * KEYS


def seconds(rows: list[tuple[int, int]], least: int, programs: int, kv_heads: int) -> int:
    """When the last program ends, in keys, where each begins as soon as there is a multiprocessor for it."""
    busy = [0] * programs
    for items, keys in rows:
        splits, each = split_by(keys, least)
        for split in range(splits):
            for _ in range(items * kv_heads):
                heapq.heapreplace(busy, busy[0] + COST + max(min(keys - split * each, each), 0))
    return max(busy)


def check_prompts_take_what_their_pairs_do() -> None:
    """No other division with as many splits, or fewer, ends much sooner; and there is room for the results of all."""
    rng = random.Random(0)
    for programs, kv_heads, waves in ((132, 4, 6), (132, 8, 4), (132, 1, 1), (60, 2, 3)):
        batches = [[(items, 100_000)] for items in range(1, 2 * programs // kv_heads)]
        batches += [
            [(rng.choice((1, 2, 9)), rng.choice((0, 500, 2000, 100_000))) for _ in range(rng.randint(1, 4))] for _ in range(60)
        ]
        for rows, span in zip(batches, prefill_spans(batches, programs, waves, kv_heads), strict=True):
            longest, slots = max(keys for _, keys in rows), waves * programs // kv_heads
            count = sum(items for items, _ in rows)
            if count < slots:
                assert sum(items * split_by(keys, span)[0] for items, keys in rows) <= slots
            others = [max(longest // splits + KEYS, LEAST) for splits in range(1, 40)]
            fit = [each for each in others if sum(items * split_by(keys, each)[0] for items, keys in rows) <= max(slots, count)]
            best = min(seconds(rows, each, programs, kv_heads) for each in fit)
            assert seconds(rows, span, programs, kv_heads) <= 1.25 * best + waves * COST, (rows, span, best)
    assert prefill_spans([[(1, 100_000)], [(40, 100)]], 132, 0, 8) == [100_000 + KEYS, 100 + KEYS], "nothing is split in no wave"


def check_programs_of_a_split_begin_together() -> None:
    """Each has an item and a split of its own; the results of an item lie side by side."""
    for items, splits in ((1, 5), (7, 1), (3, 4)):
        fields = torch.empty(items * splits, 3, dtype=torch.int32)
        places_of[(items * splits,)](fields, 11, items, splits)
        assert fields.tolist() == [[item, split, 11 + item * splits + split] for split in range(splits) for item in range(items)]


CHECKS = [
    check_rows_of_any_lengths, check_the_longest_rows_have_the_extra_splits, check_prompts_take_what_their_pairs_do,
    check_programs_of_a_split_begin_together,
]  # fmt: skip


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


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

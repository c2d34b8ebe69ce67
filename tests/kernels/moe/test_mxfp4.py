# SPDX-License-Identifier: Apache-2.0
"""MXFP4 as the kernels have it; and the instructions that widen it: executed one by one here, as PTX defines them."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from phalanx.kernels.moe.packing import SCALES_IN_WORD, TILE_BYTES, TILE_ROWS, packed, tiled, untiled
from phalanx.kernels.moe.packing import codes as unpacked
from phalanx.kernels.moe.reference import E2M1

triton = pytest.importorskip("triton")

WORD = 0xFFFFFFFF


def prmt(first: int, second: int, selector: int) -> int:
    """Byte i of the result is byte (digit i of the selector) of `first` (0..3) and `second` (4..7)."""
    every = [first >> 8 * i & 0xFF for i in range(4)] + [second >> 8 * i & 0xFF for i in range(4)]
    return sum(every[selector >> 4 * i & 0xF] << 8 * i for i in range(4))


def lop3(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def fma_bf16x2(a: int, b: int, c: int) -> int:
    """Exact in fp64, then rounded to bf16."""

    def halves(word: int) -> torch.Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()

    low, high = ((halves(a) * halves(b) + halves(c)).bfloat16().view(torch.int16).int() & 0xFFFF).tolist()
    return low | high << 16


def run(program: str, *inputs: int) -> int:
    """Register $0 after the program, with $1 and so on = inputs."""
    registers = {f"${number}": value for number, value in enumerate(inputs, 1)}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    operations = {
        "mov.b32": lambda a: a, "prmt.b32": prmt, "and.b32": lambda a, b: a & b, "shl.b32": lambda a, n: a << n & WORD,
        "shr.b32": lambda a, n: a >> n, "mad.lo.u32": lambda a, b, c: a * b + c & WORD, "mul.lo.u32": lambda a, b: a * b & WORD,
        "lop3.b32": lop3, "fma.rn.bf16x2": fma_bf16x2,
    }  # fmt: skip
    for line in re.findall(r"^([a-z0-9.]+ .*);$", program, re.MULTILINE):
        name, operands = line.split(" ", 1)
        if name == ".reg":
            continue
        target, *rest = operands.split(", ")
        registers[target] = operations[name](*map(value, rest))
    return registers["$0"]


def test_every_code_becomes_its_value_at_each_place_of_both_words() -> None:
    """Beside all codes at the other places, by each of four scales; subnormal results among them."""
    from phalanx.kernels.moe.mxfp4 import SHIFT, WIDEN, selectors

    of_words = selectors(torch.device("cpu")).tolist()
    every = torch.arange(16).repeat_interleave(2) % 16
    for turn, (first, second) in enumerate(itertools.product(range(16), (0, 5, 10, 15))):
        codes = every.roll(turn)[:32].view(1, 4, 8)
        codes[0, :, 0], codes[0, :, 1] = torch.tensor([first, second, turn % 16, 9]), torch.tensor([second, first, 3, turn % 16])
        nibbles = codes.flatten(1)
        words = packed((nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)).view(torch.int16)[0].int() & 0xFFFF
        assert torch.equal(codes_of(words), codes[0])
        scales, block = [(0, 1, 60, 120, 127, 128)[(turn + i) % 6] for i in range(4)], turn % 4
        in_one = sum(scale << 8 * i for i, scale in enumerate(scales))
        for place, program in enumerate(WIDEN):
            selector = of_words[8 * block + turn % 8]
            output = run(program, int(words[0]) | int(words[1]) << 16, in_one, in_one, selector, selector, SHIFT)
            for half, value in enumerate(halves_of(output)):
                code = int(codes[0, place, half])
                wanted = torch.tensor(E2M1[code], dtype=torch.float64) * 2.0 ** (scales[block] - 127)
                assert float(value) == float(wanted.bfloat16())
                assert bool(value.signbit()) == (code >= 8)


def test_every_code_and_scale_of_nvfp4_becomes_its_value() -> None:
    """All e4m3 scales that are not negative, zero and subnormal ones too, in both halves of a block, by each block's selector; and
    all powers of 2 that MXFP4's scales become."""
    from phalanx.kernels.moe.mxfp4 import NVFP4_SCALE, NVFP4_WIDEN, nvfp4_unit, selectors
    from phalanx.kernels.moe.nvfp4_packing import LARGEST_POWER, POWERS
    from phalanx.kernels.moe.nvfp4_packing import packed as nvfp4_packed

    of_words, unit = selectors(torch.device("cpu")).tolist(), nvfp4_unit.fn(triton.language.bfloat16, 90)
    e4m3 = torch.arange(126, -2, -1).clamp(min=0).to(torch.uint8).view(torch.float8_e4m3fn).float()
    powers = torch.exp2(torch.arange(LARGEST_POWER - POWERS + 1, LARGEST_POWER + 1).float())
    of_file = torch.cat((e4m3, powers, powers[:2])).view(20, 8)
    codes = torch.randint(0, 16, (20, 128), generator=torch.Generator().manual_seed(1))
    codes[:, :32] = torch.arange(16).repeat(2)
    words, table = nvfp4_packed((codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), of_file)
    of_rows = untiled(words)[:20].contiguous().view(torch.int16).int() & 0xFFFF
    low, high = (untiled(table, SCALES_IN_WORD)[:20].contiguous().view(torch.int32)[:, half].tolist() for half in (0, 1))
    for row, word, place in itertools.product(range(20), range(0, 32, 2), range(4)):
        selector, scales = of_words[word], (low if place < 2 else high)[row] & WORD
        scale = run(NVFP4_SCALE, scales, scales, selector, selector)
        output = run(NVFP4_WIDEN[place], int(of_rows[row, word]) | int(of_rows[row, word + 1]) << 16, scale)
        for half, value in enumerate(halves_of(output)):
            column = word // 8 * 32 + place * 8 + word % 8 + half
            assert float(value) * unit == E2M1[int(codes[row, column])] * float(of_file[row, column // 16])


def halves_of(word: int) -> torch.Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.int32).to(torch.int16).view(torch.bfloat16)


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """words [8] -> [4, 8]."""
    each = torch.stack((words & 0xFF, words >> 8), dim=-1).to(torch.uint8).view(1, 16)
    return unpacked(each).view(4, 8).long()


def test_packing_loses_nothing() -> None:
    blocks = torch.randint(0, 256, (3, 5 * 16), dtype=torch.uint8)
    codes = unpacked(packed(blocks))
    assert torch.equal(codes, torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(1).int())
    assert torch.equal(packed(blocks[:, 16:48]), packed(blocks)[:, 16:48])  # a rank's columns alone


def test_tiles_are_one_run_of_memory() -> None:
    rows, width = 2 * TILE_ROWS, 2 * TILE_BYTES + 16
    blocks = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
    arranged = tiled(blocks)
    assert arranged.shape == blocks.shape
    assert torch.equal(untiled(arranged), blocks)
    runs = torch.split(arranged.flatten()[TILE_ROWS * width :], TILE_ROWS * TILE_BYTES)  # of the second rows
    assert torch.equal(runs[1].view(TILE_ROWS, TILE_BYTES), blocks[TILE_ROWS:, TILE_BYTES : 2 * TILE_BYTES])
    assert torch.equal(runs[2].view(TILE_ROWS, 16), blocks[TILE_ROWS:, 2 * TILE_BYTES :])
    scales = torch.arange(rows * 8).view(rows, 8)
    assert torch.equal(untiled(tiled(scales, SCALES_IN_WORD), SCALES_IN_WORD), scales)
    assert torch.equal(tiled(scales, SCALES_IN_WORD).flatten()[: TILE_ROWS * 4].view(TILE_ROWS, 4), scales[:TILE_ROWS, :4])

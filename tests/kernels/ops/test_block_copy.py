# SPDX-License-Identifier: Apache-2.0
"""KV blocks of many tensors in one buffer and back: in Triton's interpreter beside torch's copies, and compiled for three
generations of GPUs. On a GPU: tests/worker/test_host_blocks.py."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels_compiled import compiled_as
from tests.support.kernels_interpreted import interpreted, let_loops_begin_anywhere

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def check(widths: list[int], word: torch.dtype) -> None:
    """A program's share of words, one more and one less; blocks that no copy names stay as they were."""
    from phalanx.kernels.ops.block_rows import BlockRows

    generator = torch.Generator().manual_seed(len(widths))
    draw = lambda *shape: torch.randint(-128, 127, shape, generator=generator, dtype=torch.int64).to(word)  # noqa: E731
    tensors, blocks = [draw(9, width) for width in widths], torch.tensor([7, 0, 3, 8])
    by_torch, by_kernel = [each.clone() for each in tensors], [each.clone() for each in tensors]
    buffers = []
    for rows, kernel in ((by_torch, False), (by_kernel, True)):
        copies = BlockRows(rows, by_kernel=kernel)
        buffers.append(torch.full((4, sum(widths)), 5, dtype=word))
        copies.gather(blocks, buffers[-1])
        copies.scatter(torch.tensor([1, 5]), buffers[-1][2:])
        copies.gather(blocks[:0], buffers[-1][:0])
    assert torch.equal(buffers[0], torch.cat([each[blocks] for each in tensors], 1))
    assert torch.equal(*buffers)
    for tensor, one, other in zip(tensors, by_torch, by_kernel, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one[[1, 5]], tensor[[3, 8]])
        assert torch.equal(one[[0, 2, 3, 4, 6, 7, 8]], tensor[[0, 2, 3, 4, 6, 7, 8]])


def check_memory_that_moves() -> None:
    """Caches are given back and taken again by a server that sleeps."""
    from phalanx.kernels.ops.block_rows import BlockRows

    rows = [torch.zeros(64, 4096, dtype=torch.int64) for _ in range(3)]
    copies = BlockRows(rows, by_kernel=True)
    copies.scatter(torch.tensor([5]), torch.ones(1, copies.words, dtype=torch.int64))
    before, sizes = [row.data_ptr() for row in rows], [row.untyped_storage().size() for row in rows]
    for row in rows:
        row.untyped_storage().resize_(0)
    others = [torch.zeros(64, 4096, dtype=torch.int64) for _ in range(3)]
    for row, size in zip(rows, sizes, strict=True):
        row.untyped_storage().resize_(size)
        row.zero_()
    assert [row.data_ptr() for row in rows] != before
    copies.scatter(torch.tensor([5]), torch.full((1, copies.words), 7, dtype=torch.int64))
    assert all((row[5] == 7).all() for row in rows)
    assert not any(other.any() for other in others)


def test_in_the_interpreter() -> None:
    assert interpreted("tests.kernels.ops.test_block_copy") == "done\n"


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("word", "back"), [("*i64", False), ("*i64", True), ("*u8", False)])
def test_compiles(arch: int, word: str, back: bool) -> None:
    from phalanx.kernels.ops.block_copy import _copy_blocks

    kinds = {"addresses": "*i64", "ends": "*i64", "blocks": "*i64", "buffer": word, "words": "i32"}
    compiled = compiled_as(
        _copy_blocks, kinds, {"BACK": back}, arch, aligned=["addresses", "ends", "blocks", "buffer"], num_warps=4
    )
    assert "st.global" in compiled.asm["ptx"]
    assert "ld.global" in compiled.asm["ptx"]


if __name__ == "__main__":
    let_loops_begin_anywhere()
    check([1024, 1023, 1025, 3], torch.int64)
    check([2048], torch.int64)
    check([7, 1, 130], torch.uint8)
    check_memory_that_moves()
    print("done")

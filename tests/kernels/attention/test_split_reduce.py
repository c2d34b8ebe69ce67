# SPDX-License-Identifier: Apache-2.0
"""How the splits of a row of decode attention are merged: in Triton's interpreter against the reference, compiled, and on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.attention.heuristics import DecodeTiling
from tests.support.kernels_attention import sinks_of
from tests.support.kernels_compiled import compiled_as, spilled
from tests.support.kernels_decode import SIGNATURE, Case, Inputs, check, compiled_kernel, inputs_of, options_of
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

MERGES = [(0, 2), (0, 8), (1, 4), (2, 0), (4, 16)]
"""(merge_heads, merge_splits): the last split to arrive or a second kernel merges a row's splits, as a block or in order."""


def check_splits_are_merged_as_blocks_and_apart() -> None:
    """Rows of no token, of one split, of a few and of many; in a cache of each kind, with windows and sinks, in bands of heads that
    the last one does not fill, and through slots."""
    lengths = [0, 3, 41, 0, 300, 70, 1]
    for heads, splits in MERGES:
        merged = {"merge_heads": heads, "merge_splits": splits, "chunk": 32, "extra_splits": 21}
        check(Case(lengths, 2, 3, 16, **merged, sinks=3.0))
        check(Case(lengths, 1, 8, 16, **merged, fp8=True, indirect=False))
        check(Case(lengths, 2, 4, 32, **merged, int8=True, window=200, sinks=3.0))
        check(Case(lengths, 1, 20, 24, **merged, window=50, dtype=torch.float32))
    check(Case([3] * 5, 2, 2, 16, extra_splits=10, merge_heads=1, merge_splits=8))
    check(Case([200] * 70, 1, 1, 16, extra_splits=140, merge_heads=1, merge_splits=2, fp8=True))
    check(Case([200] * 3, 1, 2, 16, extra_splits=0, merge_heads=1, merge_splits=2, cooperative=True))


CHECKS = [check_splits_are_merged_as_blocks_and_apart]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


BLOCKS, PREFETCHED = DecodeTiling(33, 128, 128, 4, 2, 255, merge_splits=8), DecodeTiling(33, 128, 128, 4, 4, 168, prefetch=1)


@pytest.mark.parametrize("tiling", [BLOCKS, PREFETCHED], ids=["blocks", "prefetched"])
def test_other_ways_to_merge_and_to_read_compile(tiling: DecodeTiling) -> None:
    """For Hopper: the results of a block of splits are read by 16 bytes, without spilling; what is prefetched is so before the
    kernel waits."""
    compiled = compiled_kernel(tiling, "*bf16", kv="fp8", group=8, head_dim=128, early=True, arch=90)
    ptx = compiled.asm["ptx"]
    if tiling.merge_splits:
        assert ptx.count("ld.global.cg.v4") >= tiling.merge_splits * 8 * 128 // (4 * 32 * tiling.warps)
        assert spilled(compiled) == 0
    assert ptx.count("prefetch.global.L2") == (2 if tiling.prefetch else 0)
    assert ptx.find("prefetch.global.L2") < ptx.index("griddepcontrol.wait")


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("group", "early"), [(8, True), (20, False)])
def test_the_merging_kernel_compiles(group: int, early: bool, arch: int) -> None:
    """As few rows' splits are merged, with sinks: all that a program reads is under way at once, by 16 bytes."""
    from phalanx.kernels.attention import split_reduce
    from phalanx.kernels.attention.heuristics import select_decode

    tiling = select_decode(1, 4, group, 128, 1, 132)
    assert tiling.merge_splits > 0
    constants = {
        "GROUP": group, "KV_HEADS": 4, "DIM": 128, "WIDTH": 128, "HEADS": 8 if group <= 8 else 16, "LANES": tiling.merge_heads,
        "AT_ONCE": tiling.merge_splits, "BLOCK": True, "EARLY": early, "SM": arch, "lse": None,
    }  # fmt: skip
    kernel = split_reduce.split_merge
    kinds = {name: {**SIGNATURE, "items": "i32"}.get(name, "*bf16") for name in kernel.arg_names}
    aligned = [name for name, kind in kinds.items() if kind[0] == "*"]
    compiled = compiled_as(kernel, kinds, constants, arch, aligned=aligned, num_warps=4)
    ptx = compiled.asm["ptx"]
    assert spilled(compiled) == 0
    assert ptx.count("ld.global.cg.v4") == tiling.merge_heads * tiling.merge_splits * 128 // (4 * 32 * 4)
    assert ptx.count("griddepcontrol.wait") == (arch >= 90)


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", [{"fp8": True}, {"int8": True, "window": 3000}, {"sinks": 3.0}], ids=["fp8", "int8", "sinks"])
@pytest.mark.parametrize(("merge", "prefetch"), [((0, 0), 4), ((0, 8), 0), ((1, 4), 0), ((2, 0), 4), ((1, 32), 4)], ids=str)
def test_splits_merged_in_each_way_on_a_gpu(merge: tuple[int, int], kind: dict[str, Any], prefetch: int) -> None:
    """Three layers of a captured graph, each of which attends with what the one before gave, over splits that are read early: each
    time the same bits, as far from the reference as each layer rounds."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.decode import decode_attention
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace
    from phalanx.kernels.attention.split_kv import plan

    case = Case([1, 9000, 0, 33, 700], 4, 8, 128, **kind)
    inputs = Inputs(*(None if each is None else each.cuda() for each in inputs_of(case)))  # type: ignore[arg-type]
    options = options_of(case, inputs)
    sinks = sinks_of(inputs.query.shape[1], case.dtype, case.sinks)
    options["sinks"] = None if sinks is None else sinks.cuda()
    query, *rest = inputs[:6]
    tiling = DecodeTiling(40, 128, 128, 4, 4, 168, merge_heads=merge[0], merge_splits=merge[1], prefetch=prefetch)
    workspace = SplitKvWorkspace(torch.device("cuda"))

    def act() -> list[Tensor]:
        splits = plan(inputs.lengths, inputs.rows, tiling, window=case.window, block_size=case.block_size)
        inputs.lengths.clone()  # a launch without programmatic dependence
        layers = [query]
        for _ in range(3):
            chain = {"tiling": tiling, "splits": splits, "early_lengths": True}
            layers.append(decode_attention(layers[-1], *rest, **options, **chain, workspace=workspace))
        return layers

    act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = act()
    outputs = []
    for _ in range(20):
        graph.replay()
        outputs.append([layer.clone() for layer in layers])
    assert all(torch.equal(*pair) for each in outputs for pair in zip(each, outputs[0], strict=True))
    step = 2 * torch.finfo(case.dtype).eps
    for before, out in itertools.pairwise(outputs[0]):
        torch.testing.assert_close(out, reference.decode_attention(before, *rest, **options), rtol=step, atol=step)

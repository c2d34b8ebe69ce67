# SPDX-License-Identifier: Apache-2.0
"""Prefill attention: in Triton's interpreter against the reference, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from phalanx.kernels.attention.heuristics import PrefillTiling, count_prefill_tiles, max_prefill_tiles, select_prefill, tile_tokens
from tests.support.kernels_attention import in_int8
from tests.support.kernels_compiled import by_generation, compiled_as, spilled
from tests.support.kernels_interpreted import interpret
from tests.support.kernels_prefill import KEPT, SIGNATURE, Case, Inputs, assert_near, inputs_of, options

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def check(case: Case, seed: int = 0, tiles: int | None = None, least_rows: int = 1) -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.attention.prefill import prefill_attention

    inputs = inputs_of(case, seed)
    rest = options(case, inputs)
    wanted = reference.prefill_attention(*inputs.operands, **rest, out=torch.full_like(inputs.query, KEPT))
    out = torch.full_like(inputs.query, KEPT)
    assert prefill_attention(*inputs.operands, **rest, tiling=case.tiling, tiles=tiles, out=out, least_rows=least_rows) is out
    assert_near(case, out, wanted)


def check_ratios_of_heads() -> None:
    for kv_heads, group in ((2, 1), (1, 3), (2, 4), (1, 7), (1, 8), (1, 20)):
        check(Case([(1, 1), (40, 70), (7, 90)], kv_heads, group, 16))
    check(Case([(2, 5)], 1, 130, 16))


def check_head_dims_dtypes_and_quantized_caches() -> None:
    for head_dim, dtype in ((64, torch.float16), (80, torch.bfloat16), (128, torch.float32), (256, torch.bfloat16)):
        for kind in ({}, {"fp8": True}, {"int8": True}):
            check(Case([(5, 37), (20, 20)], 2, 4, head_dim, dtype=dtype, **kind))


def check_rows_about_the_edges_of_tiles() -> None:
    """Of tiles of 32 tokens, whose halves are programs, and of 32 keys; rows without tokens between."""
    rows = [(0, 9), (1, 33), (31, 31), (0, 1), (32, 32), (33, 64), (16, 65), (17, 96), (64, 97), (65, 65)]
    for tiling in (PrefillTiling(64, 32, 4, 2), PrefillTiling(128, 64, 8, 3), PrefillTiling(64, 16, 4, 2)):
        check(Case(rows, 1, 4, 16, tiling=tiling))
    check(Case(rows, 1, 4, 16, indirect=False, before=0, after=0, padding=0))
    check(Case(rows, 1, 4, 16, padding=40))  # more than there is room for in the smallest kernel


def check_block_sizes_and_windows() -> None:
    for block_size, windows in ((16, (None, 1, 16, 50, 1000)), (1, (None, 50)), (5, (50,)), (32, (None, 50)), (128, (None, 50))):
        for window in windows:
            case = Case([(40, 150), (1, 49), (51, 51), (3, 120)], 1, 4, 16, block_size, window, fp8=window == 50)
            check(case)
            if case.fp8:
                check(case._replace(fp8=False, int8=True))


def check_sinks() -> None:
    """See `test_decode.check_sinks`."""
    rows = [(0, 9), (1, 33), (33, 64), (17, 96), (65, 65)]
    for center in (3.0, -200.0, 300.0):
        check(Case(rows, 1, 4, 16, sinks=center))
    check(Case(rows, 2, 8, 16, window=20, sinks=3.0))
    check(Case(rows, 2, 3, 16, window=20, sinks=3.0, fp8=True))
    check(Case(rows, 2, 3, 16, window=20, sinks=3.0, int8=True))
    check(Case(rows, 1, 4, 16, sinks=3.0, int8=True))
    check(Case([(7, 40)], 1, 20, 16, sinks=3.0, dtype=torch.float32))


def check_programs_that_share_a_tile() -> None:
    """Over splits of one tile of keys or more, as many as there is room for; the counts are 0 again behind each launch."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace
    from phalanx.kernels.attention.prefill import prefill_attention

    workspace = SplitKvWorkspace(torch.device("cpu"))
    shapes = [([(7, 150)], 1, 4), ([(3, 200), (40, 45), (0, 9), (33, 170), (1, 1)], 2, 4), ([(90, 100), (2, 260)], 1, 20)]
    kinds: list[dict[str, Any]] = [{}, {"fp8": True}, {"int8": True}, {"sinks": 3.0}, {"block_size": 5, "indirect": False}]
    shared, once = 0, PrefillTiling(64, 32, 4, 2, split_keys=32, split_cost=8, splits_per_sm=1)
    for (rows, kv_heads, group), kind in itertools.product(shapes, kinds):
        case = Case(rows, kv_heads, group, 16, **kind)
        inputs = inputs_of(case)

        def output(attention: Any, inputs: Any = inputs, case: Case = case, **more: Any) -> torch.Tensor:
            return attention(*inputs.operands, **options(case, inputs), out=torch.full_like(inputs.query, KEPT), **more)

        wanted, plain = output(reference.prefill_attention), output(prefill_attention, tiling=once)
        # What a cache holds does not change how tiles are divided.
        for slots, waves in ((40, 1),) if kind else ((2, 1), (5, 1), (5, 4), (16, 1), (40, 1)):
            workspace.num_sms = slots * kv_heads
            out = output(prefill_attention, tiling=once._replace(waves=waves), workspace=workspace)
            assert_near(case, out, wanted)
            shared += int(not torch.equal(out, plain))
            assert not any(counts.any() for *_, counts in workspace._buffers)
    assert shared >= 12, "hardly any case was split: its results are rounded otherwise than those of one program"


def check_as_many_programs_as_tiles_or_more() -> None:
    case = Case([(40, 50), (0, 3), (9, 9)], 2, 4, 16)
    exact = count_prefill_tiles(inputs_of(case).starts.tolist(), 4)
    assert exact == 3
    for tiles in (exact, exact + 5):
        check(case, tiles=tiles)
    check(Case([], 2, 4, 16))  # padding alone
    check(case, least_rows=256)
    check(Case([(1, 1), (40, 50)], 8, 1, 24, indirect=False, before=0, after=0, padding=0), least_rows=256)


def check_queries_of_any_size_meet_a_quantized_cache() -> None:
    """bf16 has a wider range than fp16, in which GEMMs with e4m3 and int8 run; and times a scale it exceeds fp32's."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.prefill import prefill_attention

    case = Case([(30, 60)], 1, 4, 32, before=0, after=0)
    factors = (1e30, 1e-30), (1e-30, 1e30), (1e-30, 1e-30), (1e-39, 1.0), (0.0, 1.0)
    for kind, (factor, scale) in itertools.product(({"fp8": True}, {"int8": True}), factors):
        inputs = inputs_of(case._replace(**kind))
        arguments = options(case._replace(**kind), inputs) | {"scale": scale}
        inputs = inputs._replace(query=inputs.query * factor)
        wanted = reference.prefill_attention(*inputs.operands, **arguments)
        out = prefill_attention(*inputs.operands, **arguments, tiling=case.tiling)
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)


def check_tokens_of_any_size_meet_in_an_int8_cache() -> None:
    """See the check of this name in `test_decode`."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.prefill import prefill_attention

    inputs = inputs_of(Case([(70, 150)], 1, 4, 32, before=0, after=0, padding=0, dtype=torch.float32))
    sizes = 10.0 ** torch.randint(-6, 1, (*inputs.value.shape[:2], 1, 1), generator=torch.Generator().manual_seed(1))
    for value_size in (1e-8, 1.0, 1e4):
        value = inputs.value * (value_size * sizes)
        value[:, 5] = 0.0
        key, value, token_scales = in_int8(inputs.key, value)
        operands = inputs._replace(query=inputs.query.bfloat16(), key=key, value=value).operands
        wanted = reference.prefill_attention(*operands, scale=0.2, token_scales=token_scales)
        out = prefill_attention(
            *operands, scale=0.2, token_scales=token_scales, window=None, kv_scales=None, tiling=PrefillTiling(64, 32, 4, 2)
        )
        torch.testing.assert_close(out / value_size, wanted / value_size, rtol=0.01, atol=1e-3)


CHECKS = [
    check_ratios_of_heads, check_head_dims_dtypes_and_quantized_caches, check_rows_about_the_edges_of_tiles,
    check_block_sizes_and_windows, check_as_many_programs_as_tiles_or_more, check_queries_of_any_size_meet_a_quantized_cache,
    check_sinks, check_programs_that_share_a_tile, check_tokens_of_any_size_meet_in_an_int8_cache,
]  # fmt: skip


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


def test_tiles_are_counted_by_row() -> None:
    """And from shapes alone never too few."""
    assert count_prefill_tiles([3, 3, 4, 20, 37, 37], 8) == 1 + 1 + 2
    assert [tile_tokens(group) for group in (1, 3, 8, 128, 200)] == [128, 42, 16, 1, 1]
    rng = random.Random(0)
    for _ in range(200):
        group, starts = rng.choice((1, 3, 8, 64)), [rng.randrange(4)]
        for _ in range(rng.randrange(9)):
            starts.append(starts[-1] + rng.choice((0, 1, 15, 16, 17, 130)))
        assert count_prefill_tiles(starts, group) <= max_prefill_tiles(starts[-1], len(starts) - 1, group)


CACHES = {"fp8": "*u8", "int8": "*i8"}
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}
"""KiB of shared memory that a program may have."""


SINKS, WIDE_HEADS, INT8 = (64, "*bf16", "fp8", False), (256, "*bf16", "fp8", True), (128, "*bf16", "int8", False)
VARIANTS = [
    (128, "*bf16", "model", False), (128, "*bf16", "fp8", False), INT8, SINKS, (80, "*fp16", "model", True), WIDE_HEADS,
    (192, "*bf16", "model", False),
]  # fmt: skip
"""head_dim, dtype, what the cache is, whether there is a window."""


@pytest.mark.parametrize(("variant", "arch"), by_generation(VARIANTS, {SINKS, WIDE_HEADS, INT8}))
def test_compiles(variant: tuple[int, str, str, bool], arch: int) -> None:
    """Down to machine code that fits a multiprocessor: on tensor cores, with loads of 16 bytes in flight."""
    head_dim, dtype, kv, window = variant
    tiling = select_prefill(head_dim, 2)
    compiled = compiled_kernel(tiling, dtype, kv=kv, head_dim=head_dim, window=window, arch=arch)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_KIB[arch] << 10
    assert {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch] in ptx
    vectors = 2 * tiling.keys * head_dim * (2 if kv == "model" else 1) // 16 // (32 * tiling.warps)
    if arch >= 90:
        assert ptx.count("cp.async.cg.shared.global") >= vectors * (tiling.stages - 1), "keys or values are not read by 16 bytes"
    assert ("griddepcontrol.wait" in ptx) == (arch >= 90)
    if arch == 90 and head_dim == 128:
        assert spilled(compiled) == 0


@pytest.mark.parametrize(("arch", "head_dim", "kv"), [(89, 128, "model"), (89, 128, "int8"), (90, 80, "fp8")])
def test_fp32_fits_a_multiprocessor_too(arch: int, head_dim: int, kv: str) -> None:
    tiling = select_prefill(head_dim, 4)
    compiled = compiled_kernel(tiling, "*fp32", kv=kv, head_dim=head_dim, window=False, arch=arch)
    assert compiled.metadata.shared <= SHARED_KIB[arch] << 10


def compiled_kernel(tiling: PrefillTiling, dtype: str, *, kv: str, head_dim: int, window: bool, arch: int) -> Any:
    """The kernel as Triton compiles it for 16 query and 2 KV heads."""
    from triton import next_power_of_2

    from phalanx.kernels.attention import prefill

    constants = {
        "GROUP": 8, "KV_HEADS": 2, "DIM": head_dim, "WIDTH": next_power_of_2(head_dim), "BLOCK_SIZE": 16,
        "TOKENS": tile_tokens(8), "ROWS": tiling.rows, "KEYS": tiling.keys, "STAGES": tiling.stages, "MOST": 32, "INDIRECT": True,
        "WINDOWED": window, "EARLY": kv != "model", "SM": arch, **({} if head_dim == 64 else {"sinks": None}),
        "COPIES": max(32 * tiling.warps // tiling.keys, 1), "ANCHORED": False, "SPLIT": 0 if window else tiling.split_keys,
        "COST": tiling.split_cost,
        **({} if kv == "int8" else {"token_scales": None}),
    }  # fmt: skip
    kinds = {}
    for name in prefill._prefill.arg_names:
        kinds[name] = SIGNATURE.get(name, CACHES.get(kv, dtype) if name.endswith("cache") else dtype)
    aligned = [name for name, kind in kinds.items() if kind[0] == "*" and name not in SIGNATURE.keys() - {"token_scales"}]
    launch = {"num_warps": tiling.warps} | ({} if tiling.registers is None else {"maxnreg": tiling.registers})
    return compiled_as(prefill._prefill, kinds, constants, arch, aligned=aligned, **launch)


@pytest.mark.gpu1
@pytest.mark.parametrize(
    "case",
    [
        Case([(700, 900), (0, 5), (1, 2000), (130, 130)], 8, 8, 64, window=128, sinks=3.0),
        Case([(700, 900), (0, 5), (1, 2000), (130, 130)], 2, 8, 128), Case([(300, 1200), (90, 90)], 2, 7, 64, window=300, fp8=True),
        Case([(300, 1200), (90, 90)], 1, 4, 128, fp8=True), Case([(300, 1200), (90, 90)], 1, 4, 128, int8=True),
        Case([(300, 1200), (90, 90)], 2, 7, 64, window=300, sinks=3.0, int8=True),
        Case([(40, 300), (90, 90)], 1, 3, 256, 32, dtype=torch.float16, int8=True),
        Case([(40, 1200), (90, 90)], 1, 4, 80, 5, dtype=torch.float32),
        Case([(40, 300), (90, 90)], 1, 3, 256, 32, dtype=torch.float16),
        Case([(16, 9000), (1, 5), (64, 7000)], 2, 4, 128), Case([(16, 9000), (1, 5), (64, 7000)], 2, 4, 128, fp8=True, sinks=3.0),
        Case([(16, 9000), (1, 5), (64, 7000)], 1, 5, 128, int8=True),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("early", [False, True])
def test_replayed_on_a_gpu_with_other_rows(case: Case, early: bool) -> None:
    """Captured with rows that have no token, replayed with those of the case; each time the same bits."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.dispatch import prefill_attention
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace

    inputs = Inputs(*(None if each is None else each.cuda() for each in inputs_of(case)))  # type: ignore[arg-type]
    replayed = inputs._replace(starts=torch.zeros_like(inputs.starts), lengths=torch.ones_like(inputs.lengths))
    out = torch.full_like(inputs.query, KEPT)
    torch.cuda.synchronize()
    # Before the capture, which may copy nothing from the host.
    chosen, workspace = options(case, inputs, "cuda"), SplitKvWorkspace(inputs.query.device)
    prefill_attention(*replayed.operands, **chosen, early_lengths=early, out=out, workspace=workspace)
    torch.cuda.synchronize()
    assert bool((out == KEPT).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_attention(*replayed.operands, **chosen, early_lengths=early, out=out, workspace=workspace)
    replayed.starts.copy_(inputs.starts)
    replayed.lengths.copy_(inputs.lengths)
    wanted = reference.prefill_attention(*inputs.operands, **chosen, out=torch.full_like(inputs.query, KEPT))
    outputs = []
    for _ in range(5):
        graph.replay()
        outputs.append(out.clone())
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    assert_near(case, outputs[0], wanted)

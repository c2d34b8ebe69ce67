# SPDX-License-Identifier: Apache-2.0
"""Decode attention: in Triton's interpreter against the reference, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.attention.heuristics import DecodeTiling
from tests.support.kernels_attention import in_int8, sinks_of
from tests.support.kernels_compiled import by_generation
from tests.support.kernels_decode import Case, Inputs, check, compiled_kernel, inputs_of, options_of
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

CPU = torch.device("cpu")


def check_ratios_of_heads() -> None:
    for kv_heads, group in ((2, 1), (1, 3), (2, 4), (1, 7), (1, 8), (1, 16), (2, 20)):
        check(Case([1, 33, 100], kv_heads, group, 32))


def check_head_dims_dtypes_and_quantized_caches() -> None:
    for head_dim, dtype in (
        (8, torch.float32),
        (80, torch.bfloat16),
        (96, torch.float16),
        (128, torch.bfloat16),
        (256, torch.float32),
    ):
        for kind in ({}, {"fp8": True}, {"int8": True}):
            check(Case([5, 97], 2, 4, head_dim, dtype=dtype, **kind))


def check_lengths_about_the_edges() -> None:
    """Of tiles (32), of chunks (40), and enough for every split; one split alone, and more than a row needs."""
    lengths = [1, 2, 31, 32, 33, 40, 41, 64, 65, 80, 81, 128, 129, 160, 161, 330]
    for extra_splits in (0, 1, 16, 200):
        check(Case(lengths, 1, 2, 16, extra_splits=extra_splits))
    check(Case(lengths, 1, 2, 16, tile=64, warps=1, indirect=False))
    check(Case(lengths, 1, 2, 16, tile=64, warps=4, extra_splits=48))
    check(Case(lengths, 1, 2, 16, tile=64, warps=4, extra_splits=48, cooperative=True))
    check(Case(lengths, 1, 2, 16, tile=16, warps=1))


def check_block_sizes_and_windows() -> None:
    for block_size, windows in (
        (16, (None, 1, 16, 50, 1000)),
        (1, (None, 50)),
        (5, (None, 50)),
        (32, (None, 50)),
        (256, (None, 50)),
    ):
        for window in windows:
            case = Case([1, 49, 50, 51, 150], 1, 4, 16, block_size=block_size, window=window, fp8=window == 50)
            check(case)
            check(case._replace(cooperative=True))
            if case.fp8:
                check(case._replace(fp8=False, int8=True))


def check_one_long_row_among_short_ones() -> None:
    """Which has more programs than there are rows; some rows are not there."""
    lengths = [3] * 9 + [900] + [70] * 5
    check(Case(lengths, 2, 4, 16, extra_splits=30))
    check(Case([0, *lengths, 0, 1], 1, 2, 16, extra_splits=18, indirect=False))
    check(Case(lengths * 5, 1, 1, 16, extra_splits=75, fp8=True))
    check(Case(lengths * 5, 1, 1, 16, extra_splits=75, int8=True))
    check(Case(lengths, 1, 4, 16, extra_splits=15, window=200))


def check_launches_share_a_workspace() -> None:
    """As replays of captured launches do, with other lengths each time; and a larger launch that makes it grow."""
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace

    workspace = SplitKvWorkspace(CPU)
    for seed, lengths in enumerate(([200, 3], [1, 1], [90, 201], [41, 700], [200] * 7, [3, 200])):
        check(Case(lengths, 2, 3, 32, extra_splits=6 * len(lengths)), workspace, seed)
        check(Case(lengths, 2, 3, 32, extra_splits=6 * len(lengths), merge_heads=2, merge_splits=4), workspace, seed)
    assert len(workspace._buffers) == 2


def check_queries_of_any_size_meet_a_quantized_cache() -> None:
    """bf16 has a wider range than fp16, in which GEMMs with e4m3 and int8 run."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.decode import decode_attention
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace

    cases = Case([60, 60], 1, 4, 32, fp8=True), Case([60, 60], 1, 4, 32, int8=True)
    for case, (factor, scale) in itertools.product(cases, ((1e30, 1e-30), (1e-30, 1e30), (0.0, 1.0))):
        inputs = inputs_of(case)
        options, (query, *rest) = options_of(case, inputs) | {"scale": scale}, inputs[:6]
        wanted = reference.decode_attention(query * factor, *rest, **options)
        out = decode_attention(
            query * factor, *rest, **options, workspace=SplitKvWorkspace(CPU), tiling=DecodeTiling(1, 64, 32, 2, 2, 255)
        )
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)


def check_tokens_of_any_size_meet_in_an_int8_cache() -> None:
    """Keys and values of all sizes in one row, zeros among them: those of the first tokens are often tiny, and get most of the
    weight. Weights times scales that fp16 alone would not hold still count."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.decode import decode_attention
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace

    case = Case([300, 41], 1, 4, 32, int8=True, extra_splits=4, block_size=8)
    for value_size in (1e-8, 1.0, 1e4):
        query, key, value, *rest, _ = inputs_of(case._replace(int8=False, dtype=torch.float32))
        sizes = 10.0 ** torch.randint(-6, 1, (*value.shape[:2], 1, 1), generator=torch.Generator().manual_seed(1))
        value *= value_size * sizes
        key[:, 3], value[:, 5] = 0.0, 0.0
        key, value, token_scales = in_int8(key, value)
        options = {"scale": 0.2, "token_scales": token_scales, "window": None, "kv_scales": None}
        operands = query.bfloat16(), key, value, *rest
        wanted = reference.decode_attention(*operands, **options)
        out = decode_attention(*operands, **options, workspace=SplitKvWorkspace(CPU), tiling=DecodeTiling(4, 40, 32, 2, 2, 255))
        torch.testing.assert_close(out / value_size, wanted / value_size, rtol=0.01, atol=1e-3)


def check_each_value_in_int8_is_exact() -> None:
    """All 256, as the first and the second of what is read at once. Values: of a row whose tokens have equal weights and values.
    Keys: two that differ by 1 have the same weights wherever they lie."""
    assert_each_value_in_int8_is_exact(CPU)


def assert_each_value_in_int8_is_exact(device: torch.device) -> None:
    from phalanx.kernels.attention.decode import decode_attention
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace

    each = torch.arange(-128, 128, device=device).to(torch.int8)
    value = torch.stack((each, each.roll(1))).view(2, 1, 4, 64).repeat(1, 32, 1, 1)
    key, scales = torch.zeros_like(value), torch.ones(2, 4, 32, 2, dtype=torch.bfloat16, device=device)
    first, lengths = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([[0], [1]], [1, 32]))
    options: dict[str, Any] = {"scale": 1.0, "window": None, "kv_scales": None, "workspace": SplitKvWorkspace(device)}
    for dtype, order in itertools.product((torch.bfloat16, torch.float16), (lengths, lengths.flip(0))):
        query = torch.ones(2, 8, 64, dtype=dtype, device=device)
        tiling = DecodeTiling(0, 64, 32, 2, 2, 255)
        out = decode_attention(query, key, value, first, None, order, tiling=tiling, token_scales=scales, **options)
        assert torch.equal(out[:, ::2], value[:, 0].to(dtype))

    rows = len(each) - 1
    key, value = (torch.zeros(rows, 16, 1, 32, dtype=torch.int8, device=device) for _ in range(2))
    key[:, 0, 0, 5], key[:, 1, 0, 5], value[:, 0], value[:, 1] = each[:-1], each[1:], 100, -100
    scales, tables = torch.ones(rows, 1, 16, 2, dtype=torch.bfloat16, device=device), torch.arange(rows, device=device).int()
    query = torch.nn.functional.one_hot(torch.tensor(5), 32).bfloat16().to(device).expand(rows, 1, 32).contiguous()
    lengths, tiling = torch.full((rows,), 2, dtype=torch.int32, device=device), DecodeTiling(0, 64, 32, 2, 2, 255)
    out = decode_attention(query, key, value, tables[:, None], None, lengths, tiling=tiling, token_scales=scales, **options)
    torch.testing.assert_close(out.float(), torch.full_like(out, -100 * math.tanh(0.5)).float(), rtol=2**-8, atol=0.0)


def check_nan_in_a_query_stays_in_its_head() -> None:
    from phalanx.kernels.attention.decode import decode_attention
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace

    for kind in ({}, {"fp8": True}, {"int8": True}):
        case = Case([50], 1, 4, 32, **kind)
        inputs = inputs_of(case)
        inputs.query[0, 2, 7] = float("nan")
        options = options_of(case, inputs) | {"workspace": SplitKvWorkspace(CPU), "tiling": DecodeTiling(0, 64, 32, 2, 2, 255)}
        assert decode_attention(*inputs[:6], **options).isnan().all(-1).tolist() == [[False, False, True, False]]


def check_sinks() -> None:
    """Beside few and many scores, in one split and several, with windows, in a quantized cache; so low that they take nothing, and
    so high that they take all."""
    lengths = [1, 2, 50, 130, 330]
    for center in (0.0, 12.0, -200.0, 300.0):
        check(Case(lengths, 1, 4, 16, sinks=center))
    check(Case(lengths, 2, 8, 16, sinks=3.0, window=50, extra_splits=0, cooperative=True))
    check(Case([0, *lengths], 2, 20, 32, sinks=3.0, fp8=True, extra_splits=24, indirect=False))
    check(Case(lengths, 2, 3, 16, sinks=3.0, dtype=torch.float32, window=3))
    check(Case([0, *lengths], 2, 20, 32, sinks=3.0, int8=True, extra_splits=24, indirect=False))
    check(Case(lengths, 2, 8, 16, sinks=3.0, int8=True, window=50, extra_splits=0, cooperative=True))


def check_a_sink_is_a_key_without_a_value() -> None:
    """The weights of a head whose sink is the logarithm of the sum of its scores are halved."""
    from phalanx.kernels import reference

    query, key, value, tables, rows, lengths, _ = inputs_of(Case([40], 1, 2, 16, dtype=torch.float32))
    options = {"scale": 0.25, "window": None, "kv_scales": None}
    plain = reference.decode_attention(query, key, value, tables, rows, lengths, **options)
    table = tables[int(rows[0])]
    keys = torch.stack([key[int(table[at // 16]), at % 16, 0] for at in range(40)])
    sinks = (query[0] @ keys.t() * 0.25).logsumexp(-1)
    half = reference.decode_attention(query, key, value, tables, rows, lengths, **options, sinks=sinks)
    torch.testing.assert_close(half, plain / 2)


CHECKS = [
    check_sinks, check_a_sink_is_a_key_without_a_value,
    check_ratios_of_heads, check_head_dims_dtypes_and_quantized_caches, check_lengths_about_the_edges,
    check_block_sizes_and_windows, check_one_long_row_among_short_ones, check_launches_share_a_workspace,
    check_queries_of_any_size_meet_a_quantized_cache, check_tokens_of_any_size_meet_in_an_int8_cache,
    check_each_value_in_int8_is_exact, check_nan_in_a_query_stays_in_its_head,
]  # fmt: skip


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


SINKS, UNSPLIT = (64, "*bf16", "fp8", 64, False), (128, "*bf16", "fp8", 512, False)
INT8_SHORT_ROW = (128, "*bf16", "int8", 1, True)
VARIANTS = [
    (128, "*bf16", "model", 64, False), (128, "*bf16", "fp8", 1, False), (128, "*bf16", "model", 1, True),
    (80, "*fp16", "model", 1, True), UNSPLIT, SINKS, (128, "*bf16", "int8", 64, False), INT8_SHORT_ROW,
]  # fmt: skip
"""head_dim, dtype, what the cache is, rows, whether they are short."""


@pytest.mark.parametrize(("variant", "arch"), by_generation(VARIANTS, {SINKS, UNSPLIT, INT8_SHORT_ROW}))
def test_compiles(variant: tuple[int, str, str, int, bool], arch: int) -> None:
    """Down to machine code, as it is launched for so many rows: on tensor cores, with reads of 16 bytes under way. With a head_dim
    of 64, there are sinks."""
    from phalanx.kernels.attention.heuristics import select_decode

    head_dim, dtype, kv, rows, short = variant
    itemsize = 2 if kv == "model" else 1
    tiling = select_decode(rows, 8, 4, head_dim, itemsize, 132, short=short)
    compiled = compiled_kernel(tiling, dtype, kv=kv, group=4, head_dim=head_dim, early=kv != "model" or short, arch=arch)
    assert len(compiled.asm["cubin"]) > 0
    ptx = compiled.asm["ptx"]
    assert ("griddepcontrol.wait" in ptx) == (arch >= 90)
    assert "mma.sync" in ptx
    vectors = 2 * tiling.tile * head_dim * itemsize // 16 // (32 * tiling.warps)
    assert ptx.count("cp.async.cg.shared.global") >= vectors * (tiling.stages - 1), "keys or values are not read by 16 bytes"
    if kv == "int8":  # two bf16 for a token, also under way
        assert ptx.count("cp.async.ca.shared.global") >= max(tiling.tile // (32 * tiling.warps), 1) * (tiling.stages - 1)
    assert ("atom.gpu.global.acq_rel" in ptx or "atom.global.gpu.acq_rel" in ptx) == (
        tiling.extra_splits > 0 and not tiling.merge_heads
    )


@pytest.mark.parametrize(
    ("arch", "kib", "dtype", "kv", "group", "head_dim"),
    [
        (90, 227, "*bf16", "model", 16, 128), (90, 227, "*fp32", "fp8", 4, 256), (80, 163, "*fp32", "fp8", 4, 128),
        (89, 99, "*bf16", "model", 4, 128), (90, 227, "*fp32", "int8", 4, 256), (80, 163, "*bf16", "int8", 16, 128),
    ],
)  # fmt: skip
def test_a_short_rows_program_fits_a_multiprocessor(
    arch: int, kib: int, dtype: str, kv: str, group: int, head_dim: int
) -> None:  # fmt: skip
    """Of so many KiB of shared memory; else short rows have the program of all others."""
    from phalanx.kernels.attention.heuristics import select_decode

    itemsize = 1 if kv != "model" else {"*fp32": 4}.get(dtype, 2)
    fp32 = dtype == "*fp32"
    tiling = select_decode(1, 2, group, head_dim, itemsize, 132, short=True, fp32=fp32, shared_memory=kib << 10)
    compiled = compiled_kernel(tiling, dtype, kv=kv, group=group, head_dim=head_dim, early=False, arch=arch)
    assert compiled.metadata.shared <= kib << 10


def test_how_rows_are_split() -> None:
    """No further than into as many programs as the GPU runs at once, or than each row in two on average; and the tile of a warp is
    one that tensor cores take. Few rows are split more, so that the GPU is full; more than the planning kernel takes are not
    split."""
    from phalanx.kernels.attention.heuristics import ROW_CLASSES, select_decode

    shapes = ((8, 4, 128, 2), (1, 32, 64, 1), (2, 1, 256, 4))
    for rows, shape, short in itertools.product((1, 2, 8, 34, 64, 512), shapes, (False, True)):
        tiling, kv_heads = select_decode(rows, *shape, 132, short=short), shape[0]
        assert tiling.tile // tiling.warps >= 16
        assert tiling.extra_splits % rows == 0
        assert tiling.extra_splits <= rows or tiling.extra_splits * kv_heads * tiling.warps <= 9 * 132
        assert (tiling.extra_splits == 0) == tiling.cooperative
    assert select_decode(1, 8, 4, 128, 2, 132).extra_splits > 8
    for rows, kv_heads, splits in (
        (1, 8, 256),
        (1, 1, 256),
        (1, 4, 256),
        (8, 8, 256),
        (32, 8, 256),
    ):  # of rows that are alike, long
        tiling = select_decode(rows, kv_heads, 4, 128, 1, 132)
        size = -(-rows * 1024 // tiling.extra_splits)
        assert splits <= rows * kv_heads * -(-1024 // size) <= 1.25 * splits
    merged_apart = [(rows, kv_heads) for rows in (1, 8, 15, 16, 64) for kv_heads in (1, 2, 4, 8) if (
        select_decode(rows, kv_heads, 4, 128, 1, 132).merge_heads
    )]  # fmt: skip
    assert merged_apart == [(1, 1), (1, 2), (1, 4), (1, 8), (8, 1), (8, 2), (15, 1)]
    assert select_decode(512, 8, 4, 128, 2, 132).extra_splits == 512
    assert select_decode(ROW_CLASSES[-1], 8, 4, 128, 2, 132).extra_splits > 0
    assert select_decode(ROW_CLASSES[-1] + 1, 8, 4, 128, 2, 132).extra_splits == 0


def test_few_short_rows_have_a_program_each() -> None:
    """Which reads all at once; for many rows, and for what it does not know, shortness makes no difference."""
    from phalanx.kernels.attention.dispatch import HeadLayout, short_kv_limit
    from phalanx.kernels.attention.heuristics import SHORT_KV

    few = HeadLayout(8, 4, 128, 2)
    tiling = few.tiling(8, 132, short=True, shared_memory=227 << 10)
    assert (tiling.extra_splits, tiling.cooperative) == (0, True)
    assert tiling.tile >= SHORT_KV
    assert not few.tiling(8, 132, short=False, shared_memory=227 << 10).cooperative
    assert [short_kv_limit(rows, few, 132) for rows in (1, 8, 9, 512)] == [SHORT_KV, SHORT_KV, 0, 0]
    assert short_kv_limit(1, few._replace(head_dim=256), 132) == 0
    assert [short_kv_limit(1, few, 132, kib << 10) for kib in (163, 99)] == [SHORT_KV, 0]


@pytest.mark.gpu1
def test_each_value_in_int8_is_exact_on_a_gpu() -> None:
    """Where the kernel reads it by instructions that the interpreter does not have."""
    assert_each_value_in_int8_is_exact(torch.device("cuda"))


@pytest.mark.gpu1
@pytest.mark.parametrize(
    "case", [
        Case([1, 33, 700, 2000], 8, 8, 64, window=128, sinks=3.0), Case([1, 33, 700, 2000], 8, 8, 64, sinks=3.0),
        Case([1, 33, 700, 2000], 8, 4, 128), Case([1, 90, 1200], 2, 7, 64, window=300, fp8=True),
        Case([5] * 40 + [3000] + [60] * 40, 8, 4, 128, fp8=True), Case([5] * 40 + [3000] + [60] * 40, 8, 4, 128, int8=True),
        Case([1, 90, 1200], 2, 7, 64, window=300, int8=True), Case([1, 33, 700, 2000], 8, 8, 64, sinks=3.0, int8=True),
        Case([1, 9000], 8, 8, 64, sinks=3.0), Case([1, 33, 700, 9000], 4, 8, 128, fp8=True),
        Case([1, 700, 2000], 2, 4, 128, int8=True, dtype=torch.float16), Case([1, 700], 2, 4, 128, int8=True, dtype=torch.float32),
    ], ids=lambda case: f"{len(case.lengths)} rows",
)  # fmt: skip
@pytest.mark.parametrize(("early", "short"), [(False, False), (True, False), (True, True)])
def test_replayed_on_a_gpu_with_other_lengths(case: Case, early: bool, short: bool) -> None:
    """Captured once with lengths of 1, replayed with those of the case, longest first and last; each time the same bits. A launch
    for short rows is right for the others, too. early: splits are planned first, as an engine's graphs do."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.dispatch import LayerSpec, SplitKvWorkspace, decode_attention, plan_splits

    inputs = Inputs(*(None if each is None else each.cuda() for each in inputs_of(case)))  # type: ignore[arg-type]
    options = options_of(case, inputs)
    sinks = sinks_of(inputs.query.shape[1], case.dtype, case.sinks)
    options["sinks"] = None if sinks is None else sinks.cuda()
    workspace, lengths = SplitKvWorkspace(torch.device("cuda")), torch.ones_like(inputs.lengths)
    replayed = inputs._replace(lengths=lengths)

    def act() -> Tensor:
        splits = None
        if early:
            spec = LayerSpec.of(replayed.query, replayed.key, case.window)
            splits = plan_splits(lengths, replayed.rows, spec, workspace, short=short)
            lengths.clone()  # a launch without programmatic dependence
        return decode_attention(*replayed[:6], **options, workspace=workspace, short=short, splits=splits, early_lengths=early)

    torch.cuda.synchronize()
    act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = act()
    lengths.copy_(inputs.lengths)
    wanted, outputs = reference.decode_attention(*inputs[:6], **options), []
    for _ in range(20):
        graph.replay()
        outputs.append(out.clone())
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    # Scales of values in int8 are logarithms in fp32, added to scores: 1e-6 of a weight, where 2 eps of fp32 are less.
    step = max(2 * torch.finfo(case.dtype).eps, 1e-5 if case.int8 else 0.0)
    torch.testing.assert_close(outputs[0], wanted, rtol=step, atol=step)

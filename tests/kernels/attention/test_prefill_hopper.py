# SPDX-License-Identifier: Apache-2.0
"""Warp-specialized prefill attention: compiled for Hopper, and on a GPU against the reference. Gluon has no interpreter."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from phalanx.kernels.attention.heuristics import SplitKvWorkspace, count_prefill_tiles, tile_tokens
from phalanx.kernels.capabilities import has_gluon
from tests.support.kernels_compiled import compiled_as, gluon_compiles, ordered, spilled
from tests.support.kernels_prefill import KEPT, SIGNATURE, Case, Inputs, assert_near, inputs_of, options

pytestmark = [
    pytest.mark.usefixtures("forked_python"),
    pytest.mark.skipif(not gluon_compiles(), reason="the kernel is for another Triton"),
]

ROWS = [(700, 900), (0, 5), (1, 2000), (130, 130), (33, 64), (128, 384), (2, 129)]


@pytest.mark.parametrize(
    ("dtype", "kv", "head_dim", "block_size"),
    [("bf16", "bf16", 128, 16), ("bf16", "fp8e4nv", 128, 16), ("fp16", "fp16", 64, 256), ("fp16", "fp8e4nv", 64, 32)],
)
@pytest.mark.parametrize("shared", [False, True])
def test_compiles(dtype: str, kv: str, head_dim: int, block_size: int, shared: bool) -> None:
    """A consumer has both GEMMs under way while it takes exponentials, and nothing spills."""
    compiled = compiled_kernel(dtype, kv, head_dim, block_size, shared)
    steps = ordered(compiled.asm["ptx"])
    # 3.7 keeps two registers of a thread in memory, or ten, where keys of 128 numbers are FP8.
    more = 0 if has_gluon() or (kv, head_dim) != ("fp8e4nv", 128) else 40 if shared else 8
    assert spilled(compiled) <= more
    assert compiled.metadata.shared <= 227 << 10
    gemms = "W" * (head_dim // 16) + "?" + "W" * 8 + "1a"  # scores, the values' barrier, output; then only scores are awaited
    assert steps.count(gemms) == steps.count("e0a") == 2, steps  # output is awaited behind the exponentials


def compiled_kernel(dtype: str, kv: str, head_dim: int, block_size: int, shared: bool) -> Any:
    """As Triton compiles it for 16 query and 2 KV heads. shared: programs may share the keys of a tile."""
    from phalanx.kernels.attention import prefill_hopper

    partial = ("split_max", "totals", "outs", "arrivals")
    constants = {
        "GROUP": 8, "KV_HEADS": 2, "DIM": head_dim, "BLOCK_SIZE": block_size, "TOKENS": tile_tokens(8), "INDIRECT": True,
        **({} if shared else dict.fromkeys(partial)),
    }  # fmt: skip
    layout = prefill_hopper.line_layout(1 if kv != dtype else 2)
    descriptor = f"tensordesc<{kv}[{min(block_size, 128)}, 64],{layout!r}>"
    kinds = {
        name: descriptor if name.endswith("desc") else SIGNATURE.get(name, f"*{dtype}")
        for name in prefill_hopper._prefill_long_rows.arg_names
    }  # fmt: skip
    return compiled_as(prefill_hopper._prefill_long_rows, kinds, constants, 90, aligned=["query", "out", *partial], num_warps=4)


CASES = [
    Case(ROWS, 8, 4, 128), Case(ROWS, 1, 8, 128, fp8=True), Case(ROWS, 2, 7, 128, 32, indirect=False),
    Case(ROWS, 2, 1, 64, 128, dtype=torch.float16), Case(ROWS, 2, 3, 64, 256, fp8=True), Case(ROWS, 1, 8, 64),
    Case(ROWS, 1, 16, 128, dtype=torch.float16, fp8=True), Case(ROWS, 1, 5, 128, padding=40),
    Case([(4096, 4096)], 2, 4, 128, before=0, after=0, padding=0), Case([(700, 33000)], 1, 8, 128, fp8=True),
    Case([(16, 9000), (1, 5), (64, 7000)], 8, 8, 128), Case([(16, 9000), (1, 5), (64, 7000)], 2, 32, 64, fp8=True),
]  # fmt: skip


@pytest.mark.gpu1
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("early", "waves"), [(False, 0), (True, 0), (False, 6), (True, 1)])
def test_replayed_on_a_gpu_with_other_rows(case: Case, early: bool, waves: int) -> None:
    """Captured with rows that have no token, replayed with those of the case; each time the same bits. Memory that no token attends
    to is NaN."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.prefill_hopper import prefill_attention

    inputs = Inputs(*(None if each is None else each.cuda() for each in inputs_of(case)))  # type: ignore[arg-type]
    replayed = inputs._replace(starts=torch.zeros_like(inputs.starts), lengths=torch.ones_like(inputs.lengths))
    out = torch.full_like(inputs.query, KEPT)
    chosen = {name: options(case, inputs, "cuda")[name] for name in ("scale", "kv_scales")}
    shared: dict[str, Any] = {"workspace": SplitKvWorkspace(out.device), "waves": waves}
    prefill_attention(*replayed.operands, **chosen, **shared, early_lengths=early, out=out)
    assert bool((out == KEPT).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_attention(*replayed.operands, **chosen, **shared, early_lengths=early, out=out)
    replayed.starts.copy_(inputs.starts)
    replayed.lengths.copy_(inputs.lengths)
    wanted = reference.prefill_attention(*inputs.operands, **chosen, out=torch.full_like(inputs.query, KEPT))
    outputs = []
    for _ in range(20):
        out.fill_(KEPT)
        graph.replay()
        outputs.append(out.clone())
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    assert_near(case, outputs[0], wanted)
    tiles = count_prefill_tiles(inputs.starts.tolist(), case.group)
    again = prefill_attention(*inputs.operands, **chosen, **shared, tiles=tiles, out=torch.full_like(out, KEPT))
    assert torch.equal(again, outputs[0])


HEADS = [(1, 64, 64, 16, False), (8, 8, 128, 16, True), (4, 8, 128, 64, False), (8, 1, 64, 256, True), (2, 3, 128, 32, True)]
"""KV heads, query heads of each, head_dim, block size, whether the cache is in e4m3."""


@pytest.mark.gpu1
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size", "fp8"), HEADS)
def test_programs_that_share_keys_compute_what_one_does(
    kv_heads: int, group: int, head_dim: int, block_size: int, fp8: bool
) -> None:  # fmt: skip
    """For rows of any lengths, many of them about the edges of splits. What no token attends to is NaN."""
    from phalanx.kernels.attention.prefill_hopper import prefill_attention

    rng, workspace, shared = random.Random(0), SplitKvWorkspace(torch.device("cuda")), 0
    for _ in range(40):
        lengths = [
            rng.choice((1, 512, 1024, 5120, 9216)) + rng.choice((0, 1, 127, 128, 129, 400)) for _ in range(rng.randint(1, 4))
        ]
        counts = [min(rng.choice((0, 1, 2, 15, 17, 64, 130)), length) for length in lengths]
        if not any(counts):
            continue
        width = -(-max(lengths) // block_size)
        cache = torch.randn(2, len(lengths) * width, block_size, kv_heads, head_dim, device="cuda")
        tables = torch.randperm(len(lengths) * width, device="cuda").int().view(len(lengths), width)
        for row, length in enumerate(lengths):
            at = torch.arange(length, width * block_size, device="cuda")
            cache[:, tables[row, at // block_size].long(), at % block_size] = float("nan")
        key, value = cache.to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")
        query = 3 * torch.randn(sum(counts), kv_heads * group, head_dim, device="cuda", dtype=torch.bfloat16)
        operands = query, key, value, tables, None, starts, torch.tensor(lengths, dtype=torch.int32, device="cuda")
        alone = prefill_attention(*operands, scale=head_dim**-0.5)
        assert not alone.isnan().any()
        for waves in (1, 2, 6):
            out = prefill_attention(*operands, scale=head_dim**-0.5, workspace=workspace, waves=waves)
            torch.testing.assert_close(out, alone, rtol=0.016, atol=0.016)
            shared += int(not torch.equal(out, alone))
    assert shared >= 20, "hardly any row was split: its results are rounded otherwise than those of one program"
    assert not any(counts.any() for *_, counts in workspace._buffers)


@pytest.mark.gpu1
def test_queries_of_any_size_meet_a_quantized_cache() -> None:
    """See the check of this name in `test_prefill`."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.prefill_hopper import prefill_attention

    case = Case([(300, 600)], 1, 4, 64, before=0, after=0, fp8=True)
    drawn = Inputs(*(None if each is None else each.cuda() for each in inputs_of(case)))  # type: ignore[arg-type]
    for factor, scale in ((1e30, 1e-30), (1e-30, 1e30), (1e-30, 1e-30), (1e-39, 1.0), (0.0, 1.0)):
        inputs = drawn._replace(query=drawn.query * factor)
        arguments = {"scale": scale, "kv_scales": options(case, inputs)["kv_scales"]}
        wanted = reference.prefill_attention(*inputs.operands, **arguments)
        torch.testing.assert_close(prefill_attention(*inputs.operands, **arguments), wanted, rtol=0.02, atol=0.02)


@pytest.mark.gpu1
def test_which_kernel_takes_which_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.kernels.attention import dispatch, prefill, prefill_hopper

    taken = []
    monkeypatch.setattr(prefill, "prefill_attention", lambda *_, **__: taken.append("prefill"))
    monkeypatch.setattr(prefill_hopper, "prefill_attention", lambda *_, **__: taken.append("warp-specialized"))
    for case, mean, window in itertools.product((CASES[1], Case(ROWS, 1, 4, 80), Case(ROWS, 1, 4, 64, 5)), (100, 600), (None, 9)):
        inputs = Inputs(*(None if each is None else each.cuda() for each in inputs_of(case)))  # type: ignore[arg-type]
        dispatch.prefill_attention(*inputs.operands, scale=1.0, window=window, mean_length=mean)
        fits = has_gluon() and mean == 600 and window is None and case.head_dim != 80 and case.block_size != 5
        assert taken.pop() == ("warp-specialized" if fits else "prefill")

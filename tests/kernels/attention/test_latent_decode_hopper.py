# SPDX-License-Identifier: Apache-2.0
"""Warp-specialized decode attention over latents: compiled for Hopper, and on a GPU against the reference. Gluon has no
interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.kernels.attention.heuristics import ROW_CLASSES, LatentTiling, select_latent_bands
from phalanx.kernels.capabilities import HOPPER_SHARED_MEMORY, GpuCapabilities, has_gluon, simulated
from tests.support.kernels_compiled import compiled_as, gluon_compiles, ordered, spilled
from tests.support.kernels_latent import SIGNATURE, Case, Inputs, inputs_of

pytestmark = [
    pytest.mark.usefixtures("forked_python"),
    pytest.mark.skipif(not gluon_compiles(), reason="the kernel is for another Triton"),
]

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "block_size"), [("bf16", 16), ("fp16", 16), ("bf16", 64), ("fp16", 64), ("bf16", 32)])
@pytest.mark.parametrize("lse", [False, True])
def test_compiles(dtype: str, block_size: int, lse: bool) -> None:
    """Scores begin when half of a tile is there, the mixer is told its factors before the exponentials and its weights before the
    scorer's own GEMM, and nothing spills."""
    compiled = compiled_kernel(dtype, block_size, lse)
    steps = ordered(compiled.asm["ptx"])
    assert spilled(compiled) == 0
    assert compiled.metadata.shared <= HOPPER_SHARED_MEMORY
    assert steps.count("?" + "W" * 16 + "?" + "W" * 20 + "0e?ae") == 1, steps  # scores, the factors' exponentials, the weights'
    assert steps.count("?" + "W" * 4 + "0aa") == 1, steps  # the mixer awaits the weights, and frees them and the tile
    assert steps.count("a" + "W" * 4 + "0a") == 1, steps  # the scorer's own half of the output


def compiled_kernel(dtype: str, block_size: int, lse: bool) -> Any:
    from phalanx.kernels.attention import latent_decode_hopper

    kernel = latent_decode_hopper._latent_decode_bands
    descriptor = f"tensordesc<{dtype}[{min(block_size, 64)}, 64],{latent_decode_hopper.line_layout()!r}>"
    kinds = {
        name: descriptor if name.endswith("desc") else SIGNATURE.get(name, f"*{dtype}") for name in kernel.arg_names
    }  # fmt: skip
    aligned = [name for name, kind in kinds.items() if kind[0] == "*" and name != "tables"]
    constants = {"BLOCK_SIZE": block_size, **({} if lse else {"lse": None})}
    return compiled_as(kernel, kinds, constants, 90, aligned=aligned, num_warps=4)


def test_splits_occupy_the_gpu() -> None:
    for rows in (1, 2, 8, 64, 132, 512, ROW_CLASSES[-1]):
        for heads, bands in ((33, 1), (64, 1), (100, 2), (128, 2)):
            tiling = select_latent_bands(rows, heads, 132)
            assert tiling[0] == tiling.tile == tiling.chunk == 64
            assert tiling.apart
            assert (rows + tiling.extra_splits) * bands >= 132 or tiling.extra_splits >= 132 // (2 * bands)
            assert tiling.extra_splits >= 1


@pytest.mark.parametrize(("heads", "block_size", "dtype", "rows", "fits"), [
    (64, 16, torch.bfloat16, 3, True), (128, 64, torch.float16, 1, True), (33, 256, torch.bfloat16, 64, True),
    (32, 16, torch.bfloat16, 3, False), (64, 16, torch.float8_e4m3fn, 3, False), (64, 48, torch.bfloat16, 3, False),
    (64, 16, torch.bfloat16, ROW_CLASSES[-1] + 1, False), (64, 16, torch.float32, 1, False),
])  # fmt: skip
def test_which_kernel_takes_which_rows(
    monkeypatch: pytest.MonkeyPatch, heads: int, block_size: int, dtype: torch.dtype, rows: int, fits: bool
) -> None:
    from phalanx.kernels.attention import dispatch, latent_decode, latent_decode_hopper

    fits &= has_gluon()
    taken: list[tuple[str, LatentTiling]] = []
    for module, name in ((latent_decode, "any"), (latent_decode_hopper, "warp-specialized")):
        monkeypatch.setattr(
            module, "latent_decode_attention", lambda *_, name=name, tiling, **__: taken.append((name, tiling))
        )  # fmt: skip
    query = torch.empty(rows, heads, 576, dtype=torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype)
    cache = torch.empty(1, block_size, 1, 576).to(dtype)
    lengths = torch.zeros(rows, dtype=torch.int32)
    for sm in (90, 80, 100):
        with simulated(GpuCapabilities(sm, 132, HOPPER_SHARED_MEMORY)):
            workspace = dispatch.SplitKvWorkspace(CPU)
            dispatch.latent_decode_attention(
                query[..., :512], query[..., 512:], cache, torch.zeros(rows, 1, dtype=torch.int32), None, lengths, scale=1.0,
                workspace=workspace,
            )  # fmt: skip
        name, tiling = taken.pop()
        assert name == ("warp-specialized" if fits and sm == 90 else "any")
        assert (tiling == select_latent_bands(rows, heads, 132)) == (fits and sm == 90)


LENGTHS = [0, 1, 63, 64, 65, 1500, 33000]
CASES = [
    Case(LENGTHS, 128, 512, 64), Case(LENGTHS, 64, 512, 64, 64), Case(LENGTHS, 33, 512, 64, 32, dtype=torch.float16),
    Case(LENGTHS, 100, 512, 64, 128, dtype=torch.float16, indirect=False), Case([1024], 64, 512, 64),
    Case([200, 17, 0, 333] * 80 + [5000], 64, 512, 64, lse=True), Case([97] * 600, 128, 512, 64, indirect=False),
    Case(LENGTHS, 128, 512, 64, lse=True), Case([0, 40], 64, 512, 64, lse=True),
]  # fmt: skip


@pytest.mark.gpu1
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.heads} heads {len(case.lengths)} rows of {max(case.lengths)}{', lse' * case.lse}"
)
@pytest.mark.parametrize("early", [False, True])
def test_replayed_on_a_gpu_with_other_lengths(case: Case, early: bool) -> None:
    """Captured with lengths of 1, replayed with those of the case; each time the same bits. Memory that no row attends to is NaN.
    Splits are planned by the call, or (early) before it, and read before the kernel in front ends."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace
    from phalanx.kernels.attention.latent_decode_hopper import latent_decode_attention
    from phalanx.kernels.attention.split_kv import plan

    inputs = Inputs(*(None if each is None else each.cuda() for each in inputs_of(case)))  # type: ignore[arg-type]
    workspace, lengths = SplitKvWorkspace(torch.device("cuda")), torch.ones_like(inputs.lengths)
    replayed, out = inputs._replace(lengths=lengths), inputs.query.new_zeros(inputs.query.shape)
    tiling = select_latent_bands(len(lengths), case.heads, workspace.num_sms)
    lse, wanted_lse = (torch.zeros(inputs.query.shape[:2], device="cuda") if case.lse else None for _ in range(2))

    def attend() -> None:
        splits = plan(lengths, inputs.rows, tiling.split, window=None, block_size=case.block_size) if early else None
        out.fill_(float("nan"))  # a launch without programmatic dependence
        latent_decode_attention(
            *replayed, scale=0.05, workspace=workspace, tiling=tiling, splits=splits, early_lengths=early, out=out, lse=lse
        )  # fmt: skip

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    lengths.copy_(inputs.lengths)
    wanted, outputs = reference.latent_decode_attention(*inputs, scale=0.05, lse=wanted_lse), []
    for _ in range(20):
        graph.replay()
        outputs.append(out.clone())
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    step = 2 * torch.finfo(case.dtype).eps
    torch.testing.assert_close(outputs[0], wanted, rtol=step, atol=step)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu1
@pytest.mark.parametrize("extra_splits", [1, 5, 60, 400])
@pytest.mark.parametrize("chunk", [64, 128])
def test_any_number_of_splits(extra_splits: int, chunk: int) -> None:
    """One more than rows; so many that some have no token; queries that are copied, since 16 bytes of them are not aligned."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace
    from phalanx.kernels.attention.latent_decode_hopper import latent_decode_attention

    case = Case([320, 0, 1, 129, 2000], 64, 512, 64)
    inputs = Inputs(*(None if each is None else each.cuda() for each in inputs_of(case)))  # type: ignore[arg-type]
    apart = torch.nn.functional.pad(inputs.rotated, (0, 3))[..., :64]
    assert apart.stride(1) % 8
    tiling = select_latent_bands(5, 64, 132)._replace(extra_splits=extra_splits, chunk=chunk)
    wanted = reference.latent_decode_attention(*inputs, scale=0.05)
    for rotated in (inputs.rotated, apart):
        out = latent_decode_attention(
            *inputs._replace(rotated=rotated), scale=0.05, workspace=SplitKvWorkspace(torch.device("cuda")), tiling=tiling
        )
        torch.testing.assert_close(out, wanted, rtol=0.016, atol=0.016)

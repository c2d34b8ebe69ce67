# SPDX-License-Identifier: Apache-2.0
"""The kernels at both ends of a forward: in Triton's interpreter against plain torch, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpreted

pytest.importorskip("triton")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_embed() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import embedding_rmsnorm

    last_tokens, slots = torch.tensor([9, 7, 8, 50]), torch.tensor([2, 0, 1, 3, 2])
    ids = torch.tensor([3, -1, 12, -1, 0])
    for dtype, hidden, begin in itertools.product(DTYPES.values(), (8, 72), (0, 4)):
        table = torch.randn(10, hidden).to(dtype)
        for last in (None, (last_tokens, slots)):
            found = embedding_rmsnorm.embed(ids, table, begin, last)
            for got, wanted in zip(found, reference.embed(ids, table, begin, last), strict=True):
                assert torch.equal(got, wanted)


def check_embed_norm() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import embedding_rmsnorm
    from phalanx.kernels.ops.residual_rms_norm import residual_rms_norm

    ids, last = torch.tensor([3, -1, 1]), (torch.tensor([9, 7, 8]), torch.tensor([2, 0, 1]))
    scale = torch.tensor(0.01)
    for dtype, hidden in itertools.product(DTYPES.values(), (16, 80)):
        table, weight = torch.randn(10, hidden).to(dtype), torch.randn(hidden).to(dtype)
        wide = table[[3, 9, 1]]
        for quant, given in (("none", None), ("fp8", None), ("fp8", scale), ("nvfp4", scale)):
            asked: dict[str, Any] = {"quant": quant, "scale": given}
            got = embedding_rmsnorm.embed_norm(ids, table, last, weight, 1e-5, **asked)
            assert torch.equal(got[-1], wide)
            # To the bit what the kernel gives that adds a residual.
            for one, other in zip(got, residual_rms_norm(torch.zeros_like(wide), wide, weight, 1e-5, **asked), strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        plain = reference.embed_norm(ids, table, last, weight, 1e-5)
        step = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(embedding_rmsnorm.embed_norm(ids, table, last, weight, 1e-5)[0], plain[0], rtol=step, atol=1e-6)


def check_rms_norm() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import embedding_rmsnorm

    for dtype in DTYPES.values():
        heads, weight = torch.randn(3, 7, 16).to(dtype), torch.randn(16).to(dtype)
        for x in (heads[:, 1:5], heads[:, 5], heads[0], heads[:0, 0]):
            assert embedding_rmsnorm.rows_of(x) != (0, 0)
            step = 2 * torch.finfo(dtype).eps
            got = embedding_rmsnorm.rms_norm(x, weight, 1e-5)
            assert got.is_contiguous()
            torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-5), rtol=step, atol=1e-6)
    for odd in (heads.transpose(0, 1), heads[..., ::2], torch.randn(4, 24)[:, :16], torch.randn(16)):
        assert embedding_rmsnorm.rows_of(odd) == (0, 0)


def check_turns() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops.rope_cos_sin import turns

    positions, rates = torch.tensor([0, 1, 77, 131071]), 1e4 ** (-torch.arange(12) / 12)
    for factor in (1.0, 1.3):
        for got, wanted in zip(turns(positions, rates, factor), reference.turns(positions, rates, factor), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def check_likeliest() -> None:
    """Ties, NaN, infinities and both zeros; whole vocabularies, and such that ranks share, the last of them with padding."""
    from phalanx.kernels.sampling import gumbel_argmax, sampling

    usual = gumbel_argmax.PROGRAMS
    width = 5000
    logits = torch.randn(9, width).round(decimals=1)
    logits[1] = -math.inf
    logits[2, [4100, 4500]] = math.nan
    logits[3, 4999] = math.inf
    logits[4] = -1.0
    logits[4, 70:90] = -0.0
    logits[4, 80] = 0.0
    logits[5] = 2.0
    for dtype, programs in itertools.product(DTYPES.values(), (1, 512)):
        gumbel_argmax.PROGRAMS = programs
        rows = logits.to(dtype)
        wanted = rows.argmax(-1)
        assert wanted.tolist()[1:6] == [0, 4100, 4999, 70, 0]
        tokens = torch.empty(9, dtype=torch.int64)
        for cut in ((0, 5000), (0, 2500, 5000), (0, 2112, 4224, 5000, 5000)):
            parts = []
            for begin, end in itertools.pairwise(cut):
                share = torch.full((9, 2500 if len(cut) < 4 else 2112), math.inf, dtype=dtype)
                share = rows if len(cut) == 2 else share
                share[:, : end - begin] = rows[:, begin:end]
                parts.append(gumbel_argmax.keys(share, begin, end - begin))
                plain = sampling.packed_argmax_keys(share, begin, end - begin)
                assert torch.equal(parts[-1].amax(1), plain.amax(1))
            tokens.fill_(-5)
            gumbel_argmax.settle(torch.stack(parts), tokens, None)
            assert tokens.tolist() == wanted.tolist()
    gumbel_argmax.PROGRAMS = usual
    slots, kv_slots = torch.tensor([3, 0, 5, 1, 0, 0, 0, 0, 0]), torch.tensor([8, 1, 0, 2, -1, -1, -1, -1, -1])
    for settle in (gumbel_argmax.settle, sampling.decode_keys):
        last_tokens = torch.full((7,), -7)
        settle(torch.stack(parts), tokens, (last_tokens, slots, kv_slots))
        assert last_tokens.tolist() == [0, 4999, -7, int(wanted[0]), -7, 4100, -7]


def check_race() -> None:
    """Draws over ranks are the draws from the whole vocabulary; a row of temperature 0 takes its likeliest."""
    from phalanx.kernels.sampling import gumbel_argmax, sampling

    logits = torch.randn(40, 3000) * 2
    logits[3] = -math.inf
    logits[4, 7:] = -math.inf
    logits[5, 9], logits[6, 11] = math.inf, math.nan
    temperature = torch.rand(40) + 0.3
    temperature[[0, 20]], temperature[21] = 0.0, 1e-30
    noise = torch.randint(-(2**31), 2**31 - 1, (2, 40)).to(torch.int32)
    for dtype in DTYPES.values():
        rows, tokens = logits.to(dtype), torch.empty(40, dtype=torch.int64)
        heat = torch.where(temperature > 0, temperature, 1.0)
        wanted = reference.draw(reference.scale_logits(rows.float(), heat), noise)
        wanted = torch.where(temperature > 0, wanted, rows.argmax(-1))
        for cut in ((0, 3000), (0, 1024, 2048, 3000)):
            spans = list(itertools.pairwise(cut))
            shares = [torch.nn.functional.pad(rows[:, a:b], (0, spans[0][1] - b + a), value=math.inf) for a, b in spans]
            for room in (sampling, gumbel_argmax):
                tops = torch.stack([room.keys(share, a, b - a) for share, (a, b) in zip(shares, spans, strict=True)])
                found = [room.race(share, a, b - a, tops, temperature, noise) for share, (a, b) in zip(shares, spans, strict=True)]
                room.settle(torch.stack(found), tokens, None)
                # exp and log may differ in their last bit, and so, once in a long while, may who wins.
                assert (tokens != wanted).sum() <= (0 if room is sampling and not rows.is_cuda else 1)
        assert torch.equal(sampling.sample(rows, temperature, noise), tokens)


def check_store_words() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops.index_put import index_put_

    places = torch.full((300,), -1)
    places[[3, 255, 256, 299]] = torch.tensor([70, 0, 5, 69])
    found = []
    for store in (index_put_, reference.index_put_):
        table = torch.full((71,), -7, dtype=torch.int32)
        store(table, places, torch.arange(300))
        found.append(table.tolist())
    assert found[0] == found[1]
    assert [(at, word) for at, word in enumerate(found[0]) if word != -7] == [(0, 255), (5, 256), (69, 299), (70, 3)]


CHECKS = [check_embed, check_embed_norm, check_rms_norm, check_turns, check_likeliest, check_race, check_store_words]


def test_in_the_interpreter() -> None:
    assert interpreted("tests.kernels.ops.test_gather_norm_angles_and_likeliest").split() == [
        check.__name__ for check in CHECKS
    ]


@pytest.mark.gpu1
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("check", CHECKS)
def test_on_gpu(check: Callable[[], None]) -> None:
    with torch.device("cuda"):
        check()


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    "kernel", ["embed", "embed_norm", "embed_norm_fp8", "rms_norm", "turns", "keys", "race", "settle", "store_words"]
)
def test_compiles(kernel: str, arch: int) -> None:
    """Down to machine code. The launch's own choices (PDL from Hopper on) compile with it."""
    from phalanx.kernels.ops import embedding_rmsnorm, index_put, rope_cos_sin
    from phalanx.kernels.sampling import gumbel_argmax

    words, ids = "*i32", "*i64"
    known: dict[str, Any] = {"ids": ids, "last_tokens": ids, "slots": ids, "table": words}
    constants: dict[str, Any]
    if kernel == "embed":
        function = embedding_rmsnorm._embed
        signature = known | {"found": words, "zeros": words, "begin": "i32", "held": "i32", "vectors": "i32"}
        constants = {"LAST": True, "BLOCK": 512}
    elif kernel in ("embed_norm", "embed_norm_fp8", "rms_norm"):
        fp8 = kernel.endswith("fp8")
        function = embedding_rmsnorm._embed_norm
        sinks = (words, words, "*i64" if fp8 else words, "*fp32" if fp8 else words)
        signature = known | {
            "weight": words, "sinks": sinks, "scale": "*fp32" if fp8 else words, "begin": "i32", "held": "i32", "inner": "i32",
            "outer": "i32", "hidden": "i32", "eps": "fp32",
        }  # fmt: skip
        ids_too = kernel != "rms_norm"
        constants = {"IDS": ids_too, "LAST": ids_too, "KIND": "bf16", "QUANT": "fp8_token" if fp8 else "none", "BLOCK": 512}
    elif kernel == "turns":
        function = rope_cos_sin._turns
        signature = {
            "positions": ids,
            "wavelengths": "*fp32",
            "cosines": "*fp32",
            "sines": "*fp32",
            "half": "i32",
            "factor": "fp32",
        }
        constants = {"BLOCK": 64}
    elif kernel == "keys":
        function = gumbel_argmax._keys
        signature = {"logits": "*bf16", "keys": ids} | dict.fromkeys(("stride", "held", "begin", "parts", "span"), "i32")
        constants = {"BLOCK": gumbel_argmax.BLOCK}
    elif kernel == "race":
        function = gumbel_argmax._race
        signature = {"logits": "*bf16", "keys": ids, "tops": ids, "temperature": "*fp32", "noise": "*i32"}
        signature |= dict.fromkeys(("stride", "held", "begin", "rows", "parts", "span"), "i32")
        constants = {"floors": None, "RANKS": 4, "PARTS": 16, "BLOCK": gumbel_argmax.BLOCK}
    elif kernel == "store_words":
        function = index_put._store_words
        signature = {"table": "*i32", "places": ids, "values": ids, "count": "i32"}
        constants = {"BLOCK": index_put.BLOCK}
    else:
        function = gumbel_argmax._settle
        signature = dict.fromkeys(("keys", "tokens", "last_tokens", "slots", "kv_slots"), ids)
        signature |= dict.fromkeys(("rows", "parts"), "i32")
        constants = {"RANKS": 4, "REMEMBER": True, "BLOCK": 64}
    sm = compiled(function, signature, constants, arch).asm["ptx"]
    assert "cos.approx" not in sm
    assert "lg2.approx" not in sm


if __name__ == "__main__":
    torch.manual_seed(0)
    for check in CHECKS:
        check()
        print(check.__name__)

# SPDX-License-Identifier: Apache-2.0
"""Argmax and Gumbel-max: in Triton's interpreter against plain torch, and compiled for three generations of GPUs.

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
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_argmax() -> None:
    """Ties, both zeros, NaN and infinities, which give no token; vocabularies on one rank, and split over ranks, the last of them
    with padding."""
    from phalanx.kernels.reference import NOT_FINITE
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
    for dtype, programs in itertools.product(DTYPES, (1, 512)):
        gumbel_argmax.PROGRAMS = programs
        rows = logits.to(dtype)
        wanted = rows.argmax(-1)
        assert wanted.tolist()[1:6] == [0, 4100, 4999, 70, 0]
        wanted[1:4] = NOT_FINITE
        tokens = torch.empty(9, dtype=torch.int64)
        for cut in ((0, 5000), (0, 2500, 5000), (0, 2112, 4224, 5000, 5000)):
            parts = []
            for begin, end in itertools.pairwise(cut):
                share = torch.full((9, 2500 if len(cut) < 4 else 2112), math.inf, dtype=dtype)
                share = rows if len(cut) == 2 else share
                share[:, : end - begin] = rows[:, begin:end]
                parts.append(gumbel_argmax.packed_argmax_keys(share, begin, end - begin))
                plain = sampling.packed_argmax_keys(share, begin, end - begin)
                assert torch.equal(parts[-1].amax(1), plain.amax(1))
            tokens.fill_(-5)
            gumbel_argmax.decode_keys(torch.stack(parts), tokens, None)
            assert tokens.tolist() == wanted.tolist()
    gumbel_argmax.PROGRAMS = usual
    slots, kv_slots = torch.tensor([3, 0, 5, 1, 0, 0, 0, 0, 0]), torch.tensor([8, 1, 0, 2, -1, -1, -1, -1, -1])
    for decode_keys in (gumbel_argmax.decode_keys, sampling.decode_keys):
        last_tokens = torch.full((7,), -7)
        decode_keys(torch.stack(parts), tokens, (last_tokens, slots, kv_slots))
        assert last_tokens.tolist() == [NOT_FINITE, NOT_FINITE, -7, int(wanted[0]), -7, NOT_FINITE, -7]


def check_gumbel_max() -> None:
    """Samples over ranks are the samples from the entire vocabulary; a row of temperature 0 takes its argmax. A row whose highest
    logit is NaN or infinite has no token, with a temperature and without."""
    from phalanx.kernels import reference
    from phalanx.kernels.sampling import gumbel_argmax, sampling

    logits = torch.randn(40, 3000) * 2
    logits[3] = -math.inf
    logits[4, 7:] = -math.inf
    logits[5, 9], logits[6, 11] = math.inf, math.nan
    temperature = torch.rand(40) + 0.3
    logits[20, 7], logits[22, 8] = math.inf, math.nan
    temperature[[0, 20, 22]], temperature[21] = 0.0, 1e-30
    noise = torch.randint(-(2**31), 2**31 - 1, (2, 40)).to(torch.int32)
    for dtype in DTYPES:
        rows, tokens = logits.to(dtype), torch.empty(40, dtype=torch.int64)
        divisor = torch.where(temperature > 0, temperature, 1.0)
        wanted = reference.draw(reference.scale_logits(rows.float(), divisor), noise)
        wanted = torch.where(temperature > 0, wanted, rows.argmax(-1))
        wanted[[3, 5, 6, 20, 22]] = reference.NOT_FINITE
        for cut in ((0, 3000), (0, 1024, 2048, 3000)):
            spans = list(itertools.pairwise(cut))
            shares = [torch.nn.functional.pad(rows[:, a:b], (0, spans[0][1] - b + a), value=math.inf) for a, b in spans]
            for ops in (sampling, gumbel_argmax):
                parts = [(share, a, b - a) for share, (a, b) in zip(shares, spans, strict=True)]
                max_keys = torch.stack([ops.packed_argmax_keys(*part) for part in parts])
                keys = [ops.gumbel_max(*part, max_keys, temperature, noise) for part in parts]
                ops.decode_keys(torch.stack(keys), tokens, None)
                # exp and log may differ in their last bit, and so, once in a long while, may who wins.
                assert (tokens != wanted).sum() <= (0 if ops is sampling and not rows.is_cuda else 1)
        assert torch.equal(sampling.sample(rows, temperature, noise), tokens)


CHECKS = [check_argmax, check_gumbel_max]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.gpu1
@pytest.mark.parametrize("check", CHECKS)
def test_on_gpu(check: Callable[[], None]) -> None:
    with torch.device("cuda"):
        check()


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("kernel", ["packed_argmax_keys", "gumbel_max", "decode_keys"])
def test_compiles(kernel: str, arch: int) -> None:
    """Down to machine code, with an exact logarithm. The launch's own choices (PDL from Hopper on) compile with it."""
    from phalanx.kernels.sampling import gumbel_argmax

    ids = "*i64"
    constants: dict[str, Any]
    if kernel == "packed_argmax_keys":
        function = gumbel_argmax._packed_argmax_keys
        signature = {"logits": "*bf16", "keys": ids} | dict.fromkeys(("stride", "width", "begin", "parts", "span"), "i32")
        constants = {"BLOCK": gumbel_argmax.BLOCK}
    elif kernel == "gumbel_max":
        function = gumbel_argmax._gumbel_max
        signature = {"logits": "*bf16", "keys": ids, "max_keys": ids, "temperature": "*fp32", "noise": "*i32"}
        signature |= dict.fromkeys(("stride", "width", "begin", "rows", "parts", "span"), "i32")
        constants = {"thresholds": None, "RANKS": 4, "PARTS": 16, "BLOCK": gumbel_argmax.BLOCK}
    else:
        function = gumbel_argmax._decode_keys
        signature = dict.fromkeys(("keys", "tokens", "last_tokens", "slots", "kv_slots"), ids)
        signature |= dict.fromkeys(("rows", "parts"), "i32")
        constants = {"RANKS": 4, "REMEMBER": True, "BLOCK": 64}
    assert "lg2.approx" not in compiled(function, signature, constants, arch).asm["ptx"]

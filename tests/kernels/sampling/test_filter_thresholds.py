# SPDX-License-Identifier: Apache-2.0
"""Filters as thresholds, without a sort: in Triton's interpreter against what sorting keeps, and compiled for three generations of
GPUs.

Kept sets are equal, but where an edge of top-p is too close to call in fp32: a token may be kept by one and not by the other only
if the mass of what is likelier than it is, in fp64, within `TOO_CLOSE` of p.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from phalanx.kernels import reference
from phalanx.kernels.sampling import sampling
from tests.support.kernels_compiled import compiled, compiled_as
from tests.support.kernels_interpreted import interpreted

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

TOO_CLOSE = 5e-6


def between(first: float, last: float, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """torch.linspace, on the default device: torch 2.11's own stays on the CPU."""
    return torch.linspace(first, last, count, dtype=dtype, device=torch.get_default_device())


def thresholds_of(logits: Tensor, temperature: Tensor, filters: Tensor) -> Tensor:
    from phalanx.kernels.sampling import filter_thresholds, gumbel_argmax

    max_keys = gumbel_argmax.packed_argmax_keys(logits, 0, logits.shape[1]).unsqueeze(0)
    return filter_thresholds.filter_thresholds(sampling.contiguous_fp32(logits), max_keys, temperature, filters)


def check(logits: Tensor, temperature: Tensor, filters: Tensor) -> int:
    """The kernel's thresholds keep what sorting keeps; how many rows differ by what is too close."""
    threshold, width = thresholds_of(logits, temperature, filters), logits.shape[1]
    assert not threshold.isnan().any()
    sampled = (temperature > 0).nonzero()[:, 0]
    assert (threshold[temperature == 0] == -math.inf).all()
    logits, temperature, filters, threshold = logits[sampled], temperature[sampled], filters[:, sampled], threshold[sampled]
    scaled = reference.scale_logits(logits.float(), temperature)
    top_k, top_p, min_p = filters[0].long(), filters[1].where(filters[1] < 1.0, 2.0), filters[2].float()
    wanted = reference.keep_filtered(scaled, width, top_k, top_p, min_p)
    filtered = torch.where(scaled >= threshold.unsqueeze(1), scaled, -math.inf)
    odd = (filtered != wanted).any(1).nonzero()[:, 0].tolist()
    for row in odd:
        kept = reference.keep_filtered(scaled[row : row + 1], width, top_k[row : row + 1], None, None)[0].double()
        mass = kept.exp()
        for value in kept[filtered[row] != wanted[row]].unique():
            before = mass[kept > value].sum() / mass.sum()
            assert abs(before - top_p[row]) <= TOO_CLOSE, (row, filters[:, row], temperature[row], before)
    return len(odd)


def rows_of(*options: tuple[float, float, float, float]) -> tuple[Tensor, Tensor]:
    """(temperature, filters) of rows that ask (temperature, k, p, m)."""
    table = torch.tensor(options, dtype=torch.float64)
    return table[:, 0].float(), table[:, 1:].t().contiguous()


def check_filters() -> None:
    """Flat and peaked rows of all kinds of logits, with every kind of filter."""
    width = 201
    options = [
        (0.8, width, 0.95, 0), (1.0, 50, 1, 0), (1.0, 1, 1, 0), (1.0, 2 * width, 0.5, 0), (0.7, width, 1.0, 0.05),
        (1.3, 40, 0.9, 0.02), (1.0, width, 1e-300, 0), (1.0, width, 0.999999, 0), (0.0, 3, 0.5, 0.5), (100.0, 7, 0.5, 0),
        (1e-30, 7, 0.5, 0.1), (1.0, width, 2.0, 0), (1.0, width - 1, 0.3, 1.0), (5.0, 300, 0.999, 1e-5),
    ]  # fmt: skip
    temperature, filters = rows_of(*options)
    apart = 0
    fp32, bf16 = torch.float32, torch.bfloat16
    for spread, dtype, digits in ((0.01, fp32, 9), (1.0, bf16, 9), (6.0, fp32, 9), (6.0, bf16, 9), (2.0, fp32, 1)):
        logits = torch.randn(len(options), width) * spread
        logits[:, 100:103] += 2 * spread
        apart += check(logits.round(decimals=digits).to(dtype), temperature, filters)
    assert apart <= 6


def check_edges() -> None:
    """Ties, NaN, infinities, equal masses, depths that division by a high temperature makes equal, and values that are no floats
    of full precision; with room to put few or many aside."""
    from phalanx.kernels.sampling import filter_thresholds

    width, inf = 70, math.inf
    logits = torch.randn(13, width)
    logits[0], logits[1], logits[2, 5], logits[3, [3, 9]] = -inf, 2.0, math.nan, inf
    logits[4, 8:] = -inf
    logits[5, ::2], logits[5, 1::2] = 3.4e38, -3.4e38
    logits[6] = torch.arange(width) * -1e-45
    logits[7], logits[7, :4] = -200.0, 1.0
    logits[8] = torch.arange(width) * -(2.0**-23)
    logits[9] = -1.0 - torch.arange(width) // 3 * 2.0**-23
    logits[9, 33] = 0.0
    logits[10], logits[10, 10:20] = -1.0, 0.0
    logits[11, :35], logits[11, 35:] = 0.0, -math.log(2.0)
    logits[12], logits[12, 60] = -3.4e38, 0.0
    options = [
        (5, 1, 0), (11, 1, 0), (69, 0.5, 0), (70, 0.5, 0), (70, 2 / 3, 0), (70, 0.25, 0), (70, 1e-9, 0), (70, 1, 1), (1, 0.9, 0.1),
    ]  # fmt: skip
    for temperature, shift, aside in ((1e-30, 0, 1), (1.0, 1, 1), (1.0, 5, 16), (3.0, 0, 1), (3.0, 2, 16), (100.0, 0, 1)):
        with mock.patch.object(filter_thresholds, "CAPACITY", aside):
            check(logits, *rows_of(*[(temperature, *options[(row + shift) % len(options)]) for row in range(13)]))


def check_near_edges() -> None:
    """p hardly more and hardly less than what lies above a token; and k in the midst of tokens that division makes equal, all of
    which then count for p."""
    logits, temperature = torch.randn(12, 301) * 4, between(0.5, 2.0, 12)
    order, _ = reference.scale_logits(logits, temperature).double().sort(descending=True)
    mass = order.exp() / order.exp().sum(1, keepdim=True)
    edges = (mass.cumsum(1) - mass)[torch.arange(12), torch.arange(12) * 3 + 1]
    for off in (-1.2 * TOO_CLOSE, 1.2 * TOO_CLOSE):
        filters = torch.stack([torch.full((12,), 301.0), edges + off, torch.zeros(12)]).double()
        assert check(logits, temperature, filters) == 0
        threshold = thresholds_of(logits, temperature, filters).double()
        kept = (order >= threshold[:, None]).sum(1)
        assert kept.tolist() == [row * 3 + 1 + (off > 0) for row in range(12)]
    alike = (-1.9 - torch.arange(70) * 2.0**-23).where(torch.arange(70) > 0, 0.0).expand(16, 70).contiguous()
    assert len(reference.scale_logits(alike[:1], torch.full((1,), 1.5)).unique()) < 60
    assert check(alike, *rows_of(*[(1.5, k, 0.5, 0) for k in range(20, 36)])) == 0


def check_any() -> None:
    """Any few floats and filters; with room to put all aside, or so little that a lane often has more than its room."""
    from phalanx.kernels.sampling import filter_thresholds

    finite = st.floats(-(2.0**127), 2.0**127, width=32)
    near = st.integers(-40, 0).map(lambda steps: 1.0 + steps * 2.0**-22)
    usual = st.floats(-30, 30, width=32)
    logit = st.one_of(usual, usual, near, finite, st.just(-math.inf), st.sampled_from([0.0, -0.0, 1.0, -5.0, 1e-40]))

    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @hypothesis.given(
        st.lists(logit, min_size=1, max_size=40),
        st.one_of(st.floats(0.1, 2.0), st.floats(1e-30, 100.0)), st.sampled_from([1, 1, 16]),
        st.integers(1, 45), st.one_of(st.floats(1e-12, 1.0), st.just(2.0)), st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32)),
    )  # fmt: skip
    def keeps(row: list[float], temperature: float, aside: int, k: int, p: float, m: float) -> None:
        with mock.patch.object(filter_thresholds, "CAPACITY", aside):
            check(torch.tensor([row]), *rows_of((temperature, k, p, m)))

    keeps()


def check_vocabulary() -> None:
    """Cut as on a GPU: some are put aside of many, and of so many in one lane that it has no room."""
    from phalanx.kernels.sampling import filter_thresholds

    width = 20_001
    logits = torch.randn(4, width) * 2
    logits[:, :40] += between(14, 4, 40)
    logits[3], logits[3, :8] = -9.0, 1.0
    logits[3, 8192:8200], logits[3, 16384:16392] = between(0, 1, 8), between(-1, 0, 8)
    options = rows_of((0.8, width, 0.95, 0), (0.8, 50, 1, 0), (1.0, 50, 0.95, 0.05), (1.0, 20, 0.9, 0))
    with mock.patch.multiple(filter_thresholds, LANES=1024, EACH=4):
        check(logits.bfloat16(), *options)
        check(logits, *options)


def check_draws() -> None:
    """Filtered draws are those of plain torch: the same noise runs among what is kept."""
    from phalanx.kernels.sampling import filter_thresholds, gumbel_argmax

    logits = torch.randn(20, 500)
    temperature = torch.rand(20) + 0.3
    temperature[[0, 10]] = 0.0
    k = torch.where(torch.arange(20) % 3 > 0, 500, torch.arange(20) + 1)
    filters = torch.stack([k.double(), between(0.2, 1.1, 20, dtype=torch.float64), torch.rand(20).double() * 0.1])
    noise = torch.randint(-(2**31), 2**31 - 1, (2, 20)).to(torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        rows = logits.to(dtype)
        tokens = torch.empty(20, dtype=torch.int64)
        max_keys = gumbel_argmax.packed_argmax_keys(rows, 0, 500).unsqueeze(0)
        thresholds = filter_thresholds.filter_thresholds(sampling.contiguous_fp32(rows), max_keys, temperature, filters)
        keys = gumbel_argmax.gumbel_max(rows, 0, 500, max_keys, temperature, noise, thresholds)
        gumbel_argmax.decode_keys(keys.unsqueeze(0), tokens, None)
        divisor = torch.where(temperature > 0, temperature, 1.0)
        scaled = reference.scale_logits(rows.float(), divisor)
        top_p = filters[1].where(filters[1] < 1.0, 2.0)
        wanted = reference.draw(reference.keep_filtered(scaled, 500, filters[0].long(), top_p, filters[2].float()), noise)
        wanted = torch.where(temperature > 0, wanted, rows.argmax(-1))
        assert (tokens != wanted).sum() <= 1  # log may differ in its last bit
        assert (tokens != rows.argmax(-1)).sum() > 2  # and draws they are


CHECKS = [check_filters, check_edges, check_near_edges, check_any, check_vocabulary, check_draws]


def test_in_the_interpreter() -> None:
    assert interpreted("tests.kernels.sampling.test_filter_thresholds").split() == [check.__name__ for check in CHECKS]


@pytest.mark.gpu1
@pytest.mark.parametrize("check", CHECKS)
def test_on_gpu(check: Callable[[], None]) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        check()


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_of_mixed_rows_on_gpu(dtype: torch.dtype) -> None:
    """64 rows of 128,256: the tokens are those of plain torch on the same GPU, and thresholds too."""
    torch.manual_seed(0)
    rows, width = 64, 128_256
    logits = torch.randn(rows, width, device="cuda") * 2
    logits[:, :64] += torch.linspace(16, 2, 64, device="cuda")
    logits = logits.to(dtype)
    kinds = [
        (0.0, width, 1, 0), (0.8, width, 0.95, 0), (1.0, 50, 1, 0), (0.7, width, 1, 0.05), (1.5, 40, 0.9, 0.01), (1.0, width, 1, 0),
        (2.0, width, 0.99, 0), (1.0, 5000, 0.999, 0),
    ]  # fmt: skip
    temperature, filters = (x.cuda() for x in rows_of(*(kinds * 8)))
    apart = check(logits, temperature, filters)
    noise = torch.randint(-(2**31), 2**31 - 1, (2, rows), device="cuda").to(torch.int32)
    divisor = torch.where(temperature > 0, temperature, 1.0)
    top_p = filters[1].where(filters[1] < 1.0, 2.0)
    kept = reference.keep_filtered(
        reference.scale_logits(logits.float(), divisor), width, filters[0].long(), top_p, filters[2].float()
    )
    wanted = torch.where(temperature > 0, reference.draw(kept, noise), logits.argmax(-1))
    assert sampling.sample(logits, temperature, noise, filters).tolist() == wanted.tolist()
    assert apart <= 24  # of nuclei of thousands, one more or less


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("kernel", ["filter_thresholds", "gumbel_max_above_thresholds"])
def test_compiles(kernel: str, arch: int) -> None:
    """Down to machine code; a lane's logits stay its own, so that sums over them need no other lane."""
    from phalanx.kernels.sampling import filter_thresholds, gumbel_argmax

    ids = "*i64"
    constants: dict[str, Any]
    if kernel == "filter_thresholds":
        signature = {
            "logits": "*fp32",
            "thresholds": "*fp32",
            "max_keys": ids,
            "temperature": "*fp32",
            "filters": "*fp64",
            "few": "*fp32",
        }
        signature |= dict.fromkeys(("stride", "width", "rows", "parts"), "i32")
        constants = {
            "PARTS": 64,
            "LANES": filter_thresholds.LANES,
            "EACH": filter_thresholds.EACH,
            "CAPACITY": filter_thresholds.CAPACITY,
            "SM": arch,
        }
        result = compiled_as(
            filter_thresholds._filter_thresholds, signature, constants, arch, aligned=("logits", "stride"),
            num_warps=filter_thresholds.LANES // 32,
        )  # fmt: skip
        assert len(result.asm["cubin"]) > 0
        assert ("griddepcontrol.wait" in result.asm["ptx"]) == (arch >= 90)
        assert "set.le.f32.f32" in result.asm["ptx"]
        assert "ld.global.v4.b32" in result.asm["ptx"]
        assert result.metadata.shared <= 1024  # for sums over all lanes, nothing larger
        return
    signature = {"logits": "*bf16", "keys": ids, "max_keys": ids, "temperature": "*fp32", "noise": "*i32"}
    signature["thresholds"] = "*fp32"
    signature |= dict.fromkeys(("stride", "width", "begin", "rows", "parts", "span"), "i32")
    compiled(gumbel_argmax._gumbel_max, signature, {"RANKS": 1, "PARTS": 64, "BLOCK": gumbel_argmax.BLOCK}, arch)


if __name__ == "__main__":
    from phalanx.kernels.sampling import filter_thresholds

    torch.manual_seed(0)
    filter_thresholds.LANES, filter_thresholds.EACH = 32, 4
    for check_one in CHECKS:
        check_one()
        print(check_one.__name__, flush=True)

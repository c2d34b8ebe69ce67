# SPDX-License-Identifier: Apache-2.0
"""The bits of e4m3 and e2m1, and the vectors that they come from, over every 16-bit value: in Triton's interpreter."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.kernels_interpreted import interpreted

triton = pytest.importorskip("triton")
tl = triton.language
vectors = pytest.importorskip("phalanx.kernels.vectors")
quantize = pytest.importorskip("phalanx.kernels.quantize")

pytestmark = pytest.mark.usefixtures("forked_python")


@triton.jit
def codes(values, e4m3, decoded, e2m1, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + index)
    code = quantize.e4m3_bits(value)
    tl.store(e4m3 + index, code.to(tl.uint8))
    tl.store(decoded + index, quantize.e4m3_value(code & 0x7F))
    tl.store(e2m1 + index, quantize.e2m1_bits(value).to(tl.uint8))


@triton.jit
def twice(source, target, KIND: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lanes = vectors.unpack(vectors.load(source, index, index >= 0, 0), KIND)
    vectors.store(target, index, vectors.pack(vectors.add(lanes, lanes), KIND, 0), index >= 0, 0)


def main() -> None:
    """Runs with TRITON_INTERPRET=1."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    e4m3, e2m1 = torch.empty(1 << 16, dtype=torch.uint8), torch.empty(1 << 16, dtype=torch.uint8)
    decoded = torch.empty(1 << 16)
    codes[(64,)](values, e4m3, decoded, e2m1, BLOCK=1024)
    good = ~values.isnan()
    wanted = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (values.abs().clamp(max=6).nan_to_num().unsqueeze(1) - grid).abs()
    results = {
        "e4m3": int((e4m3[good] != wanted.view(torch.uint8)[good]).sum()),
        "e4m3 NaN": int((e4m3[~good] & 0x7F != 0x7F).sum()),
        "e4m3 back": int((decoded[good] != wanted.float().abs()[good]).sum()),
        "e2m1 is nearest": int((nearest.gather(1, (e2m1 & 7).long().unsqueeze(1)).squeeze(1) != nearest.min(1).values)[good].sum()),
        "e2m1 sign": int(((e2m1 >> 3).bool() != values.signbit())[good].sum()),
    }
    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        source = torch.arange(1 << 16, dtype=torch.int32)
        values_in = source.to(torch.int16).view(dtype) if dtype.itemsize == 2 else (source * 65_521).view(dtype)
        target = torch.empty_like(values_in)
        count = values_in.nbytes // 16
        twice[(count // 1024,)](values_in.view(torch.int32), target.view(torch.int32), KIND=kind, BLOCK=1024)
        number = ~values_in.isnan()
        results[f"twice {kind}"] = int((target[number] != (values_in.float() + values_in.float()).to(dtype)[number]).sum())
        results[f"twice {kind} NaN"] = int((~target[~number].isnan()).sum())
    print(json.dumps(results))


def test_every_value_in_the_interpreter() -> None:
    results = json.loads(interpreted("tests.kernels.test_quantize"))
    assert results
    assert not {what: wrong for what, wrong in results.items() if wrong}


if __name__ == "__main__":
    main()

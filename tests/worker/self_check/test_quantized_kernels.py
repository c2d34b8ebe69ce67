# SPDX-License-Identifier: Apache-2.0
"""T16: the numeric test of kernels of quantized weights passes what is right in every format, and names what is wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.errors import SelfCheckFailed
from phalanx.kernels.adapters.rows import AdapterBatch, AdapterRows
from phalanx.kernels.gemm import int4_mm, int4_packing
from phalanx.models.decoder import Decoder
from phalanx.models.layers.linear_methods import fp8, int4, nvfp4
from phalanx.worker.self_check import quantized_kernels
from phalanx.worker.self_check.quantized_kernels import check_quantized_kernels
from tests.support import int4_checkpoints, nvfp4_checkpoints, quantized_checkpoints
from tests.support.checkpoints import write_checkpoint
from tests.support.models_formation import Formation

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 416, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2,
    "std": 0.08,
}  # fmt: skip
EXPERTS: dict[str, Any] = {**SIZES, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
FORMS = {
    **{f"int4 {kind}": int4_checkpoints.FORMS[kind] for kind in ("packed 32", "awq", "gptq desc_act (T3)")},
    "nvfp4": nvfp4_checkpoints.FORMS["modelopt"],
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    return {
        family: write_checkpoint(folder / family, family, dtype=torch.bfloat16, **sizes)
        for family, sizes in (("qwen2", SIZES), ("qwen3_moe", EXPERTS))
    }


def loaded(kind: str, family: str, plain: dict[str, Path], folder: Path, rank: int = 0, **options: Any) -> Decoder:
    if kind in FORMS:
        stored, _ = int4_checkpoints.rewrite(plain[family], folder, FORMS[kind])
    else:
        stored, _ = quantized_checkpoints.rewrite(plain[family], folder, kind)
    return Formation(stored, **options).models[0][rank]


@pytest.mark.parametrize("kind", [*FORMS, "modelopt", "compressed dynamic", "compressed weights only", "blocks"])
def test_right_kernels_pass(kind: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """On the rank whose slices are uneven: 13 groups of 32 columns are seven and six, and the last tile of rows is not full. The
    first layer of each shape is tested, and one that is not quantized is not."""
    model = loaded(kind, "qwen2", plain, tmp_path, rank=1, tp=2)
    line = check_quantized_kernels(model, 512)
    assert line.startswith(("4 shapes", "5 shapes"))  # with AWQ's groups of 64 two layers have one shape
    assert float(line.split("error ")[1].split(" ")[0]) < 1e-4


def test_adapters_of_the_last_step_are_no_matter(plain: dict[str, Path], tmp_path: Path) -> None:
    """Its tokens may still be noted, as those of a captured step are."""
    adapters = AdapterBatch(1, 8)
    model = loaded("int4 packed 32", "qwen2", plain, tmp_path, adapters=adapters)
    rows = AdapterRows.of(np.zeros(3, dtype=np.int64), torch.device("cpu"))
    assert rows is not None
    adapters.rows = replace(rows, slots=None)
    assert check_quantized_kernels(model, 512)


def test_activations_in_fp8_are_tested_as_such(
    plain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Few tokens beside 16 bit, and many beside e4m3."""
    model = loaded("int4 awq", "qwen2", plain, tmp_path, int4_fp8=True)
    assert float(check_quantized_kernels(model, 512).split("error ")[1].split(" ")[0]) < 1e-4
    monkeypatch.setattr(int4, "int4_mm", lambda x, weight, bias=None, **_: right(x, weight, bias))
    right = int4_mm.int4_mm
    with pytest.raises(SelfCheckFailed, match="with 255 tokens"):
        check_quantized_kernels(model, 512)


@pytest.mark.parametrize("kind", ["int4 packed 32", "nvfp4", "compressed dynamic"])
def test_experts_are_tested(kind: str, plain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(kind, "qwen3_moe", plain, tmp_path, rank=1, tp=2, moe_ep=2)
    assert "shapes of quantized layers" in check_quantized_kernels(model, 512)
    right = quantized_kernels.experts_of

    def wrong(x: Tensor, *args: Any, **options: Any) -> Tensor:
        output = right(x, *args, **options)
        return output.roll(1, 0) if len(x) > 100 else output

    monkeypatch.setattr(quantized_kernels, "experts_of", wrong)
    with pytest.raises(SelfCheckFailed, match=r"Experts gives wrong values.*the experts of layer 0 \(2 experts of 96"):
        check_quantized_kernels(model, 512)
    check_quantized_kernels(model, 64)  # steps never have as many tokens


def test_what_is_not_quantized_is_not_tested(plain: dict[str, Path]) -> None:
    assert check_quantized_kernels(Formation(plain["qwen2"]).models[0][0], 512) == ""


def one_lane(output: Tensor) -> Tensor:
    output = output.clone()
    output[:, 5] = output[:, 6]
    return output


def last_rows(output: Tensor) -> Tensor:
    output = output.clone()
    output[:, -30:] = 0.0
    return output


@pytest.mark.parametrize(
    ("fault", "tokens"),
    [
        (one_lane, 1), (last_rows, 1), (lambda output: output * 1.05, 15), (lambda output: output.roll(1, 0), 15),
        (lambda output: output * float("nan"), 255),
    ],
)  # fmt: skip
def test_a_wrong_kernel_is_named(
    fault: Any, tokens: int, plain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From so many tokens on: as with a kernel of which one variant is wrong."""
    right = int4.int4_mm

    def wrong(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return fault(right(x, *args, **options)) if len(x) >= tokens else right(x, *args, **options)

    model = loaded("int4 packed 32", "qwen2", plain, tmp_path)
    monkeypatch.setattr(int4, "int4_mm", wrong)
    with pytest.raises(SelfCheckFailed) as failed:
        check_quantized_kernels(model, 512)
    text = str(failed.value)
    assert "the kernel of Int4Linear gives wrong values on this GPU" in text
    assert "layers.0.self_attn.q_proj (weight 512 x 256)" in text or "mlp" in text
    assert f"with {tokens} tokens" in text
    assert "phalanx doctor" in text


@pytest.mark.parametrize(("kind", "module", "name"), [("nvfp4", nvfp4, "nvfp4_mm"), ("compressed weights only", fp8.F, "linear")])
def test_a_scale_that_is_not_read_is_seen(
    kind: str, module: Any, name: str, plain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, right = loaded(kind, "qwen2", plain, tmp_path), getattr(module, name)
    calls = []

    def wrong(x: Tensor, weight: Any, bias: Any = None) -> Tensor:
        calls.append(len(x))
        doubled = len(x) == 1 and not (isinstance(weight, Tensor) and len(weight) <= quantized_kernels.ROWS)  # nor the plain one
        return right(x, weight, bias) * (2.0 if doubled else 1.0)

    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(SelfCheckFailed, match="relative error 1 beside"):
        check_quantized_kernels(model, 512)
    assert 1 in calls


def test_it_compares_few_rows_of_wide_layers(plain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no layer are more than 192 rows dequantized: that is what makes it a matter of milliseconds."""
    model = loaded("int4 packed 32", "qwen2", plain, tmp_path)
    rows, right = [], int4_packing.dequantized

    def counted(weight: Any, dtype: torch.dtype) -> Tensor:
        rows.append(weight.outputs)
        return right(weight, dtype)

    monkeypatch.setattr(int4, "dequantized", counted)
    begin = time.perf_counter()
    check_quantized_kernels(model, 512)
    assert time.perf_counter() - begin < 20.0
    assert max(rows) <= 64

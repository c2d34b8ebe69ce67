# SPDX-License-Identifier: Apache-2.0
"""FP8 checkpoints on a GPU: logits and argmax beside those of a CPU with the same numerics.

A CPU with `fp8_gemm` quantizes what a GPU quantizes, and multiplies in fp32. Two forwards in bf16 that add up in another order
are apart because they round at other places, and what is then quantized may fall on another side of a bound. How much that is, the
CPU says: of the same forward in bf16 beside fp32. A GPU in bf16 is as far from fp32 for the same reasons: twice that bounds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.kernels.capabilities import has_fp8_gemm
from phalanx.kernels.gemm import block_gemm
from phalanx.models import registry, weights
from phalanx.models.batch import Batch
from phalanx.models.cache import empty_caches
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.slices import LayerContext
from tests.support import quantized_checkpoints
from tests.support.checkpoints import write_checkpoint
from tests.support.models_formation import CPU
from tests.support.quantized_checkpoints import FORMS, rewrite

CHECKPOINTS = ("blocks of 128", "modelopt", "modelopt per channel", "compressed static", "compressed dynamic", "one scale")
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 336, "num_attention_heads": 4, "num_key_value_heads": 2, "std": 0.06,
}  # fmt: skip
PROMPT, AFTER = 80, 6  # more tokens than are few, then one at a time
BLOCK = 16


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Form -> the FP8 checkpoint, and the plain one that it stands for."""
    plain = write_checkpoint(tmp_path_factory.mktemp("plain"), "qwen2", dtype=torch.bfloat16, **SIZES)
    declared, encode, scales_at = FORMS["blocks"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_checkpoints, "BLOCK", (128, 128))
        patch.setitem(FORMS, "blocks of 128", ({**declared, "weight_block_size": [128, 128]}, encode, scales_at))
        return {form: rewrite(plain, tmp_path_factory.mktemp("form"), form) for form in CHECKPOINTS}


def logits(
    folder: Path, device: torch.device, dtype: torch.dtype, *, fp8_gemm: bool = True, prompt: int = PROMPT
) -> Tensor:  # fmt: skip
    """[prompt + AFTER, vocabulary] fp32, on CPU, of a prompt in one step and tokens in steps of their own."""
    shape = ModelShape.from_folder(folder)
    model = registry.build(shape, range(shape.num_layers), LayerContext(Solo(), dtype, device, fp8_gemm=fp8_gemm))  # fmt: skip
    weights.load(model, folder)
    count = -(-(prompt + AFTER) // BLOCK)
    caches = empty_caches(model.declared_caches(), count + 1, BLOCK, device)
    ids = torch.randint(0, 384, (prompt + AFTER,), generator=torch.Generator().manual_seed(1)).to(device)
    attention, steps = select_backend(device, dtype, shape.head_dim), []
    with torch.inference_mode():
        for begin, end in [(0, prompt), *((at, at + 1) for at in range(prompt, prompt + AFTER))]:
            at, table = torch.arange(begin, end, device=device), torch.arange(1, count + 1, dtype=torch.int32, device=device)
            batch = Batch(
                ids[begin:end], at, at + BLOCK, torch.tensor([0, end - begin], dtype=torch.int32, device=device),
                torch.tensor([end], dtype=torch.int32, device=device), table[None], at - begin, [0, end - begin], [end],
                table[None].cpu().numpy(),
            )  # fmt: skip
            batch.attention = attention.plan(batch)
            steps.append(model(batch, caches).float().cpu())
    return torch.cat(steps)


def as_on_a_cpu(outputs: Tensor, folder: Path, meant: Path, prompt: int = PROMPT) -> None:
    """outputs: logits [tokens, vocabulary] in bf16 with FP8 GEMMs. Raises AssertionError where they are not those of `folder`."""
    exact = logits(folder, CPU, torch.float32, prompt=prompt)
    rounded = logits(folder, CPU, torch.bfloat16, prompt=prompt)
    assert not outputs.isnan().any()
    for tokens in (slice(0, prompt), slice(prompt, None)):
        apart = (rounded[tokens] - exact[tokens]).norm()
        assert (outputs[tokens] - exact[tokens]).norm() <= 2 * apart
        # Beside the widened weights, the same triangle: what quantizing activations makes, and what rounding makes of that.
        widened = logits(meant, CPU, torch.float32, prompt=prompt)[tokens]
        rounding = (exact[tokens] - widened).norm()
        assert (outputs[tokens] - widened).norm() <= rounding + 2 * apart
        assert 2 * apart < exact[tokens].norm() / 4, "the bound means something"
    bound = 2 * (rounded - exact).abs().max()
    first, second = exact.topk(2, -1).values.unbind(-1)
    sure = first - second > 2 * bound
    assert sure.sum() >= 8
    assert torch.equal(outputs.argmax(-1)[sure], exact.argmax(-1)[sure])


@pytest.mark.parametrize("form", CHECKPOINTS)
def test_the_bound_can_fail(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    """A CPU in bf16 is within it; and another checkpoint's logits are not, nor are those of two swapped tokens."""
    folder, meant = written[form]
    outputs = logits(folder, CPU, torch.bfloat16)
    as_on_a_cpu(outputs, folder, meant)
    with pytest.raises(AssertionError):
        as_on_a_cpu(outputs.roll(1, 0), folder, meant)
    other = next(name for name in CHECKPOINTS if name != form)
    assert not torch.equal(outputs, logits(written[other][0], CPU, torch.bfloat16))


@pytest.mark.gpu1
@pytest.mark.parametrize("form", CHECKPOINTS)
def test_on_gpu(form: str, written: dict[str, tuple[Path, Path]]) -> None:
    folder, meant = written[form]
    device = torch.device("cuda")
    if not has_fp8_gemm(device):
        pytest.skip("this GPU has no FP8 GEMMs")
    as_on_a_cpu(logits(folder, device, torch.bfloat16), folder, meant)


@pytest.fixture(scope="module")
def whole_blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """As `written`: of sizes whose blocks cuBLAS takes."""
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "std": 0.03}
    plain = write_checkpoint(tmp_path_factory.mktemp("plain"), "qwen2", dtype=torch.bfloat16, **sizes)
    declared, encode, scales_at = FORMS["blocks"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_checkpoints, "BLOCK", (128, 128))
        patch.setitem(FORMS, "whole", ({**declared, "weight_block_size": [128, 128]}, encode, scales_at))
        return rewrite(plain, tmp_path_factory.mktemp("form"), "whole")


@pytest.mark.gpu1
def test_whole_blocks_on_gpu(whole_blocks: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is multiplied by torch, tokens after it are not."""
    device, cublas, ran, prompt = torch.device("cuda"), block_gemm._cublas, list[int](), 130
    if not block_gemm.cublas_supports(512, 512, 0, device):
        pytest.skip("torch has no block-scaled GEMM here")
    monkeypatch.setattr(block_gemm, "_cublas", lambda x, *others: ran.append(len(x)) or cublas(x, *others))  # type: ignore[func-returns-value]
    as_on_a_cpu(logits(whole_blocks[0], device, torch.bfloat16, prompt=prompt), *whole_blocks, prompt)
    # Four GEMMs a layer, but for those that the form leaves in bf16.
    assert set(ran) == {prompt}
    assert len(ran) > 4


@pytest.mark.gpu1
def test_blocks_widened_on_gpu(written: dict[str, tuple[Path, Path]]) -> None:
    """As on a GPU without FP8 GEMMs: weights alone in FP8, within twice what bf16 makes of them on a CPU."""
    folder, meant = written["blocks of 128"]
    exact, rounded = logits(meant, CPU, torch.float32), logits(folder, CPU, torch.bfloat16, fp8_gemm=False)
    outputs = logits(folder, torch.device("cuda"), torch.bfloat16, fp8_gemm=False)
    for tokens in (slice(0, PROMPT), slice(PROMPT, None)):
        assert (outputs[tokens] - exact[tokens]).norm() <= 2 * (rounded[tokens] - exact[tokens]).norm()

# SPDX-License-Identifier: Apache-2.0
"""A cache in FP8 has the scales that the checkpoint holds, by any of their names, over every number of ranks; those for a part of
it, and those that nothing can be scaled by, are named."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.errors import WeightError
from phalanx.models.kv_scales import Pair
from tests.support.checkpoints import write_checkpoint
from tests.support.models_formation import Formation
from tests.support.quantized_checkpoints import FORMS, declare, rewrite

PAIRS: Sequence[Pair] = ((0.003, 0.0005), (0.0011, 0.002))
"""By layer: so small that keys and values are clipped at them, and no two layouts of scales give the same logits."""

OWN = "k_scale", "v_scale"
OF_PRODUCTS = "k_proj.k_scale", "v_proj.v_scale"
OF_OUTPUTS = "k_proj.output_scale", "v_proj.output_scale"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("plain"), "qwen2", dtype=torch.bfloat16, hidden_size=64, intermediate_size=128,
        num_attention_heads=8, num_key_value_heads=4, std=0.15,
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Form -> the FP8 checkpoint, which has no scales for a cache, and the plain one that it stands for."""
    forms = "one scale", "blocks", "modelopt per channel", "compressed dynamic"
    return {form: rewrite(plain, tmp_path_factory.mktemp("form"), form) for form in forms} | {"plain": (plain, plain)}


def with_scales(stored: Path, folder: Path, scales: dict[str, float], shape: tuple[int, ...] = ()) -> Path:
    """A copy of a checkpoint with these scales, by the end of their names."""
    copy = Path(shutil.copytree(stored, folder / "scaled"))
    tensors = load_file(copy / "model.safetensors")
    tensors |= {f"model.layers.{end}": torch.full(shape, scale) for end, scale in scales.items()}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def by_layer(names: tuple[str, str], pairs: Sequence[Pair] = PAIRS) -> dict[str, float]:
    return {f"{layer}.self_attn.{name}": scale for layer, pair in enumerate(pairs) for name, scale in zip(names, pair, strict=True)}


def logits(folder: Path, pairs: Sequence[Pair | None] = (), **options: Any) -> Tensor:
    """Over an FP8 cache. pairs: layers' scales that are put in by hand."""
    ids = torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))
    formation = Formation(folder, kv_cache_dtype="fp8", **options)
    for model in [model for stage in formation.models for model in stage]:
        for layer, pair in zip(model.layers, pairs, strict=False):
            layer.self_attn.kv_store.read_scales = pair
    first = formation.step([(0, ids[:20])], padding=1)[0]
    return torch.cat([first, *(formation.step([(0, ids[at : at + 1])])[0] for at in range(20, 24))])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("one scale", OWN), ("one scale", OF_OUTPUTS), ("blocks", OWN), ("modelopt per channel", OF_PRODUCTS),
        ("compressed dynamic", OWN), ("compressed dynamic", OF_OUTPUTS), ("plain", OWN),
    ],
)  # fmt: skip
def test_scales_are_read_whatever_the_configuration_says_of_a_cache(
    form: str, names: tuple[str, str], tp: int, written: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:  # fmt: skip
    stored, meant = written[form]
    scaled = logits(with_scales(stored, tmp_path, by_layer(names), (1,) if names == OWN else ()), tp=tp)
    torch.testing.assert_close(scaled, logits(meant, PAIRS), rtol=1e-5, atol=1e-5)
    for wrong in ((None, None), (PAIRS[1], PAIRS[0]), tuple(pair[::-1] for pair in PAIRS)):
        assert float((scaled - logits(meant, wrong)).abs().max()) > 0.01, wrong


@pytest.mark.parametrize("tp", [1, 2])
def test_one_scale_for_both_counts_where_there_is_no_other(tp: int, written: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    stored, meant = written["one scale"]
    scales = {"0.self_attn.kv_scale": 0.002, "1.self_attn.kv_scale": 7.0, **by_layer(OWN)}
    del scales["0.self_attn.k_scale"], scales["0.self_attn.v_scale"]
    scaled = logits(with_scales(stored, tmp_path, scales), tp=tp)
    torch.testing.assert_close(scaled, logits(meant, ((0.002, 0.002), PAIRS[1])), rtol=1e-5, atol=1e-5)


def test_over_stages_each_layer_has_its_own(written: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    stored, meant = written["one scale"]
    scaled = logits(with_scales(stored, tmp_path, by_layer(OWN)), pp=2)
    torch.testing.assert_close(scaled, logits(meant, PAIRS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("scales", [{}, by_layer(OWN, ((-1.0, -1.0),) * 2), by_layer(OWN, ((1.0, 1.0),) * 2)])
def test_without_scales_they_are_1(
    scales: dict[str, float], promised: bool, written: dict[str, tuple[Path, Path]], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Even where the configuration declares an FP8 cache. -1 stands for no scale. The log says which scales are used."""
    stored, meant = written["one scale"]
    folder = with_scales(stored, tmp_path, scales)
    if promised:
        declare(folder, FORMS["one scale"][0] | {"kv_cache_scheme": "static"})
    with caplog.at_level(logging.INFO, "phalanx"):
        unscaled = logits(folder)
    torch.testing.assert_close(unscaled, logits(meant, (None, None)), rtol=1e-5, atol=1e-5)
    lines = [line for line in caplog.messages if "FP8 cache" in line]
    assert len(lines) == 1
    assert ("without scales" in lines[0]) == (1.0 not in scales.values())
    assert ("-1" in lines[0]) == (-1.0 in scales.values())


@pytest.mark.parametrize(
    ("scales", "match"),
    [
        (by_layer(OWN, PAIRS[:1]), r"layers.1.self_attn.k_scale is missing; .*has model.layers.0.self_attn.k_scale and 1 more; "),
        ({"0.self_attn.k_scale": 0.1, "1.self_attn.k_scale": 0.1}, r"layers.0.self_attn.v_scale is missing"),
        (by_layer(OWN, (PAIRS[0], (-1.0, -1.0))), r"layers.1.self_attn.k_scale holds -1, which stands for no scale"),
        (by_layer(OWN, (PAIRS[0], (0.1, -1.0))), r"layers.1.self_attn.v_scale holds -1"),
        (by_layer(OWN, (PAIRS[0], (0.0, 0.1))), r"layers.1.self_attn.k_scale in .*not finite and positive"),
        (by_layer(OWN, (PAIRS[0], (0.1, -0.5))), r"layers.1.self_attn.v_scale in .*not finite and positive"),
        (by_layer(OWN, (PAIRS[0], (float("nan"), 0.1))), r"layers.1.self_attn.k_scale in .*not finite and positive"),
        (by_layer(OWN) | by_layer(OF_PRODUCTS, PAIRS[::-1]), r"k_scale and .*k_proj.k_scale differ; .*0.003 and 0.0011"),
        (
            by_layer(OWN) | by_layer(OF_PRODUCTS) | by_layer(OF_OUTPUTS, PAIRS[::-1]),
            r"self_attn.k_scale and .*k_proj.output_scale differ; .*0.003 and 0.0011",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}])
def test_scales_for_a_part_and_those_that_scale_nothing_are_named(
    options: dict[str, int], scales: dict[str, float], match: str, written: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:  # fmt: skip
    folder = with_scales(written["one scale"][0], tmp_path, scales)
    with pytest.raises(WeightError, match=match):
        logits(folder, **options)
    Formation(folder, **options)  # a cache in 16 bit needs none of them


def test_a_scale_for_each_head_is_refused(written: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    folder = with_scales(written["one scale"][0], tmp_path, by_layer(OWN), (4,))
    with pytest.raises(WeightError, match=r"self_attn.k_scale in .* has shape \[4\]"):
        logits(folder)

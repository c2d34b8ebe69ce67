# SPDX-License-Identifier: Apache-2.0
"""How steps are cut, and that parts act in the order that hides their sums. What they give: test_overlap_models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.comm.group import Group, ResidualRmsNorm
from phalanx.comm.rows import OwnedRows
from phalanx.comm.rows.beside import InTurn
from phalanx.kernels.scaled_mm import Quantized
from phalanx.models.layers import overlap
from phalanx.models.layers.linear import RowParallelLinear
from phalanx.models.layers.mlp import GatedMlp
from phalanx.models.layers.overlap import Overlap, rows_of
from phalanx.models.llama import Attention
from tests.checkpoints import write_checkpoint
from tests.models.formation import Formation


def _of(*, parts: int = 4, part_tokens: int = 1 << 20, **options: int) -> Overlap:
    """For questions about cuts alone."""
    return Overlap(SimpleNamespace(parts=parts, part_tokens=part_tokens), **options)  # type: ignore[arg-type]


class Watched(InTurn):
    """Leaves its acts in `acts`; what `take` gave is NaN from the part's next `finish` on."""

    def __init__(self, group: Group, acts: list[str], parts: int = 4) -> None:
        super().__init__(group, parts, 1 << 20)
        self.acts = acts
        self._given: dict[int, tuple[Tensor, ...]] = {}

    def send(self, part: int, x: Tensor) -> None:
        assert x.is_contiguous()
        assert x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        self.acts.append(f"send {part}")
        super().send(part, x.clone())
        x.fill_(float("nan"))

    def finish(self, part: int, fusion: ResidualRmsNorm) -> None:
        self.acts.append(f"finish {part}")
        assert fusion.may_own
        super().finish(part, fusion)
        for old in self._given.pop(part, ()):
            held = old.held if isinstance(old, OwnedRows) else old
            held.view(torch.uint8).fill_(0x7F) if held.dtype == torch.float8_e4m3fn else held.fill_(float("nan"))

    def take(self, part: int) -> tuple[Tensor, ...]:
        self.acts.append(f"take {part}")
        self._given[part] = super().take(part)
        return self._given[part]


@given(
    tokens=st.integers(1, 40_000), parts=st.integers(1, 8), part_tokens=st.sampled_from([1536, 2048, 4096, 1 << 20]),
    least=st.sampled_from([1, 128, 1000, 1536]),
)  # fmt: skip
def test_cuts_cover_a_step_in_tiles_and_keep_their_limits(tokens: int, parts: int, part_tokens: int, least: int) -> None:
    cuts = _of(parts=parts, part_tokens=part_tokens, least_tokens=least).cut(tokens)
    assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])]
    assert cuts[-1].stop == tokens
    sizes = [cut.stop - cut.start for cut in cuts]
    if len(cuts) > 1:
        assert len(cuts) <= parts
        assert all(cut.start % 128 == 0 for cut in cuts)
        assert min(sizes) >= least
        assert max(sizes) <= part_tokens
        assert max(sizes) - min(sizes) < 2 * 128
    elif least % 128 == 0 and part_tokens % 128 == 0:
        most = min(parts, tokens // least)
        assert most < 2 or tokens > most * part_tokens


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (3071, [3071]), (3072, [1536, 1536]), (3073, [1536, 1537]), (3200, [1664, 1536]), (4608, [1536] * 3),
        (4700, [1536, 1536, 1628]), (6144, [1536] * 4), (8192, [2048] * 4), (8191, [2048, 2048, 2048, 2047]), (16384, [4096] * 4),
        (16385, [16385]),
    ],
)  # fmt: skip
def test_a_part_has_at_least_1536_tokens(tokens: int, sizes: list[int]) -> None:
    assert overlap.PART_TOKENS == 1536
    assert [cut.stop - cut.start for cut in _of(part_tokens=4096).cut(tokens)] == sizes


def test_one_part_is_no_overlap() -> None:
    assert _of(parts=1).cut(8192) == [slice(0, 8192)]
    assert _of().begin(torch.zeros(3071, 1), torch.zeros(3071, 1)) is None
    with pytest.raises(ValueError, match="at least 0 tokens"):
        _of(least_tokens=0)


def test_scales_are_cut_with_their_rows() -> None:
    values, scale = torch.arange(12).view(6, 2).to(torch.float8_e4m3fn), torch.arange(6.0).view(6, 1)
    part = rows_of(Quantized(values, scale), slice(2, 4))
    assert isinstance(part, Quantized)
    assert part.values.float().tolist() == [[4, 5], [6, 7]]
    assert part.scale.tolist() == [[2], [3]]
    one = rows_of(Quantized(values, torch.tensor(3.0)), slice(2, 4))
    assert isinstance(one, Quantized)
    assert one.scale.shape == ()


def in_parts(formation: Formation, parts: int = 4, least_tokens: int = 128) -> list[list[str]]:
    """Let its models' steps overlap; returns what each does, as it does it."""
    found = []
    for model in (model for stage in formation.models for model in stage):
        found.append(acts := [])
        model.overlap = Overlap(Watched(model.seat.group, acts, parts), least_tokens=least_tokens)
    return found


def token_ids(*lengths: int) -> list[Tensor]:
    """Random token ids, so many at a time."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 380, (length,), generator=generator) for length in lengths]


Wrap = Callable[[type, str, str], None]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Wrap:
    """Has a method leave a word in its rank's acts when it is called."""

    def wrap(owner: type, method: str, word: str) -> None:
        plain = getattr(owner, method)

        def counted(self: Any, *arguments: Any) -> Any:
            self.acts.append(word)
            return plain(self, *arguments)

        monkeypatch.setattr(owner, method, counted)

    return wrap


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_acts_stand_behind_the_products_that_hide_them(parts: int, products: Wrap, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", max_position_embeddings=1024)
    formation = Formation(folder, tp=2, blocks=160)
    acts = in_parts(formation, parts)
    for model, mine in zip(formation.models[0], acts, strict=True):
        for layer in model.layers:
            layer.attention.acts = layer.attention.out.acts = layer.mlp.acts = mine
            layer.mlp.down.acts = []
    products(Attention, "_queries", "qkv")
    products(Attention, "_attend", "attend")
    products(RowParallelLinear, "partial", "o")
    products(GatedMlp, "inner", "mlp")
    formation.step([(0, token_ids(514)[0])])

    last = parts - 1
    expected = ["qkv"] * parts
    for layer in range(2):
        expected += ["attend"]
        for part in range(parts):
            expected += ["o", f"send {part}", *([f"finish {part - 1}"] if part else [])]
        for part in range(parts):
            expected += [f"take {part}", "mlp", f"send {part}", f"finish {(part - 1) % parts}"]
        if layer == 0:
            for part in range(parts):
                expected += [f"take {part}", "qkv", *([] if part else [f"finish {last}"])]
        else:
            expected += [f"finish {last}", *(f"take {part}" for part in range(parts))]
    assert acts == [expected] * 2


@pytest.mark.parametrize("lag", [1, 2, 5])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_part_is_finished_before_it_is_taken_however_long_the_lag(
    lag: int, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "LAG", lag)
    formation = Formation(write_checkpoint(tmp_path, "llama", max_position_embeddings=1024), tp=2, blocks=160)
    acts = in_parts(formation, parts)
    formation.step([(0, token_ids(514)[0])])
    for part in range(parts):
        assert [act.split()[0] for act in acts[0] if act.endswith(str(part))] == ["send", "finish", "take"] * 4
    sent = [act for act in acts[0] if act.startswith("send")]
    assert [act.replace("finish", "send") for act in acts[0] if act.startswith("finish")] == sent


def test_short_steps_go_whole(tmp_path: Path) -> None:
    formation = Formation(write_checkpoint(tmp_path, "llama"), tp=2)
    acts = in_parts(formation, least_tokens=129)
    formation.step([(0, token_ids(100)[0]), (1, token_ids(50)[0])])
    assert acts == [[], []]

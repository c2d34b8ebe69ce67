# SPDX-License-Identifier: Apache-2.0
"""The plan of latent attention's kernels: which rows are absorbed and which expanded, over which pages. The kernels' references
stand in for them; the kernels' own tests check that these agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.latent import Latent
from phalanx.kernels import reference
from phalanx.kernels.attention import dispatch
from phalanx.kernels.capabilities import HOPPER_SHARED_MEMORY, GpuCapabilities, simulated
from phalanx.layout.graphs import max_absorbed_pairs
from phalanx.models.batch import Batch
from phalanx.models.layers.attention import select, triton_latent
from phalanx.models.layers.attention.sdpa_latent import SdpaLatentBackend
from phalanx.models.layers.attention.triton_latent import TritonLatentBackend
from tests.support import models_formation
from tests.support.models_attention import latent_batch
from tests.support.models_deepseek import written
from tests.support.models_formation import Formation, run_steps
from tests.support.models_logits import STEPS, assert_same

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each launch: its kind, and its rows, negative where lengths are read early."""
    calls: list[tuple[str, int]] = []

    def decode(query: Tensor, *inputs: Any, workspace: Any, splits: Any, early_lengths: bool, **options: Any) -> Tensor:
        calls.append(("decode", -len(query) if early_lengths else len(query)))
        assert query.stride(-1) == 1
        return reference.latent_decode_attention(query, *inputs, **options)

    def prefill(query: Tensor, *inputs: Any, tiles: int, scale: float, least_rows: int) -> Tensor:
        rows = len(inputs[-1])
        calls.append(("prefill", rows))
        assert query.is_contiguous()
        assert inputs[0].is_contiguous()
        assert inputs[1].is_contiguous()
        assert tiles >= rows
        assert least_rows == triton_latent.ROWS_OF_GROUPS
        return reference.prefill_attention(query, *inputs, scale=scale)

    monkeypatch.setattr(triton_latent.kernels, "latent_decode_attention", decode)
    monkeypatch.setattr(triton_latent.kernels, "prefill_attention", prefill)
    return calls


@pytest.mark.parametrize(
    ("own_prefill", "heads_of_group", "most_tokens"),
    [(False, 8, 8192), (True, 8, 8192), (True, 1, 8192), (True, 1, 64), (True, 3, 1)],
)
def test_a_model_over_both_kinds_of_rows(
    own_prefill: bool, heads_of_group: int, most_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    launched: list[tuple[str, int]],
) -> None:  # fmt: skip
    backend = TritonLatentBackend(CPU, own_prefill=own_prefill, most_tokens=most_tokens)
    monkeypatch.setattr(models_formation, "select_backend", lambda *_: backend)
    monkeypatch.setattr(triton_latent, "HEADS_OF_GROUP", heads_of_group)
    folder, ids, expected = written("v3", tmp_path)
    run_steps(Formation(folder), STEPS, ids, expected, assert_same)
    assert {kind for kind, _ in launched} == ({"decode", "prefill"} if own_prefill else {"decode"})


@pytest.mark.parametrize("indirect", [False, True])
@pytest.mark.parametrize("rows", [[(7, 1), (30, 1)], [(0, 9), (11, 6)], [(7, 1), (16, 1), (0, 9), (5, 1), (11, 6)]])
def test_each_row_by_its_kind(rows: list[tuple[int, int]], indirect: bool, launched: list[tuple[str, int]]) -> None:
    torch.manual_seed(1)
    batch, cache = latent_batch(rows, indirect=indirect)
    query, up = torch.randn(batch.token_ids.shape[0], 3, 6 + 8), torch.randn(3, 6 + 5, 12)
    plan = TritonLatentBackend(CPU, own_prefill=True, most_tokens=8192).plan(batch)
    expected = SdpaLatentBackend().plan(batch).forward(query, cache, up=up, scale=0.2)
    for _ in range(2):
        torch.testing.assert_close(plan.forward(query, cache, up=up, scale=0.2), expected, rtol=1e-4, atol=1e-4)
    first = next((at for at, (_, now) in enumerate(rows) if now > 1), len(rows))
    one = [("decode", first)] * bool(first) + [("prefill", len(rows) - first)] * (first < len(rows))
    assert launched == one * 2


@pytest.mark.parametrize(
    ("most_tokens", "rows_of_groups", "launches"),
    [(40, 256, [3] * 5), (199, 256, [12, 3]), (200, 256, [15]), (119, 256, [6, 6, 3]), (8192, 8, [6, 6, 3]), (1, 1, [3] * 5)],
    ids=["one group", "four of five", "all", "two at once", "few rows", "less than one group"],
)
def test_groups_of_heads_go_together_as_far_as_memory_allows(
    most_tokens: int, rows_of_groups: int, launches: list[int], launched: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five groups of two heads, and three rows whose contexts have ten blocks of four tokens."""
    torch.manual_seed(1)
    monkeypatch.setattr(triton_latent, "HEADS_OF_GROUP", 3)
    monkeypatch.setattr(triton_latent, "ROWS_OF_GROUPS", rows_of_groups)
    batch, cache = latent_batch([(7, 1), (0, 9), (11, 6), (3, 2)], indirect=True)
    query, up = torch.randn(batch.token_ids.shape[0], 10, 6 + 8), torch.randn(10, 6 + 5, 12)
    plan = TritonLatentBackend(CPU, own_prefill=True, most_tokens=most_tokens).plan(batch)
    expected = SdpaLatentBackend().plan(batch).forward(query, cache, up=up, scale=0.2)
    torch.testing.assert_close(plan.forward(query, cache, up=up, scale=0.2), expected, rtol=1e-4, atol=1e-4)
    assert [rows for kind, rows in launched if kind == "prefill"] == launches


def test_a_fixed_batch_reads_lengths_early_once_its_layers_are_known(launched: list[tuple[str, int]]) -> None:
    batch, cache = latent_batch([(7, 1), (30, 1)], indirect=True)
    batch.fixed, batch.decodes = True, 2
    query, up = torch.randn(2, 3, 14), torch.randn(3, 11, 12)
    backend = TritonLatentBackend(CPU, own_prefill=True, most_tokens=8192)
    outs = [backend.plan(batch).forward(query, cache, up=up, scale=0.2) for _ in range(2)]
    assert torch.equal(*outs)
    assert launched == [("decode", -2)] * 2  # on CPU no kernel plans splits
    assert backend.graphs is backend
    assert backend.layer_specs == {dispatch.LatentSpec(3, 20, 4, 4)}
    assert backend.short_kv_limit(2) == 0
    assert backend.max_prefill_pairs() == max_absorbed_pairs(3, 20)


def test_a_fixed_batch_of_any_rows_takes_each_token_as_a_row(launched: list[tuple[str, int]]) -> None:
    """At most 3 decode rows, 4 prefill rows and 40 tokens; each replay has other rows, some or all of one kind, or none."""
    torch.manual_seed(1)
    tokens, decodes, rows = 40, 3, 7
    zeros = torch.zeros(tokens, dtype=torch.int64)
    query_starts, lengths = (torch.zeros(count, dtype=torch.int32) for count in (rows + 1, rows))
    tables, slots = torch.zeros(9, 12, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    batch = Batch(
        zeros, zeros.clone(), zeros - 1, query_starts, lengths, tables, zeros, [*range(decodes + 1), *[tokens] * 4], [1] * rows,
        table_rows=slots, fixed=True, decodes=decodes,
    )  # fmt: skip
    backend = TritonLatentBackend(CPU, own_prefill=True, most_tokens=8192)
    assert backend.captures_prefill
    query, up = torch.randn(tokens, 3, 6 + 8), torch.randn(3, 6 + 5, 12)
    for kinds in (
        [(7, 1), (16, 1), (0, 9), (5, 2), (11, 6)], [(0, 9), (11, 6), (3, 4), (0, 2)], [(7, 1), (30, 1), (1, 1)], [(0, 40)], [],
    ):  # fmt: skip
        now, cache = latent_batch(kinds or [(3, 1)], indirect=False)
        leading, count = sum(each == 1 for _, each in kinds), sum(each for _, each in kinds)
        at = [*range(leading), *range(decodes, decodes + len(kinds) - leading)]
        tables[: len(now.block_tables), : now.block_tables.shape[1]] = now.block_tables
        slots.zero_()
        slots[at] = torch.arange(len(kinds))
        starts = [min(row, leading) for row in range(decodes)] + now.query_starts_cpu[leading:] if kinds else [0]
        query_starts[:] = torch.tensor(starts + starts[-1:] * (rows + 1 - len(starts)))
        batch.positions.zero_()
        batch.kv_slots.fill_(-1)
        batch.positions[:count] = torch.tensor([before + at for before, each in kinds for at in range(each)], dtype=torch.int64)
        batch.kv_slots[:count] = 1
        out = backend.plan(batch).forward(query, cache, up=up, scale=0.2)
        assert not out[count:].any()
        if kinds:
            expected = SdpaLatentBackend().plan(now).forward(query[:count], cache, up=up, scale=0.2)
            torch.testing.assert_close(out[:count], expected, rtol=1e-4, atol=1e-4)
    assert launched == [("decode", tokens)] * 5  # lengths are computed behind what runs before


def test_which_back_end_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    latent = Latent(None, 512, 128, 64, 128, softmax_scale=0.1)
    assert select.select_backend(CPU, torch.float32, 192, latent).name == "latent sdpa"
    cuda = torch.device("cuda")
    with simulated(GpuCapabilities(90, 132, HOPPER_SHARED_MEMORY)):
        monkeypatch.setattr(select.kernels, "supports_latent", lambda _, *rest: dispatch_supports(cuda, *rest))
        monkeypatch.setattr(select.kernels, "supports_prefill", lambda _, *rest: dispatch_supports_prefill(cuda, *rest))
        assert select.select_backend(CPU, torch.bfloat16, 192, latent).name == "triton latent"
        assert select.select_backend(CPU, torch.float32, 192, latent).name == "latent sdpa"  # 512 in fp32 are too many
        small = Latent(None, 128, 128, 64, 128, softmax_scale=0.1)
        assert select.select_backend(CPU, torch.float32, 192, small).name == "triton latent+sdpa"


dispatch_supports, dispatch_supports_prefill = dispatch.supports_latent, dispatch.supports_prefill

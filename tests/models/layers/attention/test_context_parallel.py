# SPDX-License-Identifier: Apache-2.0
"""Over ranks that divide the tokens of latents, each rank gets for its heads what it gets from a whole cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.kernels import reference
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention import context_parallel, triton_latent
from phalanx.models.layers.attention.context_parallel import ContextParallel
from phalanx.models.layers.attention.plain import PlainBackend
from phalanx.models.layers.attention.sdpa_latent import SdpaLatentBackend
from phalanx.models.layers.attention.triton_latent import TritonLatentBackend
from tests.support.models_attention import latent_batch

HEADS, NOPE, V, RANK, ROPE, BLOCK = 4, 6, 5, 12, 8, 4
BACKENDS = {
    "sdpa": SdpaLatentBackend, "plain": lambda context: PlainBackend(latent=True, context=context),
    "kernels": lambda context: TritonLatentBackend(CPU, own_prefill=True, most_tokens=64, context=context),
    "decode kernel": lambda context: TritonLatentBackend(CPU, own_prefill=False, most_tokens=64, context=context),
}  # fmt: skip
CPU = torch.device("cpu")
ROWS = [(0, 1), (7, 1), (30, 1), (0, 9), (2, 1), (11, 6), (0, 2)]
"""Some have fewer tokens than there are ranks."""


@pytest.fixture(autouse=True)
def _kernels_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(options: dict[str, Any]) -> dict[str, Any]:
        kernels_alone = ("workspace", "splits", "early_lengths", "tiles", "least_rows")
        return {name: value for name, value in options.items() if name not in kernels_alone}

    for name in ("latent_decode_attention", "prefill_attention"):
        plain = getattr(reference, name)
        monkeypatch.setattr(triton_latent.kernels, name, lambda *inputs, plain=plain, **options: plain(*inputs, **without(options)))
    monkeypatch.setattr(context_parallel, "GATHERED_BYTES", 3 * BLOCK * (RANK + ROPE) * 4)  # of three blocks


def part(cache: LayerCache, context: ContextParallel) -> LayerCache:
    """A rank's part of the cache, token by token."""
    latents = cache["latent"]
    rows = [row for row in range(len(latents) * BLOCK) if row % context.size == context.rank]
    return LayerCache({"latent": latents.view(-1, 1, RANK + ROPE)[rows].view(len(latents), BLOCK // context.size, 1, RANK + ROPE)})


def inputs() -> tuple[Batch, LayerCache, Tensor, Tensor]:
    """What is behind a row's last token in its last block is another's: NaN."""
    torch.manual_seed(1)
    batch, cache = latent_batch(ROWS, indirect=True)
    assert batch.table_rows is not None
    for row, length in enumerate(batch.kv_lengths_cpu):
        if length % BLOCK:
            cache["latent"][int(batch.block_tables[batch.table_rows[row], length // BLOCK]), length % BLOCK :] = float("nan")
    query, up = torch.randn(batch.token_ids.shape[0], HEADS, NOPE + ROPE), torch.randn(HEADS, NOPE + V, RANK)
    return batch, cache, query, up


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_gets_its_heads(size: int, backend: str) -> None:
    batch, cache, query, up = inputs()
    expected = SdpaLatentBackend().plan(batch).forward(query, cache, up=up, scale=0.2)
    assert not expected.isnan().any()

    out = attended(size, backend, batch, cache, query, up)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def attended(size: int, backend: str, batch: Batch, cache: LayerCache, query: Tensor, up: Tensor) -> Tensor:
    """What all ranks have for their heads."""

    def rank(group: Group) -> Tensor:
        context: Any = ContextParallel(group)
        own = slice(group.rank * HEADS // size, (group.rank + 1) * HEADS // size)
        plan: Any = BACKENDS[backend](context).plan(batch)
        out: Tensor = plan.forward(query[:, own], part(cache, context), up=up[own], scale=0.2)
        return out

    return torch.cat(LocalWorld(size).run(rank), dim=1)


def test_a_fixed_batch_takes_each_token_as_a_row_of_this_rank() -> None:
    """As a captured forward: absent rows and tokens have an output of 0, and lengths are computed from what the tensors hold."""
    batch, cache, query, up = inputs()
    expected = SdpaLatentBackend().plan(batch).forward(query, cache, up=up, scale=0.2)
    tokens, rows = len(query), len(ROWS)
    positions = [before + at for before, now in ROWS for at in range(now)]
    zeros = torch.zeros(3, dtype=torch.int64)
    starts = torch.tensor([*batch.query_starts_cpu, tokens, tokens], dtype=torch.int32)
    assert batch.table_rows is not None
    fixed = Batch(
        zeros.new_zeros(tokens + 3), torch.tensor([*positions, 0, 0, 0]), torch.tensor([*range(tokens), -1, -1, -1]), starts,
        torch.tensor([*batch.kv_lengths_cpu, 0, 0], dtype=torch.int32), batch.block_tables, zeros[:0], [0] * (rows + 3),
        [1] * (rows + 2), table_rows=torch.cat([batch.table_rows, zeros[:2]]), fixed=True,
    )  # fmt: skip
    out = attended(2, "kernels", fixed, cache, torch.cat([query, query[:3]]), up)
    torch.testing.assert_close(out[:tokens], expected, rtol=1e-4, atol=1e-4)
    assert not out[tokens:].any()


@pytest.mark.parametrize("size", [2, 4])
def test_each_token_is_on_one_rank(size: int) -> None:
    slots, lengths = torch.tensor([-1, 0, 5, 6, 7, 40, 43]), torch.arange(50, dtype=torch.int32)

    def rank(group: Group) -> tuple[list[int], list[int]]:
        context = ContextParallel(group)
        return context.kv_slots(slots).tolist(), context.kv_lengths(lengths).tolist()

    own = LocalWorld(size).run(rank)
    for at, slot in enumerate(slots.tolist()):
        stored = [(number, places[at]) for number, (places, _) in enumerate(own) if places[at] >= 0]
        assert stored == ([] if slot < 0 else [(slot % size, slot // size)])
    for length in lengths.tolist():
        assert [counts[length] for _, counts in own] == [len(range(first, length, size)) for first in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_merged_by_their_log_sum_exp(dtype: torch.dtype) -> None:
    """Also where all ranks but one have no token, and where none has."""
    torch.manual_seed(0)
    scores, values = torch.randn(3, 5, HEADS, 7) * 20, torch.randn(3, 7, 6)
    scores[1:, 0] = scores[:, 1] = -1e30
    outs = torch.einsum("rthn,rnd->rthd", scores.softmax(-1), values).to(dtype)
    expected = torch.einsum("rthn,rnd->thd", (scores - scores.amax((0, 3), keepdim=True)).exp(), values)
    expected /= (scores - scores.amax((0, 3), keepdim=True)).exp().sum((0, 3)).unsqueeze(-1)

    def rank(group: Group) -> Tensor:
        outs_of_all = outs[group.rank].repeat(1, 3, 1)
        return ContextParallel(group).merge(outs_of_all, scores[group.rank].logsumexp(-1).repeat(1, 3))

    for merged in LocalWorld(3).run(rank):
        assert merged.dtype == dtype
        near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(merged.float(), expected, **near)

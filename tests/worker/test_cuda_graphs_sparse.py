# SPDX-License-Identifier: Apache-2.0
"""Captured steps of sparse attention, on CPU (see test_cuda_graphs): what a scheduler makes of random requests gives the tokens
that eager steps of plain torch give, with prompts in chunks, prefix hits, preemptions and drafts. The back end is the kernels',
with their references in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.kernels.attention.heuristics import SplitKvWorkspace
from phalanx.layout.mtp import Mtp
from phalanx.models import registry, weights
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.layers.attention.sparse_latent import SparseLatentBackend
from phalanx.models.layers.attention.sparse_rows import KernelRows
from phalanx.models.layers.attention.triton_latent import TritonLatentBackend
from phalanx.models.mtp import MtpHead
from phalanx.models.slices import LayerContext
from phalanx.worker.graph_buffers import GraphSize
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.speculation.model_proposer import ModelProposer
from tests.support import kernels_sparse
from tests.support.engine_drive import BLOCK
from tests.support.models_deepseek import with_module
from tests.support.worker_drafts import K, require_alike
from tests.support.worker_graphs import CPU, SLOTS, TOKENS, Counting, alike, make_runner, requests, serve

FAMILIES = ("deepseek_v32", "glm_moe_dsa")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("sparse")
    return {family: with_module(parent, family)[0] for family in FAMILIES}


def kernels_backend(shape: ModelShape) -> SparseLatentBackend:
    assert shape.indexer is not None
    return SparseLatentBackend(TritonLatentBackend(CPU, own_prefill=True, most_tokens=8192), shape.indexer.topk)


def mtp_of(folder: Path) -> ModelProposer:
    shape, context = ModelShape.from_folder(folder), LayerContext(Solo(), torch.float32, CPU, last_embeds=True)
    target = registry.build(shape, range(shape.num_layers), context)
    weights.load(target, folder)
    head = MtpHead(Mtp.of(shape), target, context)
    head.load(folder)
    sizes: dict[str, Any] = {"slots": SLOTS, "max_rows": SLOTS, "max_seq_len": 128, "block_size": BLOCK}
    return ModelProposer(head, kernels_backend(shape), **sizes, dtype=torch.float32, device=CPU)


def runner_of(folder: Path, capturer: Counting | None, **options: Any) -> ModelRunner:
    shape = ModelShape.from_folder(folder)
    return make_runner(folder, capturer, attention=lambda: kernels_backend(shape), tokens=TOKENS, **options)


def plain_runner(folder: Path) -> ModelRunner:
    shape = ModelShape.from_folder(folder)
    return make_runner(folder, None, attention=lambda: select_backend(CPU, torch.float32, shape.head_dim, shape.latent))


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_give_the_tokens_of_plain_torch(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, capturer, arrivals = kernels_sparse.put_references(monkeypatch), Counting(), requests(0)
    outputs, scheduler = serve([runner_of(folders[family], capturer)], arrivals)
    counted = scheduler.counters
    assert counted.prefix_hits
    assert counted.preemptions
    assert sum(capturer.replays.values()) == counted.steps  # none was eager
    assert {kind for kind, _ in calls} == {"choose", "sparse", "dense"}
    wanted, _ = serve([plain_runner(folders[family])], arrivals)
    alike(outputs, wanted)


def test_a_captured_size_with_as_many_rows_as_tokens_has_prompts(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 tokens and 24 + 8 rows: token t is not row t."""
    kernels_sparse.put_references(monkeypatch)
    graphs = runner_of(folders["deepseek_v32"], Counting()).graphs
    assert graphs is not None
    assert graphs.mixed_buffers is not None
    batch = graphs.mixed_buffers.batch(GraphSize(32, 24, 8), graphs._tables.device, None)
    assert batch.kv_lengths is not None
    assert len(batch.token_ids) == len(batch.kv_lengths)
    batch.query_starts[1:25], batch.query_starts[25:] = 1, 21  # a decode row, and 20 tokens of a prompt
    batch.kv_lengths[0], batch.kv_lengths[24] = 5, 20
    batch.positions[0], batch.positions[1:21], batch.kv_slots[:21] = 4, torch.arange(20), torch.arange(21)
    rows = KernelRows(batch, 8, SplitKvWorkspace(CPU))
    assert rows._rows.lengths[:21].tolist() == [5, *range(1, 21)]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_drafts_change_no_answer(
    folders: dict[str, Path], family: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, capturer, arrivals = kernels_sparse.put_references(monkeypatch), Counting() if graphs else None, requests(1, 10)
    runner = runner_of(folders[family], capturer, max_drafts=K, proposer=mtp_of(folders[family]))
    updates, scheduler = serve([runner], arrivals, max_drafts=K, drafts_keep_kv=True)
    wanted, _ = serve([plain_runner(folders[family])], arrivals)
    require_alike(updates, wanted)
    assert scheduler.stats().draft_tokens > 100
    assert ("prefill" in {kind for kind, _ in calls}) == (not graphs)

# SPDX-License-Identifier: Apache-2.0
"""A runner that was profiled and captured as at the start of a rank, on CPU or GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.models import registry, weights
from phalanx.models.cache import LayerCache, empty_caches
from phalanx.models.layers.attention.backend import AttentionBackend
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.slices import LayerContext
from phalanx.worker import memory_profile
from phalanx.worker.cuda_graphs import CudaGraphCapturer, EagerCapturer, GraphCapturer
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.sampler import Sampler
from tests.support.worker_graphs import Fixed

SLOTS, BLOCK, LONGEST = 24, 16, 2048


def made_runner(
    folder: Path, device: torch.device, dtype: torch.dtype, *, graphs: bool = True, tokens: int = 0,
    kv_cache_dtype: str = "model", attention: AttentionBackend | None = None,
) -> ModelRunner:  # fmt: skip
    shape = ModelShape.from_folder(folder)
    context = LayerContext(Solo(), dtype, device, kv_cache_dtype=kv_cache_dtype)
    model = registry.build(shape, range(shape.num_layers), context)
    weights.load(model, folder)
    on_gpu = device.type == "cuda"
    attention = attention or (select_backend(device, dtype, shape.head_dim) if on_gpu else Fixed())
    capturer: GraphCapturer = CudaGraphCapturer(device) if on_gpu else EagerCapturer()

    def caches(blocks: int) -> list[LayerCache]:
        return empty_caches(model.declared_caches(), blocks, BLOCK, device)

    runner = ModelRunner(
        model, caches(1), attention, Sampler(SLOTS, shape.vocab_size, device), Solo(), max_batch_size=SLOTS, max_seq_len=LONGEST,
        block_size=BLOCK, dtype=dtype, device=device, capturer=capturer if graphs else None, max_num_tokens=tokens,
    )  # fmt: skip
    for step in memory_profile.profiling_steps(
        max_num_tokens=64, max_seq_len=64, max_batch_size=SLOTS, block_size=BLOCK, groups=model.cache_groups
    ):
        runner.run(step).results()
    runner.caches = caches(SLOTS * LONGEST // BLOCK if on_gpu else 400)
    list(runner.capture())
    return runner

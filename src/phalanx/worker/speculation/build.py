# SPDX-License-Identifier: Apache-2.0
"""The proposer that the options name, with its weights: `build`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from phalanx.comm.group import Solo
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.engine.messages import max_rows_per_step
from phalanx.errors import EngineError
from phalanx.layout.draft import DraftLm, DraftNetwork, draft_folder, draft_network
from phalanx.layout.mtp import Mtp
from phalanx.models import registry, weights
from phalanx.models.cache import CACHE_DTYPES
from phalanx.models.decoder import Decoder
from phalanx.models.eagle3 import Eagle3Head, head_tensors
from phalanx.models.layers.attention.backend import AttentionBackend
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.mtp import MtpHead
from phalanx.models.slices import LayerContext
from phalanx.worker.speculation.draft_model import DraftModel
from phalanx.worker.speculation.model_proposer import ModelProposer
from phalanx.worker.speculation.ngram import NgramProposer
from phalanx.worker.speculation.proposer import Proposer

Report = Callable[[int, int], None]


def build(
    options: EngineOptions, target: Decoder, max_seq_len: int, report: Report | None = None
) -> tuple[Proposer | None, nn.Module | None]:  # fmt: skip
    """What proposes drafts on a rank of the last stage, None without speculation; and the network that it has, if it has one.
    report: see `weights.load`. Collective over the target's group."""
    config, device, slots = options.speculation, target.context.device, options.index_batch_size
    if config is None:
        return None, None
    network = draft_network(options, target.shape)
    if network is None:
        ngram = NgramProposer(
            slots, max_seq_len, least=config.lookup_min, most=config.lookup_max, device=device,
            max_prediction=config.max_prediction(max_seq_len),
        )  # fmt: skip
        return ngram, None
    context = draft_context(target.context)
    folder = locate(options.model, options.revision) if config.model is None else draft_folder(config)
    drafter = _drafter(network, folder, target, context, dummy=options.load_format == "dummy")
    if options.load_format == "dummy":
        weights.dummy(drafter, options.seed, report)
    else:
        drafter.load(folder, report)
    proposer = ModelProposer(
        drafter, _backend(options, network.shape, context, max_seq_len), slots=slots,
        max_rows=max_rows_per_step(slots, options.pipeline_parallel_size), max_seq_len=max_seq_len,
        block_size=options.block_size, dtype=context.dtype, device=device,
    )  # fmt: skip
    return proposer, drafter


def _drafter(
    network: DraftNetwork, folder: Path, target: Decoder, context: LayerContext, *, dummy: bool
) -> DraftModel | Eagle3Head | MtpHead:  # fmt: skip
    """The network, without its weights."""
    if isinstance(network, DraftLm):
        return DraftModel(registry.build(network.shape, network.layers, context))
    assert target.embed_tokens is not None, "see `LayerContext.last_embeds`"
    if isinstance(network, Mtp):
        return MtpHead(network, target, context)
    own = not dummy and "embed_tokens.weight" in head_tensors(folder)
    return Eagle3Head(network.with_embedding(own), target.embed_tokens, context)


def draft_context(target: LayerContext) -> LayerContext:
    """What a network is built for: the target's tensor-parallel group, and all experts on each of its data-parallel indices. Drafts
    pay where the target waits for weights, and so the network's are split as the target's are: each rank reads a part of both."""
    return LayerContext(target.group, target.dtype, target.device, kv_cache_dtype=target.kv_cache_dtype, dp=Solo())


def _backend(options: EngineOptions, shape: ModelShape, context: LayerContext, max_seq_len: int) -> AttentionBackend:
    backend = select_backend(
        context.device, context.dtype, shape.head_dim, shape.latent, cache_dtype=CACHE_DTYPES[context.kv_dtype], sinks=shape.sinks,
        block_size=options.block_size, windows=any(window is not None for window in shape.windows),
        most_tokens=options.index_num_tokens or max_seq_len, by_torch=shape.attends_by_torch,
    )  # fmt: skip
    captures = backend.graphs is not None and backend.graphs.captures_prefill
    if options.cuda_graphs and context.device.type == "cuda" and not captures:
        raise EngineError(
            "steps with this draft model cannot be captured",
            held=f"attention back end {backend.name}, heads of {shape.head_dim}, {context.dtype}",
            why="the kernels that can be captured do not take them", next="use cuda_graphs=false, or another draft model",
        )  # fmt: skip
    return backend

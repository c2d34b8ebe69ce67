# SPDX-License-Identifier: Apache-2.0
"""Replace every "auto" and None of `EngineOptions` by a value, with its reason. Pure: the machine is given as a number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.config.experts import Experts, require_places
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.quantization import loaded_as, on_load
from phalanx.errors import LayoutError, OptionError

GPU_STEP_TOKENS = 8192
CPU_STEP_TOKENS = 2048
CPU_KV_BYTES = 1 << 30


@dataclass(frozen=True)
class ResolvedOptions:
    """Options without "auto": device, dtype, max_num_tokens and max_seq_len are set, and on CPU kv_cache_bytes.

    reasons: option -> "value: reason", for each value that was chosen here.
    """

    options: EngineOptions
    reasons: dict[str, str]


def resolve(options: EngineOptions, shape: ModelShape, gpus: int, unusable: str = "") -> ResolvedOptions:
    """Choose the values that the user left open, for this model and a host with this number of GPUs.

    unusable: why it has no GPU, or which further ones cannot be used.

    Raises OptionError or LayoutError for a max_seq_len beyond the model's, missing GPUs, a number of ranks that the number of nodes
    does not divide, and options that have no effect or contradict each other for this model and layout.
    """
    chosen: dict[str, tuple[Any, str]] = {}
    device = _device(options, gpus, unusable or "this host has no GPU", chosen)
    _check_layout(options, shape, gpus if device == "cuda" else None, unusable)
    if options.dtype == "auto":
        why = "the checkpoint's dtype" if device == "cuda" else "fastest and most precise on CPU"
        chosen["dtype"] = concrete_dtype("auto", shape, device), why
    cache = concrete_kv_cache_dtype(options.kv_cache_dtype, shape)
    if options.kv_cache_dtype == "auto":
        chosen["kv_cache_dtype"] = cache, f"the checkpoint has {'no ' if cache == 'model' else ''}KV scales"
    if options.deterministic:
        _check_deterministic(options, shape, device)
        way = ROW_BY_ROW if device == "cpu" else BATCH_INVARIANT
        chosen["deterministic"] = True, way
    max_seq_len = _max_seq_len(options, shape, chosen)
    _max_num_tokens(options, device, max_seq_len, chosen)
    if device == "cpu":
        if options.kv_cache_bytes is None:
            chosen["kv_cache_bytes"] = CPU_KV_BYTES, "1 GiB per rank on CPU, where other processes use the free memory, too"
        if options.cuda_graphs:
            chosen["cuda_graphs"] = False, "not available on CPU"
    return ResolvedOptions(
        options.model_copy(update={name: value for name, (value, _) in chosen.items()}),
        {name: f"{value}: {why}" for name, (value, why) in chosen.items()},
    )


ROW_BY_ROW = "each token is computed alone, so that its bits do not depend on the batch; prompts take as long as decodes"
BATCH_INVARIANT = "kernels give a token the same bits whatever else is in the batch; GEMMs and attention are slower"


def _check_deterministic(options: EngineOptions, shape: ModelShape, device: str) -> None:
    """Raise OptionError for what `deterministic` cannot promise. Which weights it excludes is known as layers are made."""
    cpu = device == "cpu"
    for name, is_set, why in (
        (
            "speculative_config", cpu and options.speculation is not None,
            "tokens are computed one by one, and drafts would gain nothing",
        ),
        ("expert_parallel_size", options.expert_parallel_size > 1, "the groups exchange the tokens of whole steps"),
        ("max_loras", not cpu and options.max_loras > 0, "kernels of adapters divide a step by its adapters"),
        (
            "allreduce_strategy NCCL", not cpu and options.allreduce_strategy == "NCCL",
            "NCCL adds in an order that depends on the size of a step",
        ),
        (
            "redundant_experts or rebalance_experts_every",
            options.redundant_experts > 0 or options.rebalance_experts_every is not None,
            "a token's copy of an expert, and so the rank that adds it, depends on where its request lies",
        ),
        (
            "a model with recurrent layers", not cpu and shape.recurrent is not None,
            "their kernels divide prompts into chunks that begin where a step begins",
        ),
    ):  # fmt: skip
        if is_set:
            raise OptionError(
                f"deterministic excludes {name} on a {device.upper().replace('CUDA', 'GPU')}", why=why, next="leave one of them out"
            )


def concrete_dtype(dtype: str, shape: ModelShape, device: str) -> str:
    """The option `dtype` with "auto" replaced: "fp32", "fp16", "bf16" or, only where they are asked for, "fp8" and
    "int4"."""
    return compute_dtype("auto", shape, device) if dtype == "auto" else dtype


def concrete_kv_cache_dtype(kv_cache_dtype: str, shape: ModelShape) -> str:
    """The option `kv_cache_dtype` with "auto" replaced: "fp8" where the checkpoint has KV scales, else "model". Raises OptionError
    for "int8" where the cache has latents."""
    if kv_cache_dtype == "int8" and shape.latent is not None:
        raise OptionError(
            "kv_cache_dtype='int8' does not work with latent attention", held=f"the model is a {shape.architecture}",
            why="in int8 each key and each value has a scale, and a cache of latents holds neither",
            next="use kv_cache_dtype='fp8' or 'model'",
        )  # fmt: skip
    if kv_cache_dtype != "auto":
        return kv_cache_dtype
    return "fp8" if shape.quantization is not None and shape.quantization.kv else "model"


def compute_dtype(dtype: str, shape: ModelShape, device: str) -> str:
    """The dtype of everything but FP8 GEMMs (and of those GEMMs on a device without FP8): "fp32", "fp16" or "bf16".

    With "auto", "fp8" and "int4" it is the checkpoint's dtype, but fp32 on CPU, and 16 bit on GPU if weights are quantized.
    """
    if dtype != "auto" and not on_load(dtype):
        return dtype
    if device == "cpu":
        return "fp32"
    quantized = on_load(dtype) is not None or shape.quantization is not None
    return "bf16" if quantized and shape.dtype == "fp32" else shape.dtype


def _device(options: EngineOptions, gpus: int, why_none: str, chosen: dict[str, tuple[Any, str]]) -> str:
    if options.device == "cuda" and gpus == 0:
        raise OptionError("device='cuda' needs a GPU", held=why_none, next="use device='cpu', or check nvidia-smi")
    if options.device != "auto":
        return options.device
    device = "cuda" if gpus else "cpu"
    chosen["device"] = device, f"this host has {gpus} GPU{'s' if gpus != 1 else ''}" if gpus else why_none
    return device


def _check_moves(options: EngineOptions, experts: Experts | None) -> None:
    """Raise LayoutError where options ask for moves or copies of experts that the layout does not have."""
    ranks, groups = options.moe_expert_parallel_size, options.expert_parallel_size
    for name in ("redundant_experts", "rebalance_experts_every"):
        value = getattr(options, name)
        if value and groups > 1:
            raise LayoutError(
                f"{name}={value:g} is not supported with expert_parallel_size={groups}",
                why="experts move inside one tensor-parallel group only",
                next="leave it out, or use moe_expert_parallel_size instead of expert_parallel_size",
            )  # fmt: skip
        if value and (experts is None or ranks == 1):
            raise LayoutError(
                f"{name}={value:g} has no effect with moe_expert_parallel_size={ranks}",
                why="the model has no experts" if experts is None else "each rank has a slice of every expert: their load is even",
                next="leave it out" if experts is None else "raise moe_expert_parallel_size, or leave it out",
            )  # fmt: skip
    if experts is not None:
        require_places(experts.count, ranks, options.redundant_experts)


def check_quantize_activations(dtype: str, shape: ModelShape, *, deterministic: bool) -> None:
    """Raise OptionError where the option of this name has no effect, or cannot be with another."""
    quantization = loaded_as(shape.quantization, on_load(dtype))
    schemes = () if quantization is None else (quantization, *quantization.others)
    if not any(scheme.int4 is not None for scheme in schemes):
        copied = any(scheme.copied is not None for scheme in schemes)
        raise OptionError(
            "quantize_activations has no effect with this checkpoint",
            why="dtype='fp8' copies its dense layers to FP8" if copied else "it has no weights of 4-bit integers",
            next="leave one of them out" if copied else "leave it out, or use dtype='int4' with a checkpoint in 16 bit",
        )  # fmt: skip
    if deterministic:
        raise OptionError(
            "quantize_activations does not work with deterministic",
            why="it quantizes activations in steps of many tokens alone", next="leave one of them out",
        )  # fmt: skip


def _check_experts(tp: int, moe_ep: int, ep: int, experts: Experts | None) -> None:
    """Raise LayoutError where tp ranks cannot share a layer's experts, moe_ep runs of them, or ep such groups cannot."""
    if tp % moe_ep:
        raise LayoutError(
            f"moe_expert_parallel_size={moe_ep} does not divide tensor_parallel_size={tp}",
            why="experts are split inside the tensor-parallel group", next=f"use one of {_divisors(tp)}",
        )  # fmt: skip
    if experts is None:
        return
    for name, size in (("moe_expert_parallel_size", moe_ep), ("expert_parallel_size", ep)):
        if experts.count % size:
            raise LayoutError(
                f"{name}={size} does not divide the model's {experts.count} experts", next=f"use one of {_divisors(experts.count)}",
            )  # fmt: skip


def _check_context_parallel(options: EngineOptions, shape: ModelShape) -> None:
    """Raise LayoutError where decode_context_parallel_size has nothing to divide, or no ranks to divide it over."""
    size, tp = options.decode_context_parallel_size, options.tensor_parallel_size
    if size > 1 and shape.latent is None:
        raise LayoutError(
            f"decode_context_parallel_size={size} needs a model with latent attention",
            held=f"{shape.architecture} caches keys and values, which ranks split by heads",
            next="leave it out; a larger tensor_parallel_size holds more tokens",
        )  # fmt: skip
    if size > 1 and shape.indexer is not None:
        raise LayoutError(
            f"decode_context_parallel_size={size} does not work with sparse attention", held=f"the model is a {shape.architecture}",
            why="the indexer scores the keys of all tokens before a query, of which a rank would have a part", next="leave it out",
        )  # fmt: skip
    if tp % size:
        raise LayoutError(
            f"decode_context_parallel_size={size} does not divide tensor_parallel_size={tp}",
            why="the tokens of latents are divided inside the tensor-parallel group", next=f"use one of {_divisors(tp)}",
        )  # fmt: skip


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)


def _check_layout(options: EngineOptions, shape: ModelShape, gpus: int | None, unusable: str) -> None:
    ep, moe_ep = options.expert_parallel_size, options.moe_expert_parallel_size
    if ep > 1 and moe_ep > 1:
        raise LayoutError(
            f"expert_parallel_size={ep} and moe_expert_parallel_size={moe_ep} exclude each other",
            why="the first splits experts over more ranks, the second inside the tensor-parallel group", next="give one of them",
        )  # fmt: skip
    for name, size in (("expert_parallel_size", ep), ("moe_expert_parallel_size", moe_ep)):
        if size > 1 and shape.experts is None:
            raise LayoutError(
                f"{name}={size} needs a model with experts", held=f"{shape.architecture} has no experts", next=f"use {name}=1"
            )
    if options.expert_traffic is not None and (options.load_format != "dummy" or shape.experts is None):
        raise OptionError(
            f"expert_traffic={options.expert_traffic} needs a model with experts and load_format='dummy'",
            held=f"{shape.architecture}, load_format={options.load_format!r}", why="a trained router must choose the experts",
            next="leave expert_traffic out",
        )  # fmt: skip
    if options.quantize_activations:
        check_quantize_activations(options.dtype, shape, deterministic=options.deterministic)
    _check_experts(options.tensor_parallel_size, moe_ep, ep, shape.experts)
    _check_context_parallel(options, shape)
    if options.expert_exchange in ("ALL_TO_ALL", "ONE_SIDED") and ep == 1:
        raise LayoutError(
            f"expert_exchange={options.expert_exchange!r} has no effect with expert_parallel_size=1",
            why="there are no other groups to exchange tokens with", next="leave it out, or raise expert_parallel_size",
        )  # fmt: skip
    if options.max_batch_size < ep:
        raise OptionError(
            f"max_batch_size={options.max_batch_size} is below expert_parallel_size={ep}",
            why="each of the groups runs requests of its own", next=f"use at least max_batch_size={ep}",
        )  # fmt: skip
    _check_moves(options, shape.experts)
    if options.node_rank >= options.nnodes:
        raise LayoutError(
            f"node_rank={options.node_rank} is not below nnodes={options.nnodes}", why="hosts are numbered from 0",
            next=f"use 0..{options.nnodes - 1}",
        )  # fmt: skip
    sizes = f"tensor_parallel_size={options.tensor_parallel_size} x pipeline_parallel_size={options.pipeline_parallel_size}"
    sizes += f" x expert_parallel_size={ep}" if ep > 1 else ""
    world = options.world_size
    if world % options.nnodes:
        raise LayoutError(
            f"nnodes={options.nnodes} does not divide {sizes} = {world} ranks", why="each node runs the same number of ranks",
            next="choose sizes whose product is a multiple of nnodes",
        )  # fmt: skip
    here = world // options.nnodes
    if gpus is not None and here > gpus:
        raise LayoutError(
            f"{sizes} needs {here} GPUs on this host",
            held="; ".join(filter(None, [f"it has {gpus} GPU{'s' if gpus > 1 else ''}", unusable])),
            why="each rank needs a GPU of its own", next="use smaller sizes, more nodes, or device='cpu'",
        )  # fmt: skip


def require_one_host(options: EngineOptions) -> None:
    """Raise OptionError for several replicas over several hosts."""
    if options.replicas > 1 and options.nnodes > 1:
        raise OptionError(
            f"replicas={options.replicas} was given with nnodes={options.nnodes}", why="the engines of one server run on its host",
            next="start a server on each group of hosts, with a load balancer before them",
        )  # fmt: skip


def _max_seq_len(options: EngineOptions, shape: ModelShape, chosen: dict[str, tuple[Any, str]]) -> int:
    if options.max_seq_len is None:
        chosen["max_seq_len"] = shape.max_positions, "the model's limit"
        return shape.max_positions
    if options.max_seq_len > shape.max_positions:
        raise OptionError(
            f"max_seq_len={options.max_seq_len} exceeds the model's limit of {shape.max_positions} positions",
            next=f"use at most {shape.max_positions}",
        )  # fmt: skip
    return options.max_seq_len


def _max_num_tokens(options: EngineOptions, device: str, max_seq_len: int, chosen: dict[str, tuple[Any, str]]) -> None:
    ep = options.expert_parallel_size
    longest = max_seq_len * ep  # a prompt runs on one of the groups, whose part of a step is 1/ep
    part = "one step" if ep == 1 else f"one group's part of a step, of expert_parallel_size={ep} parts"
    unchunked = not options.enable_chunked_prefill
    if unchunked and options.max_decode_gap_ms is not None:
        raise OptionError(
            f"max_decode_gap_ms={options.max_decode_gap_ms} cannot be kept without chunked prefill",
            why="each prompt must fit one step then, and decodes wait for it", next="enable chunked prefill, or give no bound",
        )  # fmt: skip
    if options.max_num_tokens is None:
        tokens = GPU_STEP_TOKENS if device == "cuda" else CPU_STEP_TOKENS
        why = f"enough to keep a {'GPU' if device == 'cuda' else 'CPU'} busy, and steps stay short"
        if unchunked and longest > tokens:
            tokens, why = longest, f"without chunked prefill, a prompt of max_seq_len must fit into {part}"
        chosen["max_num_tokens"] = tokens, why
    elif unchunked and options.max_num_tokens < longest:
        raise OptionError(
            f"max_num_tokens={options.max_num_tokens} is below max_seq_len={max_seq_len}" + (f" x {ep}" if ep > 1 else ""),
            why=f"without chunked prefill, a prompt must fit into {part}",
            next=f"use max_num_tokens={longest}, or a smaller max_seq_len",
        )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Replace every "auto" and None of `EngineOptions` by a value, with its reason. Pure: the machine is given as a number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.errors import LayoutError, OptionError

GPU_STEP_TOKENS = 8192
CPU_STEP_TOKENS = 2048
CPU_KV_BYTES = 1 << 30


@dataclass(frozen=True)
class Resolved:
    """Options without "auto": device, dtype, max_num_tokens and max_seq_len are set, and on CPU kv_cache_bytes.

    reasons: option -> "value: reason", for each value that was chosen here.
    """

    options: EngineOptions
    reasons: dict[str, str]


def resolve(options: EngineOptions, shape: ModelShape, gpus: int) -> Resolved:
    """Choose the values that the user left open, for this model and a host with this number of GPUs.

    Raises OptionError or LayoutError for a max_seq_len beyond the model's, missing GPUs, expert parallelism of a model without
    experts, and a number of ranks that the number of nodes does not divide.
    """
    chosen: dict[str, tuple[Any, str]] = {}
    device = _device(options, gpus, chosen)
    _check_layout(options, shape, gpus if device == "cuda" else None)
    if options.dtype == "auto":
        why = "the checkpoint's dtype" if device == "cuda" else "fastest and most precise on CPU"
        chosen["dtype"] = compute_dtype("auto", shape, device), why
    if options.kv_cache_dtype == "auto":
        has_kv_scales = shape.quantization is not None and shape.quantization.kv
        why = "the checkpoint has KV scales" if has_kv_scales else "the checkpoint has no KV scales"
        chosen["kv_cache_dtype"] = ("fp8" if has_kv_scales else "model"), why
    max_seq_len = _max_seq_len(options, shape, chosen)
    _max_num_tokens(options, device, max_seq_len, chosen)
    if device == "cpu":
        if options.kv_cache_bytes is None:
            chosen["kv_cache_bytes"] = CPU_KV_BYTES, "1 GiB per rank on CPU, where other processes use the free memory, too"
        if options.cuda_graphs:
            chosen["cuda_graphs"] = False, "not available on CPU"
    return Resolved(
        options.model_copy(update={name: value for name, (value, _) in chosen.items()}),
        {name: f"{value}: {why}" for name, (value, why) in chosen.items()},
    )


def compute_dtype(dtype: str, shape: ModelShape, device: str) -> str:
    """The dtype of everything but FP8 GEMMs (and of those GEMMs on a device without FP8): "fp32", "fp16" or "bf16".

    With "auto" and "fp8" it is the checkpoint's dtype, but fp32 on CPU, and 16 bit on GPU if the GEMMs are in FP8.
    """
    if dtype not in ("auto", "fp8"):
        return dtype
    if device == "cpu":
        return "fp32"
    in_fp8 = dtype == "fp8" or shape.quantization is not None
    return "bf16" if in_fp8 and shape.dtype == "fp32" else shape.dtype


def _device(options: EngineOptions, gpus: int, chosen: dict[str, tuple[Any, str]]) -> str:
    if options.device == "cuda" and gpus == 0:
        raise OptionError("device='cuda' needs a GPU", held="this host shows no GPU", next="use device='cpu', or check nvidia-smi")
    if options.device != "auto":
        return options.device
    device = "cuda" if gpus else "cpu"
    chosen["device"] = device, f"this host has {gpus} GPU{'s' if gpus != 1 else ''}" if gpus else "this host has no GPU"
    return device


def _check_layout(options: EngineOptions, shape: ModelShape, gpus: int | None) -> None:
    ep, moe_ep = options.expert_parallel_size, options.moe_expert_parallel_size
    if ep > 1 and moe_ep > 1:
        raise LayoutError(
            f"expert_parallel_size={ep} and moe_expert_parallel_size={moe_ep} exclude each other",
            why="the first splits experts over more ranks, the second inside the tensor-parallel group", next="give one of them",
        )  # fmt: skip
    for name, size in (("expert_parallel_size", ep), ("moe_expert_parallel_size", moe_ep)):
        if size > 1:
            raise LayoutError(
                f"{name}={size} needs a model with experts", held=f"{shape.architecture} has no experts", next=f"use {name}=1"
            )
    if options.node_rank >= options.nnodes:
        raise LayoutError(
            f"node_rank={options.node_rank} is not below nnodes={options.nnodes}", why="hosts are numbered from 0",
            next=f"use 0..{options.nnodes - 1}",
        )  # fmt: skip
    sizes = f"tensor_parallel_size={options.tensor_parallel_size} x pipeline_parallel_size={options.pipeline_parallel_size}"
    world = options.world_size
    if world % options.nnodes:
        raise LayoutError(
            f"nnodes={options.nnodes} does not divide {sizes} = {world} ranks", why="each node runs the same number of ranks",
            next="choose sizes whose product is a multiple of nnodes",
        )  # fmt: skip
    here = world // options.nnodes
    if gpus is not None and here > gpus:
        raise LayoutError(
            f"{sizes} needs {here} GPUs on this host", held=f"it has {gpus} GPU{'s' if gpus > 1 else ''}",
            why="each rank needs a GPU of its own", next="use smaller sizes, more nodes, or device='cpu'",
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
    unchunked = not options.enable_chunked_prefill
    if options.max_num_tokens is None:
        tokens = GPU_STEP_TOKENS if device == "cuda" else CPU_STEP_TOKENS
        why = f"enough to keep a {'GPU' if device == 'cuda' else 'CPU'} busy, and steps stay short"
        if unchunked and max_seq_len > tokens:
            tokens, why = max_seq_len, "without chunked prefill, a prompt of max_seq_len must fit into one step"
        chosen["max_num_tokens"] = tokens, why
    elif unchunked and options.max_num_tokens < max_seq_len:
        raise OptionError(
            f"max_num_tokens={options.max_num_tokens} is below max_seq_len={max_seq_len}",
            why="without chunked prefill, a prompt must fit into one step",
            next=f"use max_num_tokens={max_seq_len}, or a smaller max_seq_len",
        )  # fmt: skip

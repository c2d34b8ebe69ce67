# SPDX-License-Identifier: Apache-2.0
"""Every "auto" and None of `EngineOptions` becomes concrete, with its reason. Pure: the machine comes in as a number of GPUs."""

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
    """Concrete options: device, dtype, max_num_tokens and max_seq_len are set, and kv_cache_bytes on CPU.

    reasons: option -> why it has its value, for each value that was chosen here.
    """

    options: EngineOptions
    reasons: dict[str, str]


def resolve(options: EngineOptions, shape: ModelShape, gpus: int) -> Resolved:
    """Decide what the user left open, for a model and a host with so many GPUs.

    Raises OptionError or LayoutError for what cannot be: a length beyond the model's, GPUs that are not there, experts of a
    model that has none, ranks that do not spread evenly over the nodes.
    """
    chosen: dict[str, tuple[Any, str]] = {}
    device = _device(options, gpus, chosen)
    _check_layout(options, shape, gpus if device == "cuda" else None)
    if options.dtype == "auto":
        why = "the checkpoint's own" if device == "cuda" else "CPUs compute fastest and most exactly in it"
        chosen["dtype"] = compute_dtype("auto", shape, device), why
    if options.kv_cache_dtype == "auto":
        made_for_it = shape.quantization is not None and shape.quantization.kv
        why = "the checkpoint was made for it" if made_for_it else "nothing says that the model bears less"
        chosen["kv_cache_dtype"] = ("fp8" if made_for_it else "model"), why
    max_seq_len = _max_seq_len(options, shape, chosen)
    _max_num_tokens(options, device, max_seq_len, chosen)
    if device == "cpu":
        if options.kv_cache_bytes is None:
            chosen["kv_cache_bytes"] = CPU_KV_BYTES, "1 GiB per rank on CPU, where free memory belongs to others too"
        if options.cuda_graphs:
            chosen["cuda_graphs"] = False, "there are none on CPU"
    return Resolved(
        options.model_copy(update={name: value for name, (value, _) in chosen.items()}),
        {name: f"{value}: {why}" for name, (value, why) in chosen.items()},
    )


def compute_dtype(dtype: str, shape: ModelShape, device: str) -> str:
    """What `dtype` means for everything but products in FP8, and for those where the device has none: "fp32", "fp16" or "bf16".

    With "auto" and "fp8" the checkpoint's own, but fp32 on CPU, and 16 bit for products in FP8 on GPU.
    """
    if dtype not in ("auto", "fp8"):
        return dtype
    if device == "cpu":
        return "fp32"
    in_fp8 = dtype == "fp8" or shape.quantization is not None
    return "bf16" if in_fp8 and shape.dtype == "fp32" else shape.dtype


def _device(options: EngineOptions, gpus: int, chosen: dict[str, tuple[Any, str]]) -> str:
    if options.device == "cuda" and gpus == 0:
        raise OptionError(
            "device='cuda' was asked for", held="this host shows no GPU", next="use device='cpu', or look at nvidia-smi"
        )
    if options.device != "auto":
        return options.device
    device = "cuda" if gpus else "cpu"
    chosen["device"] = device, f"this host has {gpus} GPU{'s' if gpus != 1 else ''}" if gpus else "this host shows no GPU"
    return device


def _check_layout(options: EngineOptions, shape: ModelShape, gpus: int | None) -> None:
    ep, moe_ep = options.expert_parallel_size, options.moe_expert_parallel_size
    if ep > 1 and moe_ep > 1:
        raise LayoutError(
            f"expert_parallel_size={ep} and moe_expert_parallel_size={moe_ep} were asked for",
            why="the one splits experts over more ranks, the other inside the tensor-parallel group", next="give one of them",
        )  # fmt: skip
    for name, size in (("expert_parallel_size", ep), ("moe_expert_parallel_size", moe_ep)):
        if size > 1:
            raise LayoutError(
                f"{name}={size} was asked for", held=f"{shape.architecture} has no experts", next=f"leave {name} at 1"
            )
    if options.node_rank >= options.nnodes:
        raise LayoutError(
            f"node_rank={options.node_rank} was asked for", held=f"nnodes is {options.nnodes}", why="hosts count from 0",
            next=f"use 0..{options.nnodes - 1}",
        )  # fmt: skip
    sizes = f"tensor_parallel_size={options.tensor_parallel_size} x pipeline_parallel_size={options.pipeline_parallel_size}"
    world = options.world_size
    if world % options.nnodes:
        raise LayoutError(
            f"{sizes} = {world} ranks were asked for", held=f"nnodes is {options.nnodes}", why="each node holds as many ranks",
            next="choose sizes whose product the nodes divide",
        )  # fmt: skip
    here = world // options.nnodes
    if gpus is not None and here > gpus:
        raise LayoutError(
            f"{sizes} = {here} ranks on this host were asked for", held=f"it has {gpus} GPU{'s' if gpus > 1 else ''}",
            why="each rank needs a GPU of its own", next="use smaller sizes, more nodes, or device='cpu'",
        )  # fmt: skip


def _max_seq_len(options: EngineOptions, shape: ModelShape, chosen: dict[str, tuple[Any, str]]) -> int:
    if options.max_seq_len is None:
        chosen["max_seq_len"] = shape.max_positions, "the model's own limit"
        return shape.max_positions
    if options.max_seq_len > shape.max_positions:
        raise OptionError(
            f"max_seq_len={options.max_seq_len} was asked for", held=f"the model's positions end at {shape.max_positions}",
            why="it has never seen later ones", next=f"use at most {shape.max_positions}",
        )  # fmt: skip
    return options.max_seq_len


def _max_num_tokens(options: EngineOptions, device: str, max_seq_len: int, chosen: dict[str, tuple[Any, str]]) -> None:
    whole_prompts = not options.enable_chunked_prefill
    if options.max_num_tokens is None:
        tokens = GPU_STEP_TOKENS if device == "cuda" else CPU_STEP_TOKENS
        why = f"keeps {'a GPU' if device == 'cuda' else 'a CPU'} busy, and a step short"
        if whole_prompts and max_seq_len > tokens:
            tokens, why = max_seq_len, "a prompt of max_seq_len must fit one step without chunked prefill"
        chosen["max_num_tokens"] = tokens, why
    elif whole_prompts and options.max_num_tokens < max_seq_len:
        raise OptionError(
            f"max_num_tokens={options.max_num_tokens} was asked for with enable_chunked_prefill off",
            held=f"max_seq_len is {max_seq_len}", why="a prompt must then fit one step",
            next=f"use max_num_tokens={max_seq_len}, or a smaller max_seq_len",
        )  # fmt: skip

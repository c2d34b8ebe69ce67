# SPDX-License-Identifier: Apache-2.0
"""Whether the model fits into the GPUs of the layout, and what would make it fit."""

from __future__ import annotations

from phalanx.errors import PhalanxError
from phalanx.health import memory
from phalanx.health.check import Check, Finding, Need, error, ok, size, skipped, warning
from phalanx.health.subject import Subject

ESTIMATE = "weights and KV cache are exact, the rest at most"


def examine(subject: Subject) -> list[Finding]:
    options, shape = subject.options, subject.model_shape
    assert options is not None
    if shape is None:
        return [skipped("the model's shape is not known on this host")]
    try:
        if not subject.on_gpu:
            return [_on_cpu(subject)]
        gpus = subject.gpus_in_use
        if not gpus:
            return [skipped("no GPU is visible")]
        smallest = min(gpus, key=lambda gpu: gpu.total - gpu.used)
        free = smallest.total - smallest.used if not subject.servers else smallest.total
        need = memory.budget(options, shape, free, on_gpu=True)
    except PhalanxError as failure:
        return [skipped(f"the layout is refused: {failure}")]
    rank = need.rank
    facts = {"need": need.least, "free": free, "weights": rank.weights, "beside": rank.beside, "graphs": rank.graphs}
    if rank.kv_tokens == 0:
        return [_too_large(subject, need, free, smallest.index, facts)]
    shorter = memory.sequence_remedy(options, shape, need)
    if shorter is not None and options.max_seq_len is not None:
        return [
            warning(
                f"the KV cache has room for {shorter.options['max_seq_len']:,} tokens, and max_seq_len={options.max_seq_len:,}",
                "use a shorter max_seq_len, or more GPUs",
                f"phalanx serve {options.model} {shorter.flags}",
                **facts,
            )
        ]
    return [
        ok(
            f"{size(need.least)} of {size(free)} are needed on GPU {smallest.index} ({ESTIMATE}); {rank.kv_tokens:,} tokens of KV"
            " cache fit beside",
            **facts,
            kv_tokens=rank.kv_tokens,
        )
    ]


def _too_large(subject: Subject, need: memory.MemoryBudget, free: int, index: int, facts: dict[str, int]) -> Finding:
    options, shape = subject.options, subject.model_shape
    assert options is not None
    assert shape is not None
    entries = memory.remedies(options, shape, free, len(subject.devices.gpus))
    fitting = [entry for entry in entries if entry.fits]
    shown = fitting[:4] or entries[:3]
    lines = [
        f"{entry.flags} frees {entry.freed / 1e9:.2f} GB" + (f" and needs {entry.gpus} GPUs" if entry.gpus > 1 else "")
        for entry in shown
    ]
    if not fitting:
        lines.append("none of them alone suffices")
    return error(
        f"{need.least / 1e9:.2f} GB are needed on GPU {index} ({need.text()}), and {free / 1e9:.2f} GB are free",
        "; ".join(lines),
        *(f"phalanx serve {options.model} {_others(subject)}{entry.flags}" for entry in shown[:2]),
        **facts,
        remedies=[{"options": entry.options, "freed": entry.freed, "fits": entry.fits, "gpus": entry.gpus} for entry in entries],
    )


def _others(subject: Subject) -> str:
    """The layout that stays as it is."""
    assert subject.options is not None
    options = subject.options
    sizes = {
        "tp": options.tensor_parallel_size, "pp": options.pipeline_parallel_size, "ep": options.expert_parallel_size,
        "moe_ep": options.moe_expert_parallel_size,
    }  # fmt: skip
    return "".join(f"--{name}_size {size} " for name, size in sizes.items() if size > 1)


def _on_cpu(subject: Subject) -> Finding:
    options, shape = subject.options, subject.model_shape
    assert options is not None
    assert shape is not None
    need = memory.budget(options, shape, on_gpu=False)
    if options.kv_cache_bytes is not None and options.kv_cache_bytes < need.rank.block:
        return error(
            f"kv_cache_bytes={options.kv_cache_bytes:,} is less than one KV block of {need.rank.block:,} bytes",
            "give the KV cache at least one request of full length",
            f"phalanx serve {options.model} --kv_cache_bytes {need.sequence}",
            block=need.rank.block,
            sequence=need.sequence,
        )
    return ok(
        f"{size(need.rank.weights)} of weights on each rank; one request of full length takes {size(need.sequence)} of KV cache",
        weights=need.rank.weights,
    )


CHECK = Check(
    name="memory_budget",
    what="bytes that the model takes on each GPU against those that are free",
    why="weights, activations, graphs and one KV block must fit: otherwise the start ends out of memory, minutes after it began",
    cure="larger TP, a smaller batch, FP8, PP, or shorter sequences",
    threads=(
        "https://github.com/vllm-project/vllm/issues/11251",
        "https://github.com/vllm-project/vllm/issues/15598",
        "https://github.com/vllm-project/vllm/issues/19186",
        "https://github.com/vllm-project/vllm/issues/16118",
    ),
    examine=examine,
    needs=(Need.MODEL,),
    symptoms=(r"out of memory", r"OutOfMemory", r"not a single KV block fits", r"CapacityError"),
)

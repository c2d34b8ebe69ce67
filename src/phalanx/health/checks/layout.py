# SPDX-License-Identifier: Apache-2.0
"""Whether the model can be laid out over the ranks, and what it computes in on these GPUs."""

from __future__ import annotations

from phalanx.config.resolve import resolve
from phalanx.errors import PhalanxError
from phalanx.health.check import Check, Finding, Need, error, note, ok, skipped
from phalanx.health.subject import Subject
from phalanx.plan.layout import Layout, require_suits


def examine(subject: Subject) -> list[Finding]:
    options, shape = subject.options, subject.model_shape
    assert options is not None
    if shape is None:
        return [skipped("the model's shape is not known on this host")]
    ranks = subject.ranks_here
    try:
        require_suits(Layout(options.pipeline_parallel_size, options.expert_parallel_size, options.tensor_parallel_size), shape)
        resolve(options, shape, max(ranks, len(subject.devices.gpus)) if subject.on_gpu else 0)
    except PhalanxError as failure:
        return [error(str(failure), failure.next or "choose other sizes")]
    old = [gpu for gpu in subject.gpus_in_use if gpu.sm < 89]
    quantized = options.dtype == "fp8" or shape.quantization is not None
    if quantized and old:
        return [
            note(
                f"{old[0].name} has no FP8 arithmetic: weights take one byte, and GEMMs compute in 16 bit",
                "use dtype='bf16' where memory suffices",
            )
        ]
    ep = f", ep {options.expert_parallel_size}" if options.expert_parallel_size > 1 else ""
    return [ok(f"{ranks} ranks on this host, tp {options.tensor_parallel_size}, pp {options.pipeline_parallel_size}{ep}")]


CHECK = Check(
    name="layout",
    what="the model's sizes against the layout",
    why="heads that do not divide, more stages than layers, or a length beyond the model's end a start at once",
    cure="use sizes that divide",
    threads=("https://github.com/vllm-project/vllm/issues/1435", "https://github.com/vllm-project/vllm/issues/367"),
    examine=examine,
    needs=(Need.MODEL,),
    symptoms=(r"divide", r"parallel_size", r"max_seq_len", r"layers", r"nnodes"),
)
